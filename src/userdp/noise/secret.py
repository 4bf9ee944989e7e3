"""Where randomness comes from: one 256-bit secret a run, one stream per purpose and step.

The guarantee rests on nobody being able to guess or subtract the noise. So the secret comes from
the operating system; every stream is keyed by a hash of the secret, the run it is bound to, the
purpose and the step, so no two steps, purposes or runs share one. A fixed seed exists for tests,
and the statement says so when it was used.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, kw_only=True)
class RunSecret:
    """The key of all randomness of one run. Never logged, never exported."""

    key: bytes
    fixed_seed: bool

    def __repr__(self) -> str:
        return "RunSecret(<secret>)"

    @staticmethod
    def from_system() -> RunSecret:
        """256 bits from the operating system."""
        return RunSecret(key=secrets.token_bytes(32), fixed_seed=False)

    @staticmethod
    def fixed_for_tests(seed: int) -> RunSecret:
        """A repeatable secret: anyone who knows the seed can remove the noise."""
        return RunSecret(
            key=hashlib.blake2b(f"fixed:{seed}".encode(), digest_size=32).digest(), fixed_seed=True
        )

    def bound_to(self, context: str) -> RunSecret:
        """The secret for one run: what it trains, how, on which data.

        A copy of the run with anything changed then draws other noise; were it the same, the
        difference of the two models would show the data without any.
        """
        key = hashlib.blake2b(context.encode(), key=self.key, digest_size=32).digest()
        return replace(self, key=key)

    def stream_key(self, purpose: str, step: int) -> bytes:
        """128 bits that key the stream of one purpose at one step."""
        return hashlib.blake2b(f"{purpose}:{step}".encode(), key=self.key, digest_size=16).digest()

    def ledger_key(self) -> bytes:
        """256 bits that mark a ledger's rows: nothing about any stream follows from them."""
        return hashlib.blake2b(b"userdp ledger key", key=self.key, digest_size=32).digest()

    def rng(self, purpose: str, step: int) -> np.random.Generator:
        """The stream of one purpose at one step; asking again gives the same stream.

        >>> secret = RunSecret.fixed_for_tests(1)
        >>> secret.rng("noise", 3).random() == secret.rng("noise", 3).random()
        True
        >>> secret.rng("noise", 3).random() == secret.rng("noise", 4).random()
        False
        """
        key = int.from_bytes(self.stream_key(purpose, step), "little")
        return np.random.Generator(np.random.Philox(key=key))

"""Where randomness comes from: a 256-bit secret a run, a stream for each purpose, step and piece.

The guarantee rests on nobody being able to guess or subtract the noise. So the secret comes from
the operating system. Every stream is keyed by a hash of the secret, the run that it is bound to,
the purpose, the step and the piece, so no two of these share a stream. A fixed seed exists for
tests, and the statement says so when it was used.

A stream is made of one of two generators (docs/guarantees.md): Philox, which is fast and passes all
statistical tests, or ChaCha20, a cipher.

Nothing here has a state: any step's stream can be asked for at any time, in any process.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from userdp.errors import InputError

PHILOX, CHACHA20 = "philox", "chacha20"
# What a stream can be made of, and how many bytes key it.
KEY_BYTES = {PHILOX: 16, CHACHA20: 32}


def check_randomness(name: str) -> None:
    """Refuse what no stream is made of."""
    if name not in KEY_BYTES:
        raise InputError(f"randomness={name!r} is not known; there are {', '.join(KEY_BYTES)}.")


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
        """The secret for one run, bound to what the run trains, how, and on which data.

        So a copy of the run in which anything differs draws different noise. With the same noise,
        the difference of the two models would show the data without noise.
        """
        key = hashlib.blake2b(context.encode(), key=self.key, digest_size=32).digest()
        return replace(self, key=key)

    def streams(
        self, purpose: str, randomness: str = PHILOX, *, changes: Sequence[tuple[int, str]] = ()
    ) -> Streams:
        """The streams of one purpose. A part sees nothing else of the secret.

        `changes` are steps, in order, and what the secret is bound to from each of them on.
        """
        check_randomness(randomness)
        if ":" in purpose:
            # "noise:1" at step 2 would be "noise" at step 1, piece 2.
            raise ValueError(f"purpose {purpose!r}: leave out the colon, which ends a purpose.")
        later = tuple((step, self.bound_to(nonce)) for step, nonce in changes)
        return Streams(secret=self, purpose=purpose, randomness=randomness, later=later)

    def ledger_key(self) -> bytes:
        """256 bits that mark a ledger's rows. They say nothing about any stream."""
        return hashlib.blake2b(b"userdp ledger key", key=self.key, digest_size=32).digest()


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The streams of one purpose, by step and by piece of the step.

    >>> noise = RunSecret.fixed_for_tests(1).streams("noise")
    >>> noise.rng(3).random() == noise.rng(3).random()
    True
    >>> noise.rng(3).random() == noise.rng(4).random()
    False
    """

    secret: RunSecret
    purpose: str
    randomness: str = PHILOX
    # Secrets that take the place of the first: each with the step that it begins with, in order.
    later: tuple[tuple[int, RunSecret], ...] = ()

    def key(self, step: int, piece: int = 0) -> bytes:
        """The bits that key one stream: 128 of them, or 256 for ChaCha20."""
        size = KEY_BYTES[self.randomness]
        name = f"{self.purpose}:{step}" + (f":{piece}" if piece else "")
        secret = self.secret
        for first, other in self.later:
            secret = other if step >= first else secret
        return hashlib.blake2b(name.encode(), key=secret.key, digest_size=size).digest()

    def rng(self, step: int, piece: int = 0) -> np.random.Generator:
        """One stream. Asked for again, it gives the same numbers again."""
        key = self.key(step, piece)
        if self.randomness == CHACHA20:
            from userdp.chacha import chacha20_rng

            return chacha20_rng(key)
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))

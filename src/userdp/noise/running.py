"""Correlated noise during a run: what it remembers, in which order it goes, and its state."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from userdp.errors import InputError
from userdp.noise.banded import Banded
from userdp.noise.contract import Noise
from userdp.noise.correlate import add_from_streams_, advance_, advance_buffers_
from userdp.noise.draw import add_normal_
from userdp.noise.strategies.bands import Bands
from userdp.noise.strategies.digest import from_numbers, numbers_of
from userdp.noise.strategies.unbanded import Buffered, InverseBands
from userdp.streams import Streams

# What a run may not change between its steps, because the noise of all of them is one.
FIXED = ("offset", "size", "held", "noise_stddev")
# Numbers of C that two machines compute differ by less.
SAME = 1e-6
NEARLY_SAME = 1e-3
STATE = {"step", "coefficients", "memory", *FIXED}


@dataclass(kw_only=True)
class Memory:
    """The next step, the strategy, and the vectors that the strategy goes on from."""

    matrix: Bands | InverseBands | Buffered
    step: int = 0
    vectors: Tensor | None = None
    fixed: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class RunningBanded(Banded):
    """The noise of one run. It has a memory, so steps are taken in order, each once."""

    run: Memory = field(compare=False)

    def started(self) -> Noise:
        """A run is begun by its plan's noise, not by another run's."""
        raise InputError("this noise is that of a run already: begin with the plan's.")

    def add_(
        self,
        values: Tensor,
        *,
        offset: int,
        size: int,
        noise_stddev: float,
        step: int,
        streams: Streams,
    ) -> None:
        """Add the noise of the next step."""
        self._check_next(
            step, offset=offset, size=size, held=values.numel(), noise_stddev=noise_stddev
        )
        if noise_stddev:
            self._add(
                values,
                offset=offset,
                size=size,
                stddev=noise_stddev,
                step=step,
                streams=streams,
            )
        self.run.step += 1

    def _check_next(self, step: int, **fixed: Any) -> None:
        if step != self.run.step or step >= self.steps:
            raise InputError(
                f"step {step} follows {self.run.step} steps of {self.steps}: correlated noise goes "
                "through the steps in their order, each once. Go on from a checkpoint."
            )
        for name, value in fixed.items():
            if self.run.fixed.setdefault(name, value) != value:
                raise InputError(
                    f"{name}={value} was {self.run.fixed[name]} in the step before: the noise of "
                    "all steps is one, so nothing of it may change during a run. Use gaussian "
                    "noise if the clip norm changes."
                )

    def _add(self, values: Tensor, **at: Any) -> None:
        matrix = self.run.matrix
        if isinstance(matrix, Bands) and matrix.bands == 1:
            # Bit for bit what independent noise is.
            add_normal_(values, **at)
        elif isinstance(matrix, Bands):
            past = self._vectors(matrix.bands - 1, values, values.dtype)
            advance_(values, past, matrix.row(at["step"]).tolist(), **at)
        elif isinstance(matrix, InverseBands):
            add_from_streams_(values, matrix.noising.tolist(), **at)
        else:
            buffers = self._vectors(len(matrix.decays), values, torch.float64)
            advance_buffers_(
                values,
                buffers,
                diagonal=matrix.diagonal,
                decays=matrix.decays,
                scales=matrix.scales,
                **at,
            )

    def _vectors(self, count: int, values: Tensor, dtype: torch.dtype) -> Tensor:
        found = self.run.vectors
        if found is None:
            found = torch.zeros((count, values.numel()), dtype=dtype, device=values.device)
        elif found.dtype != dtype:
            raise InputError(f"the noise was {found.dtype} in the steps before, and is {dtype}.")
        self.run.vectors = found.to(values.device)
        return self.run.vectors

    def state_dict(self) -> dict[str, Any]:
        """The step, the strategy and the vectors. Secret: the vectors are the noise itself."""
        return {
            "step": self.run.step,
            "coefficients": torch.from_numpy(numbers_of(self.run.matrix).copy()),
            "memory": self.run.vectors,
            **{name: self.run.fixed.get(name) for name in FIXED},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same noise. Its columns are checked again."""
        if state.keys() != STATE:
            raise InputError("the state is not one of correlated noise.")
        own, given = self.run.matrix, state["coefficients"]
        if not isinstance(given, Tensor) or given.shape != numbers_of(own).shape:
            raise InputError("the state is that of noise with another strategy.")
        # The prices of strategies without bands, and of bins, depend on all numbers of C.
        # Bands are searched for, and the search may end a little elsewhere on another machine.
        close = NEARLY_SAME if isinstance(own, Bands) else SAME
        if not np.allclose(given, numbers_of(own), close, close):
            raise InputError("the state is that of another strategy than the one that is priced.")
        step, vectors = state["step"], state["memory"]
        fixed = {name: state[name] for name in FIXED if state[name] is not None}
        if not isinstance(step, int) or not 0 <= step <= self.steps:
            raise InputError(f"the state is that of step {step!r}, and there are {self.steps}.")
        if step and set(fixed) != set(FIXED):
            raise InputError("the state lacks what the steps before it had in common.")
        if vectors is not None:
            self._check_vectors(vectors, fixed)
        elif step and fixed["noise_stddev"] and self._vectors_needed:
            raise InputError("the state lacks the noise of the steps before it.")
        self.run.matrix = from_numbers(type(own), given.double().numpy(), self.steps)
        # A copy: whoever holds the state may go on from it again.
        self.run.vectors = None if vectors is None else vectors.clone()
        self.run.step, self.run.fixed = step, fixed

    @property
    def _vectors_needed(self) -> int:
        matrix = self.run.matrix
        if isinstance(matrix, Bands):
            return matrix.bands - 1
        return len(matrix.decays) if isinstance(matrix, Buffered) else 0

    def _check_vectors(self, vectors: Any, fixed: dict[str, Any]) -> None:
        wanted = (self._vectors_needed, fixed.get("held"))
        if not isinstance(vectors, Tensor) or tuple(vectors.shape) != wanted:
            raise InputError("the state's noise has another size than this run's.")
        if not math.isfinite(float(vectors.abs().max()) if vectors.numel() else 0.0):
            raise InputError("the state's noise is not finite: the state is damaged.")


def started(noise: Banded) -> RunningBanded:
    """The noise before its first step. Making C checks that its columns have norm at most 1."""
    given = {item.name: getattr(noise, item.name) for item in dataclasses.fields(noise)}
    return RunningBanded(**given, run=Memory(matrix=noise.matrix()))

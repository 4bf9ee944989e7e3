"""A private step in a loop of one's own, small enough to run on several ranks in a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from userdp import Plan, PrivateStep, UserIndex
from userdp.losses import Batch
from userdp.ranks import Ranks
from userdp.streams import RunSecret

WIDTH = 6


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


def usual_plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_users": 40,
        "expected_cohort_size": 12,
        "group_size": 4,
        "steps": 8,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "delta": 1e-3,
    }
    return Plan.sample_users(**(settings | changes))


@dataclass(frozen=True, kw_only=True)
class Data:
    """Users' rows: `owners[i]` owns row i."""

    owners: list[str]
    x: Tensor
    y: Tensor

    @staticmethod
    def of(users: int = 40, *, seed: int = 0, width: int = WIDTH) -> Data:
        rng = torch.Generator().manual_seed(seed)
        owners = [f"u{user}" for user in range(users) for _ in range(1 + user % 5)]
        x = torch.randn(len(owners), width, generator=rng)
        return Data(owners=owners, x=x, y=10 * torch.randn(len(owners), generator=rng))

    def without(self, user: str) -> Data:
        """The rows of everybody else."""
        kept = [row for row, owner in enumerate(self.owners) if owner != user]
        return Data(owners=[self.owners[row] for row in kept], x=self.x[kept], y=self.y[kept])


@dataclass
class Loop:
    """The loop, and what was seen of it."""

    step: PrivateStep
    data: Data
    drawn: list[list[list[int]]] = field(default_factory=list)

    @staticmethod
    def of(
        data: Data,
        plan: Plan,
        *,
        loss: Callable[[nn.Module, Batch], Tensor] = squared_error,
        rate: float = 0.1,
        seed: int | None = 3,
        model: nn.Module | None = None,
        **options: Any,
    ) -> Loop:
        if model is None:
            torch.manual_seed(1)
            model = nn.Linear(data.x.shape[1], 1)
        step = PrivateStep(
            model,
            torch.optim.SGD(model.parameters(), lr=rate),
            plan,
            UserIndex.from_owners(data.owners),
            record_loss=loss,
            secret=None if seed is None else RunSecret.fixed_for_tests(seed),
            **options,
        )
        width = data.x.shape[1]
        step.check_model({"x": torch.randn(3, width), "y": torch.randn(3)})
        return Loop(step=step, data=data)

    def take(self) -> None:
        cohort = self.step.draw()
        self.drawn.append([rows.tolist() for rows in cohort])
        self.step.apply({"x": self.data.x[rows], "y": self.data.y[rows]} for rows in cohort)

    def take_all(self) -> Loop:
        while self.step.steps_left:
            self.take()
        return self

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.step.model.parameters()])

    def sum_of_next(self) -> Tensor:
        """The sum of all ranks at the next step, before noise. The step is then not released."""
        found: list[Tensor] = []

        def keep(total: Any) -> None:
            values = total.total.values.clone()
            if total.concentration is None:
                list(Ranks.found().added_up(values, len(values)))
            found.append(values)

        self.step._release = keep  # type: ignore[method-assign]
        self.take()
        return found[0]

"""Local training: several steps of a user on its own records give one update.

Reference: McMahan et al. 2018, Alg. 1, UserUpdateFedAvg; the weights w_k and the estimators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from userdp.errors import InputError
from userdp.updates.contract import UPDATE_RULES, Descent, UpdateRule
from userdp.updates.estimators import (
    ClippedDenominator,
    Estimator,
    FixedDenominator,
    TrueAverage,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from userdp.losses import Batch, RecordLoss
    from userdp.updates.contract import ClipFunction, LocalTraining


class EstimatorName(StrEnum):
    """The estimators of the average update, as the paper calls them; `f` has no guarantee."""

    FIXED = "f_f"
    CLIPPED = "f_c"
    TRUE = "f"


@UPDATE_RULES.register
@dataclass(frozen=True, kw_only=True)
class FedAvg(UpdateRule):
    """How far a user's own training moves the weights, with the opposite sign.

    A user makes E = `local_epochs` passes over its records in batches of B = `local_batch_size`,
    at the rate eta = `local_learning_rate`. After every local step the way from the beginning is
    clipped. The update is theta^0 - theta, so that a server optimizer that subtracts gradients goes
    the user's way: `sgd` at rate 1 is the paper's server.

    A user of n_k records has the weight w_k = min(n_k / w_hat, 1) with w_hat = `user_weight_cap`,
    or 1 without a cap. W = `total_weight` is the public total of all weights; without it, it is the
    number of users. `min_weight` is W_min of the estimator f_c. `update_penalty` is the factor of
    an L2 penalty on the way from the beginning (App. D).
    """

    name: ClassVar[str] = "fedavg"
    keys: ClassVar[Mapping[str, str]] = {
        "local_epochs": "local_epochs",
        "local_batch_size": "local_batch_size",
        "local_learning_rate": "local_learning_rate",
        "user_weight_cap": "user_weight_cap",
        "total_weight": "total_weight",
        "estimator": "estimator",
        "min_weight": "min_weight",
        "update_penalty": "update_penalty",
    }
    local_learning_rate: float
    local_epochs: int = 1
    local_batch_size: int = 8
    user_weight_cap: float | None = None
    total_weight: float | None = None
    estimator: str = EstimatorName.FIXED.value
    min_weight: float | None = None
    update_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in ("local_epochs", "local_batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name}={value!r} must be a whole number, 1 or more.")
        for name in ("local_learning_rate", "user_weight_cap", "total_weight", "min_weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name}={value} must be a finite number above 0.")
        if not 0 <= self.update_penalty < math.inf:
            raise InputError(f"update_penalty={self.update_penalty} must be 0 or more, and finite.")
        if self.estimator not in list(EstimatorName):
            raise InputError(
                f"estimator={self.estimator!r} is unknown: use {', '.join(EstimatorName)}."
            )
        if self.min_weight is None and self.estimator == EstimatorName.CLIPPED:
            raise InputError(
                "min_weight is missing: the estimator f_c divides by at least this weight (W_min)."
            )
        if self.min_weight is not None and self.estimator != EstimatorName.CLIPPED:
            raise InputError(
                f"min_weight={self.min_weight:g} belongs to the estimator f_c, and this is "
                f"{self.estimator}: remove it, or set estimator = 'f_c'."
            )

    @property
    def local_training(self) -> LocalTraining:
        """This rule."""
        return self

    def weight(self, num_records: int) -> float:
        """w_k = min(n_k / w_hat, 1)."""
        return 1.0 if self.user_weight_cap is None else min(num_records / self.user_weight_cap, 1.0)

    def averaging(self, *, num_users: int, expected_groups: float) -> Estimator:
        """f_f, f_c or f."""
        total = num_users if self.total_weight is None else self.total_weight
        if total > num_users:
            raise InputError(
                f"total_weight={total:g} of {num_users:,} users: nobody weighs more than 1."
            )
        if self.estimator == EstimatorName.FIXED:
            return FixedDenominator(factor=num_users / total)
        if self.estimator == EstimatorName.TRUE:
            return TrueAverage(expected_groups=expected_groups)
        assert self.min_weight is not None
        least = self.min_weight * expected_groups / num_users
        return ClippedDenominator(expected_groups=expected_groups, least=least)

    def of_group(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        batch: Batch,
        *,
        record_loss: RecordLoss,
        clip: ClipFunction,
        microbatch_records: int | None = None,
    ) -> list[Tensor]:
        """theta^0 - theta after the user's local training, line by line as in Alg. 1."""
        import torch

        from userdp.losses import at_least_float32, records_in
        from userdp.updates.mean_gradient import mean_gradient

        num_records = records_in(batch)
        own = [parameter.detach().clone() for parameter in parameters]
        start = [at_least_float32(tensor) for tensor in own]
        theta = start
        way = [torch.zeros_like(tensor) for tensor in start]
        try:
            for _ in range(self.local_epochs):
                for first in range(0, num_records, self.local_batch_size):
                    rows = slice(first, first + self.local_batch_size)
                    gradients = mean_gradient(
                        model,
                        parameters,
                        {name: tensor[rows] for name, tensor in batch.items()},
                        record_loss=record_loss,
                        microbatch_records=microbatch_records,
                    )
                    theta = [
                        self.local_step(*of) for of in zip(theta, start, gradients, strict=True)
                    ]
                    way = clip([now - theta_0 for now, theta_0 in zip(theta, start, strict=True)])
                    theta = [theta_0 + moved for theta_0, moved in zip(start, way, strict=True)]
                    for parameter, now in zip(parameters, theta, strict=True):
                        parameter.data.copy_(now)
        finally:
            for parameter, before in zip(parameters, own, strict=True):
                parameter.data.copy_(before)
        return [-tensor for tensor in way]

    def local_step(self, theta: Tensor, theta_0: Tensor, gradient: Tensor) -> Tensor:
        """theta - eta grad. The penalty on the way from the beginning adds its own gradient."""
        if self.update_penalty:
            gradient = gradient + self.update_penalty * (theta - theta_0)
        # As torch's own SGD computes it, to the last bit.
        return theta.add(gradient, alpha=-self.local_learning_rate)

    @property
    def descent(self) -> Descent | None:
        """The local step in numbers. A rule made from this one may have another step."""
        if type(self).local_step is not FedAvg.local_step:
            return None
        return Descent(rate=self.local_learning_rate, penalty=self.update_penalty)

    @property
    def words(self) -> str:
        """How users train, how they are weighted and averaged."""
        said = [
            f"local training (local_epochs={self.local_epochs}, local_batch_size="
            f"{self.local_batch_size}, local_learning_rate={self.local_learning_rate:g}"
        ]
        if self.user_weight_cap is not None:
            said.append(f"user_weight_cap={self.user_weight_cap:g}")
        if self.total_weight is not None:
            said.append(f"total_weight={self.total_weight:g}")
        if self.update_penalty:
            said.append(f"update_penalty={self.update_penalty:g}")
        said.append(f"estimator {self.estimator}")
        if self.min_weight is not None:
            said.append(f"min_weight={self.min_weight:g}")
        return ", ".join(said) + ")"

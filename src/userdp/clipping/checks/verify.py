"""Does the fast path give what the plain loop gives, on this very model?

The plain loop is the oracle: it runs each user alone, padded to its own length only. Training
compares the paths on made-up values when a batch has a new shape (`fast`). The compared users have
norms far apart, and the clip norm lies between them. If nobody were clipped, gradients counted for
the wrong user would still add up to the same sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from userdp.clipping.batches.users import Users
from userdp.clipping.checks.distance import norm_of
from userdp.clipping.checks.made_up import own_groups
from userdp.clipping.checks.wide_reference import wide_gradient
from userdp.clipping.gradients.survey import find_layers
from userdp.clipping.kernels.running import without_plans
from userdp.clipping.layer_groups import Layers
from userdp.clipping.plain import PlainClipping, clipped_sum
from userdp.clipping.rules import ClipRule, FlatClip
from userdp.errors import PLAIN, InputError, MixedExamplesError
from userdp.losses import Batch, RecordLoss, Update, coarsest_dtype, records_in
from userdp.updates.contract import UpdateRule
from userdp.updates.mean_gradient import MEAN_GRADIENT

# How many users are compared: enough to notice that one is counted as another.
_COMPARED = 4
# Each user's gradient is this many times as large as the gradient of the user before.
_SPREAD = 4.0
# Relative differences that rounding explains, by the dtype of the products. Float64 has a coarse
# one because some models compute their norm layers in float32 all the same.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
# In half precision the fast path may be this many times as far from float32 as the plain loop, plus
# a little, because its factors are rounded too.
_TIMES_AS_FAR = 3.0
_LITTLE = 0.03
# If the fast path is this close to the plain loop, it is close enough to float32 as well: norms of
# the two references differ by less than half, so the distance to float32 is at most the plain
# loop's own plus `_LITTLE`. The reference is then not computed.
_CLOSE = 0.02
# If the plain loop is this far from the float32 reference, the reference is not to be trusted.
_FAR = 0.5
# For half precision without a reference.
_COARSE_TOLERANCE = 0.3
# In half precision, clip norms of these shares of the chosen one are tried until the paths agree.
_CLIP_SHARES = (1.0, 0.83, 0.69)
# Updates of more bytes than this are not kept.
_LARGE = 2**30
# For models of at least this many weights, a pass of the oracle has at most this many tokens, or
# one record.
_LARGE_MODEL = 10**9
_TOKENS_OF_LARGE = 1_024


class FastPathError(MixedExamplesError):
    """The fast path and the plain loop disagree on a model."""


class NothingFiniteError(InputError):
    """No gradient of the batch is finite: there is nothing to compare."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How far the fast path is from the plain loop, by parameter, and which rule each layer has.

    Errors are relative to the largest parameter's clipped sum. A parameter that is not in
    `tolerances` has the common `tolerance`.
    """

    errors: dict[str, float]
    tolerance: float
    rules: dict[str, str]
    tolerances: dict[str, float] | None = None

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter that differs most, and by how much; NaN counts as more than any number."""
        return max(self.errors.items(), key=lambda item: (math.isnan(item[1]), item[1]))

    def tolerance_of(self, name: str) -> float:
        """How far a parameter's sum may be off."""
        return (self.tolerances or {}).get(name, self.tolerance)

    def raise_if_different(self) -> None:
        """Raise, naming the parameter, if any error is above its tolerance."""

        def excess(item: tuple[str, float]) -> tuple[bool, float]:
            return math.isnan(item[1]), item[1] / self.tolerance_of(item[0])

        name, error = max(self.errors.items(), key=excess)
        if not error <= self.tolerance_of(name):
            raise FastPathError(
                f"the fast path differs from the plain loop at {name!r}: relative error "
                f"{error:.1e}, tolerance {self.tolerance_of(name):.1e}. The model uses that weight "
                "in a way the fast path does not see, or reads the padding of other users. Use "
                f"{PLAIN}, and please report the model."
            )


# The fast path's sum of a batch of users by a rule, one tensor a parameter.
FastSum = Callable[[Users, ClipRule], Update]


def compare_with_plain(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    rule: ClipRule | None,
    users: Users,
    fast: FastSum,
    *,
    record_loss: RecordLoss,
    compute_dtype: torch.dtype | None,
    compared: int = _COMPARED,
    update: UpdateRule = MEAN_GRADIENT,
) -> Verification:
    """Run some users through both paths, the others with weight zero; raise if they differ.

    The users come from the beginning, the middle and the end of the batch. Only the kind of `rule`
    matters: unless its clip norm is infinite, the comparison chooses one at which some of the users
    are clipped.
    """
    refuse_dropout(model)
    chosen = _spread_out(users.taking_part.nonzero().flatten().tolist(), compared)
    groups = own_groups(users, chosen)
    times = [_SPREAD ** (place % _COMPARED) for place in range(len(chosen))]
    weights = torch.zeros_like(users.weights)
    for user, factor in zip(chosen, times, strict=True):
        start, stop = users.rows_of(user)
        weights[start:stop] = factor * users.weights[start:stop]
    oracle = _Oracle(
        model,
        parameters,
        groups,
        times,
        record_loss=record_loss,
        compute_dtype=compute_dtype,
        update=update,
    )
    few = replace(users, weights=weights)
    shares = _CLIP_SHARES if oracle.is_half else _CLIP_SHARES[:1]
    for number, share in enumerate(shares, 1):
        # In half precision a user's factor may be rounded down to a power of two (`Sums.scale`),
        # which makes it up to half as large. Another clip norm needs other factors, and mostly
        # none is rounded down.
        clip = _with_norm(rule or FlatClip(clip_norm=1.0), share * oracle.middle_norm)
        result = oracle.judge(fast(few, clip), clip)
        try:
            result.raise_if_different()
            return result
        except FastPathError:
            if number == len(shares):
                raise
    raise AssertionError("at least one clip norm is tried")


def _spread_out(users: list[int], most: int) -> list[int]:
    """At most `most` of the users: the first two, and others spread up to the last.

    >>> _spread_out(list(range(10)), 4), _spread_out([0, 1, 2], 4)
    ([0, 1, 5, 9], [0, 1, 2])
    """
    if len(users) <= most:
        return users
    last = len(users) - 1
    places = [0, 1, *(round(1 + (last - 1) * i / (most - 2)) for i in range(1, most - 1))]
    return [users[place] for place in places]


def _with_norm(rule: ClipRule, clip_norm: float) -> ClipRule:
    """The same kind of rule with another clip norm; a rule that clips nothing stays."""
    return rule.at(clip_norm) if rule.bounds_updates else rule


class _Oracle:
    """What the clipped sum of a few users must be, and how far from it rounding may be."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        groups: Sequence[Batch],
        times: Sequence[float],
        *,
        record_loss: RecordLoss,
        compute_dtype: torch.dtype | None,
        update: UpdateRule,
    ) -> None:
        self._model, self._parameters = model, parameters
        self._update = update
        # A pass of the oracle keeps more of every token than a pass of the fast path. It must not
        # be what decides how much memory a large model needs.
        self._records = _records_at_a_time(model, groups)
        plain = PlainClipping(
            model,
            parameters,
            record_loss=record_loss,
            update=update,
            microbatch_records=self._records,
            compute_dtype=compute_dtype,
        )
        taking_part = [
            (group, factor)
            for group, factor in zip(groups, times, strict=True)
            if records_in(group)
        ]
        self._plain = plain
        self._taking_part, self._record_loss = taking_part, record_loss
        size = sum(p.numel() * p.element_size() for p in parameters)
        self._known = list(self._computed()) if size <= _LARGE else None
        self.middle_norm = _middle_norm(self._updates())
        self._layers = Layers(model, parameters)
        self._names = {id(p): name for name, p in model.named_parameters()}
        # Frozen weights count too: adapters may be wider than what they adapt.
        self._dtype = compute_dtype or coarsest_dtype(model.parameters())

    def _updates(self) -> Iterable[Update]:
        """Every user's update. Large ones are computed anew each time: one is held at a time."""
        return self._computed() if self._known is None else self._known

    def _computed(self) -> Iterator[Update]:
        for group, factor in self._taking_part:
            with without_plans():
                update = self._plain.update(group)
            for tensor in update:
                tensor *= factor
            yield update
            del update

    @property
    def is_half(self) -> bool:
        """Whether products are computed in less than float32."""
        return self._dtype not in _TOLERANCES

    def judge(self, found: Update, rule: ClipRule) -> Verification:
        """How far the sum that was found is from what it must be."""
        expected = self._sum(self._updates(), rule)
        rules = {layer.name: layer.rule.__name__ for layer in find_layers(self._model)}
        errors = self._errors(found, expected)
        is_close = all(error <= _CLOSE for error in errors.values())
        if self.is_half and not is_close and (wide := self._wide) is not None:
            reference = self._sum(wide, rule)
            rounding = self._errors(expected, reference)
            if max(rounding.values()) < _FAR:
                tolerances = {
                    name: _TIMES_AS_FAR * error + _LITTLE for name, error in rounding.items()
                }
                return Verification(
                    errors=self._errors(found, reference),
                    tolerance=max(tolerances.values()),
                    tolerances=tolerances,
                    rules=rules,
                )
        return Verification(
            errors=errors,
            tolerance=_TOLERANCES.get(self._dtype, _COARSE_TOLERANCE),
            rules=rules,
        )

    @cached_property
    def _wide(self) -> list[Update] | None:
        """The updates in float32; None where the device has no room for them."""
        return _wide_updates(
            self._model,
            self._parameters,
            self._taking_part,
            self._record_loss,
            self._records,
            self._update,
        )

    def _sum(self, updates: Iterable[Update], rule: ClipRule) -> Update:
        return clipped_sum(updates, rule, like=self._parameters, layers=self._layers.by(rule))

    def _errors(self, found: Update, expected: Update) -> dict[str, float]:
        """The error of each parameter's sum, relative to the largest sum."""
        largest = max(float(tensor.norm()) for tensor in expected)
        return {
            self._names[id(p)]: float((a - b).norm()) / largest if largest > 0 else float(a.norm())
            for p, a, b in zip(self._parameters, found, expected, strict=True)
        }


def _wide_updates(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    groups: Sequence[tuple[Batch, float]],
    record_loss: RecordLoss,
    records: int | None,
    update: UpdateRule,
) -> list[Update] | None:
    """The updates in float32; None where the device has no room for them."""
    try:
        return [
            [
                tensor * factor
                for tensor in wide_gradient(
                    model,
                    parameters,
                    group,
                    record_loss=record_loss,
                    microbatch_records=records,
                    scales=update.scales,
                )
            ]
            for group, factor in groups
        ]
    except torch.OutOfMemoryError:
        return None


def _records_at_a_time(model: nn.Module, groups: Sequence[Batch]) -> int | None:
    """Records in one pass of the oracle; None for all of a user's, unless the model is large."""
    if sum(p.numel() for p in model.parameters()) < _LARGE_MODEL:
        return None
    lengths = [t.shape[1] for group in groups for t in group.values() if t.dim() > 1]
    return max(1, _TOKENS_OF_LARGE // max(lengths, default=1))


def _middle_norm(updates: Iterable[Update]) -> float:
    """A clip norm at which some of the updates are clipped and some are not."""
    norms = list(map(norm_of, updates))
    finite = sorted(norm for norm in norms if math.isfinite(norm))
    if norms and not finite:
        raise NothingFiniteError(
            "no user's gradient is finite, so there is nothing to compare: look at the model's "
            "weights and at the batch."
        )
    positive = [norm for norm in finite if norm > 0]
    return 0.9 * positive[len(positive) // 2] if positive else 1.0


def refuse_dropout(model: nn.Module) -> None:
    """Raise if dropout makes two passes over the same records differ."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise InputError(
                f"dropout at {name!r} is on: one user's pass changes what the next users draw, and "
                "no two passes can be compared. Call model.eval(), or set its p to 0."
            )

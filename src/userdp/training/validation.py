"""Measures the model on other people's records while it is trained.

The numbers are about people who are not trained on, so they say nothing about those who are beyond
what the noised weights say: choosing a checkpoint by them is post-processing. No guarantee covers
the people they are about. So they are released only if those people agree (`validation_curve`), and
only if it was checked that they are not training users.

A measurement changes nothing in training: weights are the same, bit for bit, with and without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from userdp.config.file import Config
from userdp.data.store import UserStore
from userdp.data.tokens import tokenise_by_record
from userdp.errors import InputError
from userdp.evaluation import Evaluation, evaluate_store
from userdp.prices.earlier import Earlier
from userdp.runs.files import overlap
from userdp.runs.validation_curve import PUBLIC, SECRET, Point, read_points, write_points
from userdp.tasks import Task

OnPoint = Callable[[Point], None]


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Which people's records the model is measured on, and when.

    The model is measured before the first step, after the last, and every `every` steps. `store`
    declares that its people agree to the release of the numbers, or that their records are public.
    If that is not so, say `secret`: the numbers are then kept in the run's secret directory.
    `on_point` is told each point. `found` is for callers that measure at steps of their own choice,
    on this store and before the step's point is due: what they found after a step is its point.
    """

    store: UserStore
    every: int | None = None
    secret: bool = False
    on_point: OnPoint | None = None
    found: Callable[[int], Evaluation | None] | None = None

    @staticmethod
    def configured(config: Config, on_point: OnPoint | None) -> Validation | None:
        """As a configuration says; None if it names nobody to measure on."""
        if config.data.evaluation is None:
            return None
        return Validation(
            store=UserStore.open(config.data.evaluation),
            every=config.training.evaluate_every,
            secret=config.data.evaluation_private,
            on_point=on_point,
        )

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise InputError(f"every={self.every}: measure every step or less often, or say None.")


def validator_of(
    validation: Validation | None,
    tokenizer: Any,
    train: UserStore,
    path: Path | None,
    sequence_length: int,
    task: Task,
    compute_dtype: torch.dtype | None,
    earlier: Sequence[Earlier],
    homes: Sequence[Path],
    *,
    goes_on: bool,
) -> Validator:
    """What measures a run on `train`; nothing is measured without a `validation`.

    Where nobody can tell whether people of both stores are the same, nothing is released. If the
    run in `path` `goes_on`, it keeps its points.
    """
    if validation is None:
        return Validator()
    is_released = _are_checked_others(validation, train, earlier, homes) and not validation.secret
    if path is not None and goes_on and not is_released:
        _refuse_released(path / PUBLIC, validation.store)
    return StoreValidator(
        validation,
        tokenizer,
        path=path,
        sequence_length=sequence_length,
        task=task,
        compute_dtype=compute_dtype,
        is_released=is_released,
        goes_on=goes_on,
    )


def _are_checked_others(
    validation: Validation, train: UserStore, earlier: Sequence[Earlier], homes: Sequence[Path]
) -> bool:
    """Whether it is known that nobody in the validation store was trained on.

    Raises `InputError` if somebody was, in this run or in one behind its weights.
    """
    shared = train.shares_users_with(validation.store)
    before = overlap(validation.store, {item.run: 1 for item in earlier}, homes)
    for count in (shared, before.shared):
        if count:
            raise InputError(
                f"{validation.store.path}: {count:,} of its users are training users too. Validate "
                "on a store of other users."
            )
    return shared is not None and before.is_known


def _refuse_released(place: Path, store: UserStore) -> None:
    """Refuse to call numbers secret from now on that the run has released before."""
    if any(point.data == store.fingerprint for point in read_points(place)):
        raise InputError(
            f"{place} has released numbers of these people, which are to be secret now: put "
            "evaluation_private back, or take the file away, and reports and trackers that show it."
        )


class Validator:
    """Measures nothing: there is nobody to measure on."""

    is_released = False
    points: tuple[Point, ...] = ()

    def measure_if_due(self, model: nn.Module, step: int, last: int) -> Point | None:
        """The point after `step` of `last` steps; None if the model is not measured there."""
        return None

    def after_last(self, model: nn.Module, step: int) -> tuple[Point, ...]:
        """All points of a run that has ended with this model, after `step` steps."""
        self.measure_if_due(model, step, step)
        return self.points


class StoreValidator(Validator):
    """Measures one run on a store and keeps its points, in the run's directory if it has one.

    A point that is there already is not measured again: a run that goes on repeats steps exactly,
    and so would their points.
    """

    def __init__(
        self,
        validation: Validation,
        tokenizer: Any,
        *,
        path: Path | None,
        sequence_length: int,
        task: Task,
        compute_dtype: torch.dtype | None,
        is_released: bool,
        goes_on: bool,
    ) -> None:
        self._validation = validation
        self._tokenizer = tokenizer
        self._sequence_length = sequence_length
        self._task = task
        self._compute_dtype = compute_dtype
        self.is_released = is_released
        self._place = None if path is None else path / (PUBLIC if is_released else SECRET)
        self._data = validation.store.fingerprint
        # A store that cannot be measured on is refused now, before the first step.
        tokenise_by_record(
            validation.store, tokenizer, sequence_length=sequence_length, encoding=task.encoding
        )
        # Points of a store that was named before stay in the file, apart from this one's.
        self._all = read_points(self._place) if self._place is not None and goes_on else []
        self._set_points()

    def _set_points(self) -> None:
        self.points = tuple(point for point in self._all if point.data == self._data)

    def measure_if_due(self, model: nn.Module, step: int, last: int) -> Point | None:
        """The point after `step` of `last` steps; None if the model is not measured there."""
        every, found_by_caller = self._validation.every, self._validation.found
        found = None if found_by_caller is None else found_by_caller(step)
        is_due = step in (0, last) or (every is not None and step % every == 0)
        if found is None and not is_due:
            return None
        known = next((point for point in self.points if point.step == step), None)
        return known or self._keep(found or self._measure(model), step)

    def _measure(self, model: nn.Module) -> Evaluation:
        return evaluate_store(
            model,
            self._tokenizer,
            self._validation.store,
            sequence_length=self._sequence_length,
            task=self._task,
            compute_dtype=self._compute_dtype,
        )

    def _keep(self, found: Evaluation, step: int) -> Point:
        told = found.to_json()
        del told["user_loss_quantiles"]
        point = Point(step=step, data=self._data, **told)
        self._all = [*self._all, point]
        self._set_points()
        if self._place is not None:
            write_points(self._place, self._all)
        if self._validation.on_point is not None:
            self._validation.on_point(point)
        return point

"""Measures the model on other people, and decides where the numbers go.

Numbers that may be released go to callbacks, and so to logs, trackers and `trainer_state.json`; the
run's report and model card show them, too. With `eval_is_private` they go to the run's `secret/`
and to the terminal alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.evaluation import Evaluation, evaluate_store
from userdp.runs.validation_curve import Point
from userdp.tasks import Task
from userdp.training.validation import Validation

Metrics = dict[str, float]
# The name of an evaluation set that has none.
ONLY = ""

NOT_FOR_RELEASE = (
    "eval_is_private=True: these numbers are not for release, and callbacks, files and what the "
    "trainer decides by them would tell of them"
)


class Measuring:
    """The people to measure on, by the names of their datasets, and how they are measured."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        stores: Mapping[str, UserStore],
        *,
        sequence_length: int,
        task_of: Callable[[UserStore], Task],
        compute_dtype: torch.dtype | None,
        is_private: bool,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.stores = stores
        self._sequence_length = sequence_length
        self._task_of = task_of
        self._compute_dtype = compute_dtype
        self.is_private = is_private
        # What was found in the first store, by the number of steps.
        self._found: dict[int, Evaluation] = {}
        self._secret_names: set[str] = set()

    def of(self, stores: Mapping[str, UserStore], prefix: str) -> Metrics:
        """The numbers of every store, for the caller alone."""
        told: Metrics = {}
        for name, store in stores.items():
            told |= self._named(self._measure(store), store, _prefix(prefix, name))
        if self.is_private:
            self._secret_names |= told.keys()
        return told

    def on_the_way(self, step: int) -> list[Metrics]:
        """The numbers after `step` steps that callbacks may be told, one by one for each store.

        What is found in the first store becomes a point of the run's curve.
        """
        stores = dict(list(self.stores.items())[:1]) if self.is_private else self.stores
        told: list[Metrics] = []
        for place, (name, store) in enumerate(stores.items()):
            found = self._measure(store)
            if place == 0:
                self._found[step] = found
            told.append(self._named(found, store, _prefix("eval", name)))
        return [] if self.is_private else told

    def check_metric(self, metric: str | None) -> None:
        """Refuse to remember the best of a number that is not measured."""
        if metric is None or not self.stores:
            return
        names = [
            name
            for dataset, store in self.stores.items()
            for name in self._names(store, _prefix("eval", dataset))
        ]
        if metric_name(metric) not in names:
            raise InputError(
                f"metric_for_best_model={metric!r} is not measured here: take one of "
                f"{', '.join(names)}."
            )

    def validation(self) -> Validation | None:
        """The run's own measurements: before training, after it, and what was found on the way."""
        first = next(iter(self.stores.values()), None)
        if first is None:
            return None
        return Validation(
            store=first,
            secret=self.is_private,
            found=self._found.get,
            on_point=_say if self.is_private else None,
        )

    def check_released(self, metrics: Mapping[str, Any], what: str) -> None:
        """Refuse to write or tell numbers that are not for release."""
        secret = sorted(self._secret_names & metrics.keys())
        if secret:
            raise InputError(f"{what} with {secret[0]}: {NOT_FOR_RELEASE}. Leave it out.")

    def has_secrets(self, metrics: Mapping[str, Any]) -> bool:
        """Whether some of the numbers are not for release."""
        return not self._secret_names.isdisjoint(metrics)

    def _measure(self, store: UserStore) -> Evaluation:
        return evaluate_store(
            self._model,
            self._tokenizer,
            store,
            sequence_length=self._sequence_length,
            task=self._task_of(store),
            compute_dtype=self._compute_dtype,
        )

    def _named(self, found: Evaluation, store: UserStore, prefix: str) -> Metrics:
        values = (
            found.loss,
            found.perplexity,
            found.accuracy_top1,
            found.mean_user_loss,
            found.worst_decile_loss,
        )
        return dict(zip(self._names(store, prefix), values, strict=True))

    def _names(self, store: UserStore, prefix: str) -> list[str]:
        # What is predicted of a classified record is one class.
        has_classes = self._task_of(store).encoding.has_classes
        accuracy = "accuracy" if has_classes else "mean_token_accuracy"
        numbers = ("loss", "perplexity", accuracy, "mean_user_loss", "worst_decile_loss")
        return [f"{prefix}_{number}" for number in numbers]


def check_evaluation(
    args: Any, dataset: Any, callbacks: Sequence[Any], *, is_private: bool, ema: float | None
) -> None:
    """Refuse an evaluation without people, and one that cannot go where it is asked to."""
    is_asked = args.eval_strategy != "no" or args.eval_on_start
    if dataset is None and is_asked:
        raise InputError("the arguments ask to evaluate: give an eval_dataset, of other people.")
    if ema is not None and is_asked:
        raise InputError(
            f"ema={ema} with eval_strategy or eval_on_start: the model on the way has the last "
            "weights, and their average is what is released. Leave them out: the average is "
            "measured at the end."
        )
    if is_private:
        refuse_decisions(args, callbacks)


def refuse_decisions(args: Any, callbacks: Sequence[Any]) -> None:
    """Refuse what would decide or remember something by numbers that are not for release."""
    if args.metric_for_best_model is not None:
        raise InputError(
            f"metric_for_best_model={args.metric_for_best_model!r} with {NOT_FOR_RELEASE}. Leave "
            "it out."
        )
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        if issubclass(kind, transformers.EarlyStoppingCallback):
            raise InputError(f"{kind.__name__} with {NOT_FOR_RELEASE}. Leave it out.")


def metric_name(metric: str) -> str:
    """The name of a measured number, which may be said without `eval_`."""
    return metric if metric.startswith("eval_") else f"eval_{metric}"


def _prefix(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if name != ONLY else prefix


def _say(point: Point) -> None:
    loss = math.nan if point.loss is None else point.loss
    print(f"step {point.step:,}: held-out loss {loss:.4f} (not for release)", file=sys.stderr)

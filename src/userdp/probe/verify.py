"""Tests whether one user moves the clipped sum by at most the clip norm C, on this very model.

The guarantee rests on one sentence: adding or removing a user moves a step's clipped sum by at most
C. The probe tries this on many pairs of cohorts (`neighbours`). It uses only made-up rows, of the
declared lengths. So whether a run begins says nothing about anybody. A small version runs before
the first step of every run (`PrivateStep`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from userdp.clipping.batches.users import is_padded
from userdp.clipping.checks.computed import refuse_computed_weights
from userdp.clipping.checks.made_up import MadeUp
from userdp.clipping.checks.verify import refuse_dropout
from userdp.clipping.execute.models import most_positions, pretrained
from userdp.clipping.rules import ClipRule, FlatClip
from userdp.clipping.settings import PathName, StepSettings
from userdp.errors import PLAIN, InputError, MixedExamplesError, UntriedModelError
from userdp.losses import IGNORED_LABEL, Batch, RecordLoss, causal_lm_loss
from userdp.models.checks import BufferGuard, input_embedding, refuse_mixing
from userdp.models.proven import is_proven
from userdp.module_state import ModuleState
from userdp.probe.kept import is_random, what_it_keeps
from userdp.probe.neighbours import Trial
from userdp.probe.seen import Probe
from userdp.updates.contract import UpdateRule
from userdp.updates.mean_gradient import MEAN_GRADIENT

# The longest rows that are tried if nobody says how long records are.
_USUAL_LENGTH = 128


class UnsafeModelError(MixedExamplesError):
    """One user moves the clipped sum of this model by more than the clip norm."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What the probes found."""

    probes: tuple[Probe, ...]
    cause: str

    @property
    def largest_movement(self) -> float:
        """The furthest that one user moved the clipped sum, in clip norms; NaN is largest."""
        return max((p.movement for p in self.probes), key=lambda x: (math.isnan(x), x), default=0.0)

    @property
    def safe(self) -> bool:
        """Whether one user moves the sum by that user's own clipped update and nothing else."""
        return not self.cause

    def raise_if_unsafe(self) -> None:
        """Raise, with the cause, if the model is not safe."""
        if self.cause:
            raise UnsafeModelError(self.cause)


def verify(
    model: nn.Module,
    batch: Batch | None = None,
    *,
    sequence_length: int | None = None,
    group_size: int = 2,
    record_loss: RecordLoss = causal_lm_loss,
    update: UpdateRule | None = None,
    clip: ClipRule | None = None,
    path: PathName | None = None,
    settings: StepSettings | None = None,
) -> Verified:
    """Test with made-up rows whether one user moves the clipped sum by at most the clip norm.

    Without `batch`, a row is up to `sequence_length` token ids of the model's vocabulary. With
    `batch`, rows look like its rows: only its shapes, its dtypes and the integers that occur in it
    are used. `path` names the path to test. By default both paths are tested.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=16,
    ...                     bos_token_id=0, eos_token_id=0)
    >>> checked = verify(GPT2LMHeadModel(config).eval(), sequence_length=12)
    >>> checked.safe, round(checked.largest_movement, 3)
    (True, 1.0)
    """
    found: list[Probe] = []
    cause = ""
    made_up = _made_up(model, batch)
    for tried_path in (path,) if path else ("fast", "plain"):
        try:
            tried = run_probes(
                model,
                made_up,
                sequence_length=sequence_length or usual_length(model, batch),
                group_size=group_size,
                record_loss=record_loss,
                update=update or MEAN_GRADIENT,
                rule=clip or FlatClip(clip_norm=1.0),
                settings=replace(settings or StepSettings(), path=tried_path),
                thorough=True,
            )
        except (InputError, MixedExamplesError) as error:
            tried = Verified(probes=(), cause=str(error))
        found += tried.probes
        cause = cause or tried.cause
    return Verified(probes=tuple(found), cause=cause)


def usual_length(model: nn.Module, batch: Batch | None = None) -> int:
    """The length of made-up rows if nobody gave one. A short batch does not lower it."""
    usual = min(most_positions(model) or _USUAL_LENGTH, _USUAL_LENGTH)
    lengths = [t.shape[1] for name, t in (batch or {}).items() if is_padded(name, t)]
    return max(usual, *lengths) if lengths else usual


def _made_up(model: nn.Module, batch: Batch | None) -> MadeUp:
    if batch is not None and not isinstance(batch, Mapping):
        raise InputError(
            f"verify() takes made-up rows by name, such as {{'input_ids': ...}}, and not a "
            f"{type(batch).__name__}: it tests the model, whatever the plan."
        )
    if batch is not None:
        return MadeUp.like(batch)
    vocabulary = vocabulary_of(model)
    if vocabulary is None:
        raise InputError(
            f"{type(model).__name__} does not tell how many tokens it knows: give verify() a batch "
            "of made-up rows like those it is trained on."
        )
    return MadeUp.tokens(vocabulary)


def vocabulary_of(model: nn.Module) -> int | None:
    """How many token ids a Hugging Face model reads; None for other models."""
    inner = pretrained(model)
    return getattr(None if inner is None else input_embedding(inner), "num_embeddings", None)


def check_model(
    model: nn.Module,
    example: Batch | None,
    *,
    sequence_length: int,
    group_size: int,
    record_loss: RecordLoss,
    update: UpdateRule,
    rule: ClipRule,
    settings: StepSettings,
) -> bool:
    """Run the small probe that every run begins with; raises `UnsafeModelError`.

    A Hugging Face model gets made-up token ids. Other models get rows like the example's. Returns
    False if nothing tells what rows look like. Raises `UntriedModelError` if the model fails on
    such rows.
    """
    if not settings.checks_model:
        if not is_proven(model):
            raise InputError(
                f"StepSettings(check=False) with {type(model).__name__}: only architectures that "
                "are proven by tests can be trained unchecked. Leave check=True."
            )
        if record_loss is not causal_lm_loss or not update.is_mean_gradient:
            raise InputError(
                "StepSettings(check=False) with a record_loss or an update of one's own: it may "
                "mix records, and only the probe would see it. Use causal_lm_loss and the mean "
                "gradient, or leave check=True."
            )
        refuse_dropout(model)
        return True
    vocabulary = vocabulary_of(model)
    reads_tokens = example is None or is_language_modelling(example)
    # This loss reads token ids and their labels, whatever the example looks like.
    reads_tokens = reads_tokens or record_loss is causal_lm_loss
    if vocabulary is not None and reads_tokens:
        made_up = MadeUp.tokens(vocabulary)
    elif example is not None:
        made_up = MadeUp.like(example)
    else:
        return False
    run_probes(
        model,
        made_up,
        sequence_length=sequence_length,
        group_size=group_size,
        record_loss=record_loss,
        update=update,
        rule=rule,
        settings=settings,
    ).raise_if_unsafe()
    return True


def check_positions(model: nn.Module, sequence_length: int) -> None:
    """Refuse rows that are longer than the model has positions for.

    Otherwise the run would end when somebody's long record is drawn, and its end would reveal that.
    """
    positions = most_positions(model)
    if positions is not None and sequence_length > positions:
        raise InputError(
            f"sequence_length={sequence_length} is above the {positions} positions of the model. "
            f"Set it to {positions} or less; longer records are cut into rows."
        )


def is_language_modelling(example: Batch) -> bool:
    """Whether labels are the tokens themselves: rows can be made up without knowing the task."""
    ids, labels = example.get("input_ids"), example.get("labels")
    if ids is None or labels is None or set(example) != {"input_ids", "labels"}:
        return set(example) == {"input_ids"}
    return labels.shape == ids.shape and bool(((labels == ids) | (labels == IGNORED_LABEL)).all())


def run_probes(
    model: nn.Module,
    made_up: MadeUp,
    *,
    sequence_length: int,
    group_size: int,
    record_loss: RecordLoss,
    update: UpdateRule,
    rule: ClipRule,
    settings: StepSettings,
    thorough: bool = False,
) -> Verified:
    """Probe one path. The model is left as it was.

    Raises if the model cannot be tried at all: a layer mixes rows, dropout is on, or rows do not
    fit.
    """
    # Only these two have a fast path.
    has_fast = update.is_mean_gradient or update.local_training is not None
    path: PathName = settings.path if has_fast else "plain"
    modes = {module: module.training for module in model.modules()}
    state, guard = ModuleState(model), BufferGuard(model)
    runs_as_it_is = False
    try:
        refuse_mixing(model)
        refuse_dropout(model)
        if path == "fast" and update.is_mean_gradient:
            refuse_computed_weights(model)
        # This runs in the mode of training: some models write to themselves only in that mode.
        kept = what_it_keeps(model, made_up, record_loss, sequence_length)
        if is_random(model, made_up, record_loss, sequence_length):
            raise InputError(
                f"{type(model).__name__} draws random numbers when it runs: one user's pass "
                "changes what the next users draw, and whoever knows torch's seed can follow that. "
                "Call model.eval(), or take the random layer out."
            )
        runs_as_it_is = True
        trial = Trial(
            model,
            made_up,
            longest=sequence_length,
            group_size=group_size,
            record_loss=record_loss,
            update=update,
            rule=rule,
            settings=replace(settings, path=path),
        )
        cause = _keeps(kept[0]) if kept and path == "fast" else ""
        probes = () if cause and not thorough else tuple(trial.probes(thorough))
        unsafe = next((probe for probe in probes if not probe.safe), None)
        if unsafe is not None and not cause:
            cause = trial.cause_of(unsafe)
        # A step must leave everything that is saved with the model as it was. Restoring is a write,
        # too, so only values are compared.
        state.restore()
        guard.check("a step", values_only=True)
        return Verified(probes=probes, cause=cause)
    except (torch.OutOfMemoryError, MemoryError, InputError, MixedExamplesError):
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        way_out = (
            f"Use {PLAIN}: the model as it is can be run."
            if runs_as_it_is and path == "fast"
            else "If it needs more than token ids, give a record_loss that passes the rest to it."
        )
        raise UntriedModelError(
            f"{type(model).__name__} fails on made-up rows of {sequence_length} tokens "
            f"({type(error).__name__}: {line}). {way_out}"
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
        state.restore()


def _keeps(name: str) -> str:
    return (
        f"the model keeps {name!r} between forward passes, so that one user's length changes the "
        "gradients of others and of later steps (rotary embeddings of type 'dynamic' and "
        f"'longrope' do). Use records that are too short to change it, or {PLAIN}, which "
        "puts it back after every user."
    )

"""What a configuration's keys say together: keys that would be ignored, and values that clash.

Nothing here needs torch, so a wrong configuration is refused before anything is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from userdp.errors import InputError
from userdp.names.optimizers import LIKE_ADAMW, NOTHING_USES_PUBLIC, SCALES
from userdp.optimizers.schedules import share_of_rate
from userdp.sampling import SAMPLERS

if TYPE_CHECKING:
    from userdp.config.file import Config
    from userdp.config.sections import TrainingSettings


def check_keys(config: Config) -> None:
    """Refuse keys that another key, or a missing one, makes meaningless."""
    data, training = config.data, config.training
    for section, key, given, needs, is_there in (
        ("data", "evaluation_private", data.evaluation_private, "[data] evaluation",
         data.evaluation is not None),
        ("training", "evaluate_every", training.evaluate_every, "[data] evaluation",
         data.evaluation is not None),
        ("data", "public_weight", data.public_weight is not None, "[data] public",
         data.public is not None),
        ("data", "public_batch_size", data.public_batch_size, "[data] public",
         data.public is not None),
        ("training", "merge_lora", training.merge_lora, "[model.lora]",
         config.model.lora is not None),
    ):  # fmt: skip
        if given and not is_there:
            raise InputError(
                f"[{section}] {key} has no meaning without {needs}: remove it, or add {needs}."
            )
    # Other updates than the mean gradient have parts that take one user at a time on either path.
    is_gradient = training.update == "gradient"
    for key, given, path in (
        ("microbatch_records", training.microbatch_records and is_gradient, "plain"),
        ("join_records", training.join_records, "fast"),
    ):
        if given and training.path != path:
            raise InputError(
                f"[training] {key} has no meaning with path = {training.path!r}: remove it, or set "
                f"path = {path!r}."
            )
    if data.classes is not None and data.task != "classification":
        raise InputError(
            "[data] classes has no meaning without task = 'classification': remove it, or set that."
        )
    if training.schedule == "constant" and training.schedule_hold:
        raise InputError(
            "[training] schedule_hold has no meaning with schedule = 'constant': remove it, or set "
            "schedule = 'linear'."
        )
    _check_scaled(config)
    if training.learning_rate is None and training.optimizer not in LIKE_ADAMW:
        raise InputError(
            f"[training] learning_rate is missing: there is a default for {', '.join(LIKE_ADAMW)}, "
            f"not for {training.optimizer!r}. Give one."
        )
    sampler = SAMPLERS.named(config.privacy.sampler, unit=config.privacy.unit)
    if sampler.is_ordered and data.selection is None:
        raise InputError(
            f"[data] selection is missing: sampler = {sampler.name!r} takes its batches from it. "
            "Make one by `userdp bound --method min-separation`, or use sampler = 'poisson'."
        )


def _check_scaled(config: Config) -> None:
    """Refuse a `ScaledMomentum` that cannot be had here, and public records that nothing uses."""
    training = config.training
    is_scaled = training.optimizer == "scaled"
    scales = training.optimizer_options.get("scales", SCALES[0]) if is_scaled else ""
    is_public = scales == "public"
    if is_scaled and scales not in SCALES:
        raise InputError(f"scales={scales!r}: use {' or '.join(map(repr, SCALES))}.")
    if config.data.public_weight == 0 and not is_public:
        raise InputError(NOTHING_USES_PUBLIC)
    for key, clashes, remedy in (
        ("scales = 'public' without [data] public", is_public and config.data.public is None,
         "name a store of public records, or leave out scales"),
        (f"update = {training.update!r}", training.update != "gradient", "leave out update"),
        ("shard = true", training.shard, "leave out shard"),
    ):  # fmt: skip
        if is_scaled and clashes:
            raise InputError(
                f"[training] optimizer = 'scaled' with {key}: {remedy}, or use another optimizer."
            )


def check_steps(training: TrainingSettings, last_phase: int) -> None:
    """Refuse what would happen after the last step, such as the `last_phase` of a clip norm.

    The number of steps may come from the command line, so this is asked with the plan.
    """
    if training.steps < 1:
        raise InputError(f"[training] steps={training.steps}: give at least one step.")
    share_of_rate(
        training.schedule,
        training.steps,
        warmup_steps=training.warmup_steps,
        hold=training.schedule_hold,
    )
    if last_phase and last_phase >= training.steps:
        raise InputError(
            f"[privacy] schedule: the phase from step {last_phase} on begins after all "
            f"{training.steps} steps, which count from 0. Remove it, or train for more."
        )

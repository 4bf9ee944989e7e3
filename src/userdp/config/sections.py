"""The sections of a configuration: every key, its type, its default and its meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from userdp import defaults
from userdp.errors import InputError
from userdp.names.optimizers import MOST_RATE, momentum_and_decay, usable
from userdp.names.quantisation import Quantisation
from userdp.names.tasks import TaskName
from userdp.units import Adjacency, SamplingUnit


class Typed(BaseModel):
    """A section in which a number is written as one: neither `true` nor `"40"` is a number."""

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        wanted = cls.model_fields[str(info.field_name)].annotation
        kinds = set(get_args(wanted)) or {wanted}
        if type(value) in {bool, str} - kinds and kinds & {int, float}:
            raise PydanticCustomError("not_a_number", "write a number, without quotes")
        return value


class Section(Typed):
    """A section that takes the keys listed here and no other."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WithParts(Typed):
    """A section that names parts. Beside the keys listed here, it takes the keys of those parts."""

    model_config = ConfigDict(extra="allow", frozen=True)


class DataSettings(Section):
    """What is trained on."""

    store: Path = Field(description="Directory of the user store to train on.")
    evaluation: Path | None = Field(
        None,
        description="Store of other users, to measure the model on. Naming it declares that they "
        "agree to the release of these numbers, or that their records are public.",
    )
    evaluation_private: bool = Field(
        False, description="Those users did not agree: their numbers stay in the run's secrets."
    )
    selection: Path | None = Field(
        None, description="From `userdp bound`: needed where records have several owners."
    )
    public: Path | None = Field(
        None, description="Store of public records, NOT protected: gradients without noise."
    )
    public_weight: float | None = Field(
        None, ge=0, lt=1, description="Share of the public gradient in a step; 0.5."
    )
    public_batch_size: int | None = Field(None, ge=1, description="Public records in a step; 32.")
    sequence_length: int = Field(128, ge=2, description="Longer records are cut into rows.")
    task: TaskName | None = Field(
        None,
        description="What is learned; by default every next token, of chats the assistant's only.",
    )
    record_loss: str | None = Field(
        None,
        pattern=r"^\w+(\.\w+)*:\w+(\.\w+)*$",
        description="A loss of your own, package.module:function; importing it runs its code.",
    )
    chat_template: Path | None = Field(
        None, description="Template of chats, in Jinja; by default the tokenizer's own."
    )
    classes: list[str] | None = Field(
        None, description="task = classification: names of the classes; default: the model's."
    )

    def read_chat_template(self) -> str:
        """The template in the file."""
        assert self.chat_template is not None
        try:
            return self.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise InputError(
                f"[data] chat_template: {self.chat_template} is no text file that can be read."
            ) from None

    select: Literal[
        "random",
        "longest",
        "shortest",
        "highest-perplexity",
        "lowest-perplexity",
        "random-chunk",
    ] = Field("random", description="Which of a user's rows take part, up to group_size.")
    resample: bool = Field(
        False, description="A user of fewer rows than group_size gives so many, drawn again."
    )
    tokens_per_user: int | None = Field(
        None,
        ge=2,
        description="Users of fewer tokens give nothing, the others their first so many.",
    )


class LoraSettings(Section):
    """Train low-rank adapters instead of the whole model."""

    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    targets: str | list[str] = Field("all-linear", description="Modules that get an adapter.")
    freeze_a: bool = Field(
        False, description="Train B alone: noise on both factors of B A would multiply."
    )


class ModelSettings(Section):
    """What is trained."""

    path: str = Field(description="Directory or hub name of a model that fits the task.")
    gguf_file: str | None = Field(None, description="Name of a GGUF file in there.")
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantize: Quantisation | None = Field(
        None, description="Keep the frozen weights in so many bits; needs [model.lora]."
    )
    lora: LoraSettings | None = None

    @model_validator(mode="after")
    def _only_frozen_weights_are_quantised(self) -> ModelSettings:
        if self.quantize and self.lora is None:
            raise ValueError(
                f'quantize = "{self.quantize}" freezes the weights, so all of them cannot be '
                "trained: add [model.lora], or leave quantize out."
            )
        return self


class PrivacySettings(WithParts):
    """What is promised. Every number here is public: none may be counted from the data."""

    unit: SamplingUnit = Field(
        SamplingUnit.USER, description="Sample whole users (ULS) or single records (ELS)."
    )
    num_users: int = Field(description="Public number of users the guarantee is stated for.")
    expected_cohort_size: float | None = Field(
        None,
        description="unit = user: expected users a step; a twentieth, 32 to 1,024; filter: all.",
    )
    expected_batch_size: float | None = Field(
        None, description="unit = record: expected records a step."
    )
    num_records: int | None = Field(
        None, description="unit = record: public number of kept records; num_users * group_size."
    )
    group_size: int | None = Field(
        None,
        description="Most records of a user: per step (4), or at all (record, selection).",
    )
    clip_norm: float | None = Field(
        None, description="L2 bound on each update; automatic clipping has none to choose."
    )
    sampler: str = Field("poisson", description="How a step's users or records are drawn.")
    noise: str = Field("gaussian", description="What is added to the clipped sum.")
    randomness: str = Field(
        "philox", description="What all random draws are made from: philox, or chacha20, a cipher."
    )
    clipping: str = Field(
        "automatic",
        description="How updates are scaled to their bound: flat (the default where a clip_norm "
        "is given), per-layer, per-vector, normalised, automatic (otherwise) or adaptive.",
    )
    clip_count_noise: float | None = Field(
        None, description="clipping = adaptive: noise on the count of unclipped updates."
    )
    clip_quantile: float | None = Field(
        None, description="clipping = adaptive: share of updates to leave unclipped; 0.5."
    )
    delta: float | None = Field(None, description="Default: num_users to the power of -1.1.")
    epsilon: float | None = Field(
        None, description="Target of the steps and all that is paid; or give noise_multiplier."
    )
    noise_multiplier: float | None = None
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    paid: list[Path] = Field(
        default_factory=list[Path],
        description="Files of `userdp quantile` and `dictionary`: part of epsilon's target.",
    )
    other_people: bool = Field(
        False, description="Declares that nobody here was in the runs behind the model."
    )
    non_private: bool = Field(False, description="Train without any guarantee, and say so.")
    record_level: bool = Field(
        False, description="Price each record alone: no guarantee at user level, and say so."
    )
    hypothetical_users: int | None = Field(
        None, description="Price as if there were so many users, and say so: no guarantee."
    )
    hypothetical_cohort_size: float | None = Field(
        None, description="Price as if steps had so many users (unit = record: records)."
    )

    @model_validator(mode="before")
    @classmethod
    def _a_clip_norm_means_flat(cls, given: Any) -> Any:
        if isinstance(given, dict) and "clip_norm" in given:
            return {"clipping": "flat"} | cast("dict[str, Any]", given)
        return given


class TrainingSettings(WithParts):
    """How the noised gradients are used. This is post-processing, so every choice is free."""

    steps: int = defaults.STEPS
    optimizer: str = Field("adamw", description="One of torch's by name; muon, adafactor, scaled.")
    optimizer_options: dict[str, bool | int | float | str | list[float]] = Field(
        default_factory=dict[str, bool | int | float | str | list[float]],
        description="The optimizer's own arguments, such as betas, eps or momentum.",
    )
    weight_decay: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Default: the optimizer's own, which for adamw is 0.01.",
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        lt=MOST_RATE,
        description="Default for adam, adamw and muon: by the model's width.",
    )
    schedule: Literal["constant", "linear", "cosine"] = defaults.SCHEDULE
    warmup_steps: int = Field(0, ge=0, description="Steps over which the rate rises.")
    schedule_hold: float = Field(
        0.0, ge=0, lt=1, description="Share of the run before the rate falls (linear, cosine)."
    )
    ema: float | None = Field(
        None, gt=0, lt=1, description="Release the average of the weights with this decay."
    )
    update: str = Field("gradient", description="What each group gives: its mean gradient.")
    path: Literal["fast", "plain"] = Field(
        "fast", description="plain: one user at a time, slow; the fast path's oracle."
    )
    microbatch_tokens: int | None = Field(
        None, ge=1, description="Padded tokens in one backward pass, for memory (fast)."
    )
    microbatch_records: int | None = Field(
        None, ge=1, description="Records at a time, for memory (plain)."
    )
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Products in this dtype while weights stay in theirs; CUDA: bfloat16."
    )
    merge_lora: bool = Field(
        False, description="Compute with adapters merged into their weights: faster (fast)."
    )
    checkpoint_blocks: bool = Field(
        False, description="Run blocks again in the backward pass: less memory, slower (fast)."
    )
    shard: bool = Field(
        False, description="Divide the model over the ranks of torchrun, for memory (FSDP2)."
    )
    chunk_logits: bool | None = Field(
        None, description="Logits in pieces, for memory (fast); default: where they are large."
    )
    join_records: bool | None = Field(
        None,
        description="Several short records in one row (fast); default: for users it saves much.",
    )
    deterministic: bool = Field(
        False, description="On CUDA: a run that goes on ends bit for bit as if not stopped; slower."
    )
    device: str = "cpu"
    checkpoint_every: int | None = Field(
        None, ge=1, description="Steps from one checkpoint to the next; default: by the minutes."
    )
    checkpoint_minutes: float = Field(
        5.0, gt=0, description="Minutes from one checkpoint to the next."
    )
    evaluate_every: int | None = Field(
        None, ge=1, description="Steps from one measurement on [data] evaluation to the next."
    )
    trackers: list[str] = Field(
        default_factory=list[str],
        description="Where public numbers are logged: tensorboard, trackio, wandb.",
    )
    keep_checkpoints: int = Field(2, ge=1, description="How many checkpoints are kept.")
    fixed_seed: int | None = Field(
        None, description="For tests only: whoever knows it can remove the noise."
    )

    @field_validator("optimizer")
    @classmethod
    def _is_usable(cls, name: str) -> str:
        return usable(name)

    @property
    def workload(self) -> dict[str, Any]:
        """What the optimizer does with noise, in public numbers (`noise.strategies.workload`).

        Decay counts if the learning rate is given; it is tiny otherwise.
        """
        return momentum_and_decay(
            self.optimizer, self.optimizer_options, self.learning_rate, self.weight_decay
        ) | {
            "schedule": self.schedule,
            "warmup_steps": self.warmup_steps,
            "schedule_hold": self.schedule_hold,
        }

    @property
    def on_cuda(self) -> bool:
        """Whether training runs on a CUDA device."""
        return self.device.startswith("cuda")

    @property
    def autocast_dtype(self) -> Literal["bfloat16"] | None:
        """The dtype of products; None means the dtype of the weights."""
        chosen = self.compute_dtype or ("bfloat16" if self.on_cuda else "float32")
        return "bfloat16" if chosen == "bfloat16" else None

"""A training run as a TOML file: typed, and without keys that nobody knows.

Paths are relative to where the command runs. An unknown key is an error with a suggestion, because
a misspelt privacy setting must not fall back to a default.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from userdp.clipping.rules import CLIP_RULES, ClipRule
from userdp.config_problems import first_problem, keys_of_sections
from userdp.earlier import Earlier, inherited
from userdp.errors import InputError
from userdp.history import read_history
from userdp.noise import NOISES
from userdp.own_keys import check_own_keys, own_values
from userdp.paid import Paid, read_paid
from userdp.plan import Plan
from userdp.sampling import SAMPLERS, PublicNumbers
from userdp.units import Adjacency, SamplingUnit
from userdp.updates.contract import UPDATE_RULES, UpdateRule

if TYPE_CHECKING:
    from userdp.bounding.selection import Selection


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _WithParts(BaseModel):
    """A section that names parts. Beside the keys listed here, it takes the keys of those parts."""

    model_config = ConfigDict(extra="allow", frozen=True)


class DataSettings(_Section):
    """What is trained on."""

    store: Path = Field(description="Directory of the user store to train on.")
    evaluation: Path | None = Field(
        None, description="Store of other users, for a held-out loss at the end."
    )
    selection: Path | None = Field(
        None, description="From `userdp bound`: needed where records have several owners."
    )
    sequence_length: int = Field(128, ge=2, description="Longer records are cut into rows.")


class LoraSettings(_Section):
    """Train low-rank adapters instead of the whole model."""

    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    targets: str | list[str] = Field("all-linear", description="Modules that get an adapter.")


class ModelSettings(_Section):
    """What is trained."""

    path: str = Field(description="Directory or hub name of a causal language model.")
    gguf_file: str | None = Field(None, description="Name of a GGUF file in there.")
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: LoraSettings | None = None


class PrivacySettings(_WithParts):
    """What is promised. Every number here is public: none may be counted from the data."""

    unit: SamplingUnit = Field(
        SamplingUnit.USER, description="Sample whole users (ULS) or single records (ELS)."
    )
    num_users: int = Field(description="Public number of users the guarantee is stated for.")
    expected_cohort_size: float | None = Field(
        None, description="unit = user: expected users a step."
    )
    expected_batch_size: float | None = Field(
        None, description="unit = record: expected records a step."
    )
    num_records: int | None = Field(
        None, description="unit = record: public number of kept records; num_users * group_size."
    )
    group_size: int | None = Field(
        None,
        description="Most records of a user: per step, or at all (record, selection).",
    )
    clip_norm: float | None = Field(
        None, description="L2 bound on each update; automatic clipping has none to choose."
    )
    sampler: str = Field("poisson", description="How a step's users or records are drawn.")
    noise: str = Field("gaussian", description="What is added to the clipped sum.")
    clipping: str = Field(
        "flat",
        description="How updates are scaled to their bound: flat, per-layer, normalised, "
        "automatic or adaptive.",
    )
    clip_count_noise: float | None = Field(
        None, description="clipping = adaptive: noise on the count of unclipped updates."
    )
    clip_quantile: float | None = Field(
        None, description="clipping = adaptive: share of updates to leave unclipped; 0.5."
    )
    delta: float
    epsilon: float | None = Field(
        None, description="Target of the steps and all that is paid; or give noise_multiplier."
    )
    noise_multiplier: float | None = None
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    paid: list[Path] = Field(
        default_factory=list[Path],
        description="Files of `userdp quantile --out`: part of what epsilon is the target of.",
    )
    other_people: bool = Field(
        False, description="Declares that nobody here was in the runs behind the model."
    )
    non_private: bool = Field(False, description="Train without any guarantee, and say so.")


class TrainingSettings(_WithParts):
    """How the noised gradients are used. This is post-processing, so every choice is free."""

    steps: int
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: float = Field(1e-3, gt=0)
    schedule: Literal["constant", "linear"] = "constant"
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
    keep_checkpoints: int = Field(2, ge=1, description="How many checkpoints are kept.")
    fixed_seed: int | None = Field(
        None, description="For tests only: whoever knows it can remove the noise."
    )

    @property
    def on_cuda(self) -> bool:
        """Whether training runs on a CUDA device."""
        return self.device.startswith("cuda")

    @property
    def autocast_dtype(self) -> Literal["bfloat16"] | None:
        """The dtype of products; None if it is that of the weights."""
        chosen = self.compute_dtype or ("bfloat16" if self.on_cuda else "float32")
        return "bfloat16" if chosen == "bfloat16" else None


class Config(_Section):
    """A whole run."""

    data: DataSettings
    model: ModelSettings
    privacy: PrivacySettings
    training: TrainingSettings

    def plan(self) -> Plan:
        """The plan that these settings describe, with the noise calibrated if epsilon is given.

        Epsilon is the target of everything together: the looks listed under `paid`, and the steps.
        """
        if self.data.selection is not None:
            return self._bounded().plan()
        privacy = self.privacy
        if privacy.adjacency.fixed_graph and privacy.group_size is None:
            raise InputError(
                f"[privacy] adjacency = {privacy.adjacency.value!r} is for records with several "
                "owners: give [data] selection, made by `userdp bound`."
            )
        if privacy.group_size is None:
            raise InputError("[privacy] group_size is missing.")
        expected, num_records = self._expected_groups(), privacy.num_records
        sampler = SAMPLERS.named(privacy.sampler, unit=privacy.unit)
        public = PublicNumbers(
            num_users=privacy.num_users,
            num_records=num_records or privacy.num_users * privacy.group_size,
            expected_groups=expected,
            group_size=privacy.group_size,
            steps=self.training.steps,
        )
        noise = NOISES.named(privacy.noise)
        own_of_noise = own_values(NOISES, noise, privacy, "privacy", "noise")
        return Plan.of(
            sampler,
            public,
            own=own_values(SAMPLERS, sampler, privacy, "privacy", "sampler"),
            clip=self.clip_rule(),
            noise=noise(noise_multiplier=0.0, **own_of_noise),
            update=self.update_rule(),
            delta=privacy.delta,
            epsilon=privacy.epsilon,
            noise_multiplier=privacy.noise_multiplier,
            adjacency=privacy.adjacency,
            non_private=privacy.non_private,
            paid=self.load_paid(),
            earlier=self.load_earlier(),
        )

    def _expected_groups(self) -> float:
        privacy = self.privacy
        if privacy.unit is SamplingUnit.USER:
            self._refuse("expected_batch_size", "num_records", other=SamplingUnit.RECORD)
            name, value = "expected_cohort_size", privacy.expected_cohort_size
        else:
            self._refuse("expected_cohort_size", other=SamplingUnit.USER)
            name, value = "expected_batch_size", privacy.expected_batch_size
        if value is None:
            raise InputError(f"[privacy] {name} is missing: unit = '{privacy.unit}' needs it.")
        return value

    def clip_rule(self) -> ClipRule:
        """The clip rule these settings describe."""
        kind = CLIP_RULES.named(self.privacy.clipping)
        return kind(**own_values(CLIP_RULES, kind, self.privacy, "privacy", "clipping"))

    def update_rule(self) -> UpdateRule:
        """What each group gives, by these settings."""
        kind = UPDATE_RULES.named(self.training.update)
        return kind(**own_values(UPDATE_RULES, kind, self.training, "training", "update"))

    def _bounded(self) -> Config:
        """The settings with what is public about the selection."""
        selection = self.load_selection()
        assert selection is not None
        if self.privacy.adjacency.fixed_graph:
            known = self._known_of_fixed_graph(selection)
        else:
            known = self._known_of_single_owners(selection)
        return self.model_copy(
            update={
                "privacy": self.privacy.model_copy(update=known),
                "data": self.data.model_copy(update={"selection": None}),
            }
        )

    def _known_of_fixed_graph(self, selection: Selection) -> dict[str, int]:
        """Its realised bound and its size.

        Both depend on who owns what alone, which fixed-graph privacy treats as public.
        """
        privacy = self.privacy
        if privacy.unit is not SamplingUnit.RECORD:
            raise InputError(
                f"[data] selection with adjacency = {privacy.adjacency.value!r} needs [privacy] "
                "unit = 'record': records of several owners are sampled one by one."
            )
        group_size = privacy.group_size or selection.realised_bound
        if group_size < selection.realised_bound:
            raise InputError(
                f"[privacy] group_size = {group_size} is below the {selection.realised_bound} "
                "records a user has in the selection: leave it out, or bound again."
            )
        return {"group_size": group_size, "num_records": privacy.num_records or selection.size}

    def _known_of_single_owners(self, selection: Selection) -> dict[str, int]:
        """The bound that was asked for; what was realised and the size are secret here."""
        from userdp.bounding.edges import Edges

        privacy = self.privacy
        selection.check_user_by_user(Edges.load(self.data.store))
        group_size = privacy.group_size or selection.max_records_per_user
        if privacy.unit is SamplingUnit.RECORD and group_size < selection.max_records_per_user:
            raise InputError(
                f"[privacy] group_size = {group_size} is below the selection's bound of "
                f"{selection.max_records_per_user}, so that some of its records would be left out "
                "at random: leave group_size out, or bound again."
            )
        return {"group_size": group_size}

    def load_paid(self) -> list[Paid]:
        """The looks at the data that the ledger is charged for before the first step."""
        return [read_paid(path) for path in self.privacy.paid]

    def load_earlier(self) -> tuple[Earlier, ...]:
        """The private runs behind the model, as far as its directory says."""
        found = read_history(Path(self.model.path))
        before = [] if found is None else [Earlier.from_json(entry) for entry in found.entries]
        return inherited(before, other_people=self.privacy.other_people)

    def load_selection(self) -> Selection | None:
        """The selection, checked against the store's owners."""
        if self.data.selection is None:
            return None
        from userdp.bounding.edges import Edges
        from userdp.bounding.selection import Selection

        selection = Selection.load(self.data.selection)
        selection.check(Edges.load(self.data.store))
        return selection

    def _refuse(self, *names: str, other: SamplingUnit) -> None:
        """Raise if a key is given that has a meaning only where `other` is sampled."""
        for name in names:
            if getattr(self.privacy, name) is not None:
                raise InputError(
                    f"[privacy] {name} has no meaning with unit = '{self.privacy.unit}': remove "
                    f"it, or set unit = '{other}'."
                )


def load_config(path: Path) -> Config:
    """The configuration in a TOML file."""
    if not path.is_file():
        raise InputError(f"{path}: no such file.")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None
    try:
        config = Config.model_validate(data)
        sections = keys_of_sections(Config)
        check_own_keys(
            config.privacy,
            "privacy",
            {"sampler": SAMPLERS, "noise": NOISES, "clipping": CLIP_RULES},
            sections,
        )
        check_own_keys(config.training, "training", {"update": UPDATE_RULES}, sections)
        config.clip_rule()
    except ValidationError as error:
        raise InputError(f"{path}: {first_problem(error, data, Config)}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return config

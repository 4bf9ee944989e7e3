"""A training run as a TOML file: typed, and without keys that nobody knows.

Paths are relative to where the command runs. An unknown key is an error with a suggestion, because
a misspelt privacy setting must not fall back to a default.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from userdp import defaults
from userdp.clipping.rules import CLIP_RULES, ClipRule
from userdp.config.checks import check_keys, check_steps
from userdp.config.own_keys import check_own_keys, own_values
from userdp.config.problems import first_problem, keys_of_sections
from userdp.config.sections import (
    DataSettings,
    ModelSettings,
    PrivacySettings,
    Section,
    TrainingSettings,
)
from userdp.errors import InputError
from userdp.history import read_history
from userdp.noise import NOISES
from userdp.plan import Plan
from userdp.prices.earlier import Earlier, inherited
from userdp.prices.marks import Mark, RecordLevel, hypothetical
from userdp.prices.paid import Paid, read_paid
from userdp.sampling import SAMPLERS, PublicNumbers, Sampler
from userdp.sampling.poisson_records import UNBOUNDED
from userdp.units import SamplingUnit
from userdp.updates.contract import UPDATE_RULES, UpdateRule, refuse_public

if TYPE_CHECKING:
    from userdp.bounding.selection import Selection


class Config(Section):
    """A whole run."""

    data: DataSettings
    model: ModelSettings
    privacy: PrivacySettings
    training: TrainingSettings = Field(default_factory=lambda: TrainingSettings.model_validate({}))

    def plan(self) -> Plan:
        """The plan that these settings describe, with the noise calibrated if epsilon is given.

        Epsilon is the target of everything together: the looks listed under `paid`, and the steps.
        """
        check_keys(self)
        check_steps(self.training, self.clip_rule().last_phase)
        return self._plan()

    def _plan(self) -> Plan:
        privacy = self.privacy
        if self.data.selection is not None:
            if privacy.record_level:
                raise InputError("[privacy] record_level takes no [data] selection: leave it out.")
            return self._bounded()._plan()
        if privacy.adjacency.fixed_graph and privacy.group_size is None:
            raise InputError(
                f"[privacy] adjacency = {privacy.adjacency.value!r} is for records with several "
                "owners: give [data] selection, made by `userdp bound`."
            )
        group_size, num_records = privacy.group_size, privacy.num_records
        if group_size is None and not privacy.record_level:
            if privacy.unit is SamplingUnit.RECORD:
                raise InputError(
                    "[privacy] group_size is missing: it is the most records that a user keeps. "
                    "`userdp plan` helps to choose it."
                )
            by_default = privacy.model_copy(update={"group_size": defaults.GROUP_SIZE})
            return self.model_copy(update={"privacy": by_default})._plan()
        if group_size is None and num_records is None:
            raise InputError("[privacy] num_records is missing: without group_size it is needed.")
        expected = self._expected_groups()
        sampler = SAMPLERS.named(privacy.sampler, unit=privacy.unit)
        public = PublicNumbers(
            num_users=privacy.num_users,
            num_records=num_records or privacy.num_users * (group_size or 0),
            expected_groups=expected,
            group_size=UNBOUNDED if group_size is None else group_size,
            steps=self.training.steps,
        )
        own = own_values(SAMPLERS, sampler, privacy, "privacy", "sampler")
        self._check_expected(sampler.expected_groups(public, **own), public, sampler)
        noise = NOISES.named(privacy.noise)
        own_of_noise = own_values(NOISES, noise, privacy, "privacy", "noise")
        return Plan.of(
            sampler,
            public,
            own=own,
            clip=self.clip_rule(),
            noise=noise.configured(
                steps=public.steps,
                separation=own.get("separation"),
                optimizer=self.training.workload,
                **own_of_noise,
            ),
            update=self.update_rule(),
            delta=privacy.delta,
            epsilon=privacy.epsilon,
            noise_multiplier=privacy.noise_multiplier,
            adjacency=privacy.adjacency,
            non_private=privacy.non_private,
            mark=self._mark(expected),
            randomness=privacy.randomness,
            paid=self.load_paid(),
            earlier=self.load_earlier(),
        )

    def _check_expected(self, groups: float, public: PublicNumbers, sampler: type[Sampler]) -> None:
        """Refuse a cohort size that is given, and that follows from another key as well."""
        given = self.privacy.expected_cohort_size
        if given is not None and groups != sampler.expected_groups(public):
            raise InputError(
                f"[privacy] expected_cohort_size = {given:g}: by {', '.join(sampler.keys)} it is "
                f"{groups:g} already. Leave expected_cohort_size out."
            )

    def _mark(self, groups: float) -> Mark | None:
        """Why nothing is promised by choice, if so."""
        privacy = self.privacy
        found = hypothetical(
            privacy.num_users,
            groups,
            users=privacy.hypothetical_users,
            cohort_size=privacy.hypothetical_cohort_size,
        )
        if not privacy.record_level:
            return found
        if found is not None:
            raise InputError(
                "[privacy] record_level and hypothetical numbers together have no price here: "
                "leave one of them out."
            )
        if privacy.unit is not SamplingUnit.RECORD:
            raise InputError("[privacy] record_level = true needs unit = 'record'.")
        return RecordLevel()

    def _expected_groups(self) -> float:
        privacy = self.privacy
        if privacy.unit is SamplingUnit.USER:
            self._refuse("expected_batch_size", "num_records", other=SamplingUnit.RECORD)
            return defaults.expected_cohort_size(
                privacy.num_users,
                privacy.expected_cohort_size,
                everybody=self.update_rule().takes_everybody,
            )
        self._refuse("expected_cohort_size", other=SamplingUnit.USER)
        if privacy.expected_batch_size is None:
            raise InputError("[privacy] expected_batch_size is missing: unit = 'record' needs it.")
        return privacy.expected_batch_size

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

    def _known_of_fixed_graph(self, selection: Selection) -> dict[str, Any]:
        """The realised bound and the size of a fixed selection.

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
        known: dict[str, Any] = {
            "group_size": group_size,
            "num_records": privacy.num_records or selection.size,
        }
        return known | (self._known_of_order(selection) if self._is_ordered else {})

    @property
    def _is_ordered(self) -> bool:
        """Whether the batches come from the selection, in a fixed order."""
        return SAMPLERS.named(self.privacy.sampler, unit=self.privacy.unit).is_ordered

    def _known_of_order(self, selection: Selection) -> dict[str, Any]:
        """The batch size and the separation of a selection with batches."""
        batches = selection.batches
        if batches is None or batches.ndim != 2 or selection.separation is None:
            raise InputError(
                f"[data] selection: method {selection.method!r} has no batches in an order. Make "
                "it by `userdp bound --method min-separation`, or use sampler = 'poisson'."
            )
        count, size = batches.shape
        if self.training.steps > count:
            raise InputError(
                f"[training] steps = {self.training.steps}: the selection has {count} batches. "
                "Train for so many steps, or bound again."
            )
        given = self.privacy.expected_batch_size
        if given is not None and given != size:
            raise InputError(
                f"[privacy] expected_batch_size = {given:g}: the selection's batches have {size} "
                "records. Leave it out."
            )
        own = self.privacy.model_extra or {}
        return {
            "expected_batch_size": float(size),
            "separation": own.get("separation", selection.separation),
        }

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
        if config.data.public is not None:
            refuse_public(config.update_rule())
    except ValidationError as error:
        raise InputError(f"{path}: {first_problem(error, data, Config)}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return config

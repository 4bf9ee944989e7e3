"""The configuration: typed, closed, and helpful about what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from userdp.clipping.rules import AutomaticClip, FlatClip
from userdp.config.file import load_config
from userdp.errors import InputError
from userdp.plan import Plan
from userdp.sampling import PoissonRecords, PoissonUsers

GOOD = """
[data]
store = "store"
[model]
path = "model"
[privacy]
num_users = 100
expected_cohort_size = 10
group_size = 4
clip_norm = 1.0
noise_multiplier = 2.0
delta = 1e-3
[training]
steps = 7
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., object]:
    def write(text: str) -> object:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return load_config(path)

    return write


def test_minimal_configuration_gives_its_plan(load: Callable[..., object]) -> None:
    plan = load(GOOD).plan()  # type: ignore[attr-defined]
    assert plan.sampler == PoissonUsers(user_sampling_prob=0.1, group_size=4)
    assert plan.steps == 7
    assert plan.divisor == 10


def test_what_is_left_out_is_chosen_from_public_numbers(load: Callable[..., object]) -> None:
    lines = ("expected_cohort_size", "group_size", "clip_norm", "delta", "[training]", "steps")
    kept = [line for line in GOOD.splitlines() if not line.startswith(lines)]
    plan = load("\n".join(kept)).plan()  # type: ignore[attr-defined]
    assert plan == Plan.sample_users(num_users=100, noise_multiplier=2.0)
    assert plan.clip == AutomaticClip()
    # A clip norm alone still means flat clipping.
    assert load(GOOD).plan().clip == FlatClip(clip_norm=1.0)  # type: ignore[attr-defined]


def test_record_sampling_configuration_gives_its_plan(load: Callable[..., object]) -> None:
    text = GOOD.replace(
        "expected_cohort_size = 10", 'unit = "record"\nexpected_batch_size = 8\nnum_records = 200'
    )
    plan = load(text).plan()  # type: ignore[attr-defined]
    assert plan.sampler == PoissonRecords(record_sampling_prob=0.04, group_size=4)


@pytest.mark.parametrize(
    ("lines", "dtype"),
    [
        ("", None),
        ('device = "cuda"', "bfloat16"),
        ('device = "cuda:1"\ncompute_dtype = "float32"', None),
        ('compute_dtype = "bfloat16"', "bfloat16"),
        ('compute_dtype = "float32"', None),
    ],
)
def test_products_are_in_bfloat16_on_cuda_unless_said_otherwise(
    load: Callable[..., object], lines: str, dtype: str | None
) -> None:
    config = load(_add("training", lines))
    assert config.training.autocast_dtype == dtype  # type: ignore[attr-defined]


def _add(section: str, line: str) -> str:
    return GOOD.replace(f"[{section}]\n", f"[{section}]\n{line}\n")


def _without(key: str) -> str:
    return "".join(line + "\n" for line in GOOD.splitlines() if not line.startswith(f"{key} ="))


PROBLEMS: dict[str, tuple[str, str]] = {
    "misspelt privacy key": (
        _add("privacy", "noise_multiplyer = 1.0"),
        "unknown key 'privacy.noise_multiplyer'; did you mean 'noise_multiplier'",
    ),
    "misspelt training key": (
        _add("training", "learning_rte = 1.0"),
        "unknown key 'training.learning_rte'; did you mean 'learning_rate'",
    ),
    "misspelt section": (
        GOOD + "[trainings]\n",
        "unknown section [trainings]; did you mean [training]",
    ),
    "key like nothing": (
        _add("data", "zzz = 1"),
        "unknown key 'data.zzz'; known keys: chat_template",
    ),
    "misspelt lora key": (
        GOOD + "[model.lora]\nrnk = 4\n",
        "unknown key 'model.lora.rnk'; did you mean 'rank'",
    ),
    "missing section": (
        GOOD.replace('[model]\npath = "model"\n', ""),
        "section [model] is missing",
    ),
    "section of another name": (
        GOOD.replace("[training]", "[train]"),
        "unknown section [train]; did you mean [training]",
    ),
    "section like nothing": (GOOD + "[zzz]\n", "unknown section [zzz]; there are [data], [model]"),
    "key of another section": (
        _add("training", "delta = 1e-6"),
        "unknown key 'training.delta'; it belongs into section [privacy]",
    ),
    "needed key misspelt": (
        GOOD.replace("num_users", "num_user"),
        "key 'privacy.num_users' is missing; did you mean it by 'num_user'",
    ),
    "missing num_users": (_without("num_users"), "key 'privacy.num_users' is missing"),
    "missing store": (_without("store"), "key 'data.store' is missing"),
    "missing clip norm": (
        GOOD.replace("clip_norm = 1.0", 'clipping = "normalised"'),
        "[privacy] clip_norm is missing",
    ),
    "steps in words": (GOOD.replace("steps = 7", 'steps = "many"'), "training.steps = 'many'"),
    "half a step": (GOOD.replace("steps = 7", "steps = 7.5"), "training.steps = 7.5"),
    "unit unknown": (_add("privacy", 'unit = "group"'), "privacy.unit = 'group'"),
    "adjacency unknown": (_add("privacy", 'adjacency = "near"'), "privacy.adjacency = 'near'"),
    "optimizer unknown": (
        _add("training", 'optimizer = "lion"'),
        "[training] optimizer = 'lion' is not known; did you mean 'muon'?",
    ),
    "dtype unknown": (_add("model", 'dtype = "float16"'), "model.dtype = 'float16'"),
    "rank zero": (GOOD + "[model.lora]\nrank = 0\n", "model.lora.rank = 0"),
    "learning rate zero": (_add("training", "learning_rate = 0.0"), "training.learning_rate"),
    "sequence too short": (_add("data", "sequence_length = 1"), "data.sequence_length = 1"),
    "section is a number": (GOOD.replace('[data]\nstore = "store"', "data = 3"), "data = 3"),
    "not TOML": (GOOD + "steps == 7\n", "not valid TOML"),
    "key twice": (GOOD + "steps = 8\n", "not valid TOML"),
}


@pytest.mark.parametrize("what", PROBLEMS)
def test_wrong_configuration_is_refused_with_file_and_key(
    load: Callable[..., object], what: str
) -> None:
    text, expected = PROBLEMS[what]
    with pytest.raises(InputError) as caught:
        load(text)
    assert "run.toml" in str(caught.value)
    assert expected in str(caught.value)


PLAN_PROBLEMS: dict[str, tuple[str, str]] = {
    "neither epsilon nor noise": (_without("noise_multiplier"), "exactly one"),
    "both": (_add("privacy", "epsilon = 3.0"), "exactly one"),
    "epsilon zero": (
        GOOD.replace("noise_multiplier = 2.0", "epsilon = 0.0"),
        "epsilon=0.0 is not a positive",
    ),
    "epsilon nan": (GOOD.replace("noise_multiplier = 2.0", "epsilon = nan"), "epsilon=nan"),
    "epsilon inf": (GOOD.replace("noise_multiplier = 2.0", "epsilon = inf"), "epsilon=inf"),
    "delta one": (GOOD.replace("delta = 1e-3", "delta = 1.0"), "delta=1.0"),
    "delta zero": (GOOD.replace("delta = 1e-3", "delta = 0.0"), "delta=0.0"),
    "noise zero": (GOOD.replace("noise_multiplier = 2.0", "noise_multiplier = 0.0"), "nobody"),
    "clip infinite": (GOOD.replace("clip_norm = 1.0", "clip_norm = inf"), "nobody"),
    "clip zero": (GOOD.replace("clip_norm = 1.0", "clip_norm = 0.0"), "clip_norm=0.0"),
    "less than one user a step": (
        GOOD.replace("expected_cohort_size = 10", "expected_cohort_size = 0.5"),
        "expected_cohort_size=0.5 of 100 users",
    ),
    "one user": (GOOD.replace("num_users = 100", "num_users = 1"), "num_users=1"),
    "batch size of users": (_add("privacy", "expected_batch_size = 4"), "has no meaning"),
    "records of users": (_add("privacy", "num_records = 4"), "has no meaning"),
    "cohort size of records": (_add("privacy", 'unit = "record"'), "has no meaning"),
    "no batch size": (
        _without("expected_cohort_size").replace("[privacy]\n", '[privacy]\nunit = "record"\n'),
        "expected_batch_size is missing",
    ),
    "no group size of records": (
        GOOD.replace(
            "expected_cohort_size = 10", 'unit = "record"\nexpected_batch_size = 8'
        ).replace("group_size = 4", ""),
        "group_size is missing",
    ),
    "group of nobody": (GOOD.replace("group_size = 4", "group_size = 0"), "group_size=0"),
    "no steps": (GOOD.replace("steps = 7", "steps = 0"), "steps=0: give at least one step"),
    "target without a claim": (
        _add("privacy", "non_private = true").replace("noise_multiplier = 2.0", "epsilon = 8.0"),
        "claims no epsilon",
    ),
    "record level of users": (_add("privacy", "record_level = true"), "needs unit = 'record'"),
    "two marks": (
        _without("expected_cohort_size").replace(
            "[privacy]\n",
            '[privacy]\nunit = "record"\nexpected_batch_size = 4\nrecord_level = true\n'
            "hypothetical_users = 1000\n",
        ),
        "leave one of them out",
    ),
    "hypothetically nobody": (_add("privacy", "hypothetical_users = 1"), "at least 2"),
    "hypothetically too many": (
        _add("privacy", "hypothetical_cohort_size = 101"),
        "not a probability",
    ),
}


@pytest.mark.parametrize("what", PLAN_PROBLEMS)
def test_settings_that_make_no_plan_are_refused(load: Callable[..., object], what: str) -> None:
    text, expected = PLAN_PROBLEMS[what]
    with pytest.raises(InputError) as caught:
        load(text).plan()  # type: ignore[attr-defined]
    assert expected in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.toml: no such file"):
        load_config(tmp_path / "nowhere.toml")


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not valid TOML"):
        load_config(path)

"""`userdp dictionary`: words of many users, none of one user alone, and a price that is charged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from dp_accounting.pld import privacy_loss_distribution

from cli_runner import userdp
from stores import KEY
from userdp import Plan, UserStore
from userdp.data.record import Record
from userdp.data.store import write_store
from userdp.data.user_words import votes_of_users
from userdp.ledger.book import Ledger
from userdp.models.word_lstm import WordLSTM, WordLSTMConfig
from userdp.models.words import words_of
from userdp.prices.paid import read_paid

USERS = 400
# The noise is fresh: one of the names is released in less than one of 10^7 looks.
LOOK = ("--epsilon", 4, "--delta", 1e-8, "--words-per-user", 5)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All users write "the cat sat", and each a name of its own, often."""
    place = tmp_path_factory.mktemp("words") / "store"
    records = [
        Record(text, (f"u{user}",), "here")
        for user in range(USERS)
        for text in ("The cat sat.", f"Name{user} name{user} name{user} name{user}")
    ]
    write_store(records, place, key=KEY)
    return place


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    """A copy, whose budget is its own."""
    return Path(shutil.copytree(built, tmp_path / "store"))


def test_each_user_votes_once_for_its_own_most_frequent_words(built: Path) -> None:
    found = votes_of_users(UserStore.open(built), words_of, words_per_user=3)
    # The own name comes first, then ".", "cat", ... of one mention each, by code.
    assert found == {f"name{user}": 1 for user in range(USERS)} | {".": USERS, "cat": USERS}
    assert sum(found.values()) == 3 * USERS


def test_words_of_many_users_are_released_and_those_of_one_are_not(
    store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "words"
    found = userdp("dictionary", store, "--out", out, *LOOK, "--json").json
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    special = {"<unk>", "<s>", "</s>", "<pad>"}
    assert set(tokenizer.get_vocab()) == {"the", "cat", "sat", ".", *special}
    assert (found["words"], found["delta"]) == (4, 1e-8)
    assert found["epsilon"] <= 4
    ids = tokenizer("The cat sat on name7.").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == [
        *("<s>", "the", "cat", "sat", "<unk>", "<unk>", ".", "</s>")
    ]


def test_the_look_is_counted_and_a_run_pays_for_it(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "words"
    found = userdp("dictionary", store, "--out", out, *LOOK, "--json").json
    (entry,) = userdp("budget", store, "--delta", 1e-8, "--json").json["entries"]
    assert entry["what"] == "dictionary, 5 words of each user"
    assert entry["epsilon"] == found["epsilon"]
    paid = read_paid(out / "paid.json")
    plan = Plan.sample_users(
        num_users=USERS, expected_cohort_size=40, steps=3, noise_multiplier=2.0, delta=1e-8
    )
    assert "dictionary" in plan.statement(paid=[paid]).paid[0]
    # By another accountant: its own delta is taken off, and the noises are composed.
    gaussian = privacy_loss_distribution.from_gaussian_mechanism(
        paid.event.events[0].noise_multiplier  # type: ignore[attr-defined]
    )
    step = privacy_loss_distribution.from_gaussian_mechanism(2.0, sampling_prob=0.1)
    both = gaussian.compose(step.self_compose(3))
    left = 1e-8 - found["threshold_delta"]
    assert plan.epsilon(paid=[paid]) == pytest.approx(both.get_epsilon_for_delta(left), rel=2e-3)


def test_the_papers_model_trains_locally_on_a_dictionary_of_its_users(
    store: Path, tmp_path: Path
) -> None:
    words = tmp_path / "words"
    assert userdp("dictionary", store, "--out", words, *LOOK).code == 0
    size = len(transformers.AutoTokenizer.from_pretrained(words))
    torch.manual_seed(0)
    model = WordLSTM(WordLSTMConfig(vocab_size=size, embedding_size=4, state_size=6))
    model.save_pretrained(words)
    config = tmp_path / "run.toml"
    config.write_text(f"""
[data]
store = "{store}"
sequence_length = 5
tokens_per_user = 8
[model]
path = "{words}"
[privacy]
num_users = {USERS}
expected_cohort_size = 8
group_size = 2
clipping = "per-vector"
clip_norm = 2.0
epsilon = 8.0
delta = 1e-7
paid = ["{words / "paid.json"}"]
[training]
steps = 2
update = "fedavg"
local_learning_rate = 0.5
local_batch_size = 1
optimizer = "sgd"
learning_rate = 1.0
schedule = "constant"
""")
    run = tmp_path / "run"
    trained = userdp("train", config, "--out", run, "--json").json
    assert trained["epsilon"] == pytest.approx(8.0, rel=1e-3)
    statement = json.loads((run / "statement.json").read_text())
    assert statement["guarantee"] is True
    assert "dictionary" in statement["paid"][0]
    assert "split evenly over the parameter vectors" in statement["mechanism"]
    assert userdp("ledger", "verify", run, "--json").json["ok"]
    named = Ledger.read(run / "ledger.jsonl").bound_to
    assert named["select"] == "random, 8 tokens of each user"


def test_the_size_counts_special_tokens_and_the_most_frequent_come_first(
    store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "words"
    found = userdp("dictionary", store, "--out", out, *LOOK, "--size", 6, "--json").json
    assert found["words"] == 2
    assert len(transformers.AutoTokenizer.from_pretrained(out)) == 6


@pytest.mark.parametrize(
    ("changed", "said", "spends"),
    [
        (("--epsilon", 0.01), "no word was written by clearly more than", True),
        (("--size", 4), "special tokens", False),
        (("--words-per-user", 0), "words_per_user=0", False),
        (("--out", "nowhere/words"), "no directory", False),
        (("--out", "store"), "is there already", False),
    ],
    ids=lambda value: str(value),
)
def test_what_cannot_be_is_refused_before_it_is_paid_for(
    changed: tuple[str, object],
    said: str,
    spends: bool,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = userdp("dictionary", store, "--out", "words", *LOOK, *changed)
    assert result.code == 2
    assert said in result.err
    assert not Path("words").exists()
    entries = userdp("budget", store, "--json").json["entries"]
    assert bool(entries) == spends


def test_records_with_several_owners_are_refused(tmp_path: Path) -> None:
    records = [Record(f"text {i}", ("X", f"u{i}"), "here") for i in range(5)]
    write_store(records, tmp_path / "store", key=KEY)
    result = userdp("dictionary", tmp_path / "store", "--out", tmp_path / "words", *LOOK)
    assert (result.code, "several owners" in result.err) == (2, True)


def test_two_looks_cost_twice(store: Path, tmp_path: Path) -> None:
    costs = [
        userdp("dictionary", store, "--out", tmp_path / name, *LOOK, "--json").json["event"]
        for name in ("one", "two")
    ]
    assert json.dumps(costs[0]) == json.dumps(costs[1])
    found = userdp("budget", store, "--delta", 1e-7, "--json").json
    assert len(found["entries"]) == 2
    assert found["spent_epsilon"] > 1.3 * found["entries"][0]["epsilon"]

"""Models, stores, selections and runs that cannot be used."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import transformers
from safetensors.torch import load_file, save_file

import models_zoo
from bad_input.making import GOOD, Bad, Place, command, trained


def _changed_model(name: str, says: str, change: Callable[[Path], object], **sections: str) -> Bad:
    """Training on a copy of the model that was changed."""

    def make(place: Place) -> Sequence[object]:
        copy = Path(shutil.copytree(place.shared.model, place.folder / "model"))
        change(copy)
        given = {"model": f"path = '{copy}'"} | sections
        return ("train", place.config(**given), "--out", "run")

    return Bad(name=name, make=make, says=says)


def _settings(**changed: object) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return change


def _pickled(model: Path) -> None:
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({"weights": 1}))


def _cut(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])


def _lacking(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights["transformer.h.0.ln_1.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def _classifier(model: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(model)
    config.num_labels = 2
    transformers.GPT2ForSequenceClassification(config).save_pretrained(model)


def _bare(model: Path) -> None:
    """The saved classifier, and no word of what it is."""
    _classifier(model)
    _settings(architectures=None)(model)
    weights = load_file(model / "model.safetensors")
    save_file(
        {"score.weight": weights["score.weight"]}, model / "model.safetensors", {"format": "pt"}
    )


def _experts(model: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=23,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        max_position_embeddings=32,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(model)


def _remote(model: Path) -> None:
    (model / "modeling.py").write_text("raise SystemExit('the code of a checkpoint ran')\n")
    _settings(model_type="own", auto_map={"AutoModelForCausalLM": "modeling.Model"})(model)


def _large_vocabulary(model: Path) -> None:
    models_zoo.word_tokenizer(tuple(f"x{n}" for n in range(50))).save_pretrained(model)


def _swapped(model: Path) -> Path:
    first, second, *rest = model.name
    return model.with_name("".join([second, first, *rest]))


def _without_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


def _changed_store(name: str, says: str, change: Callable[[Path], object], *line: str) -> Bad:
    """A command on a copy of the store that was changed; `{}` is its place."""

    def make(place: Place) -> Sequence[object]:
        copy = Path(shutil.copytree(place.shared.train, place.folder / "store"))
        change(copy)
        return [word.format(copy) for word in line]

    return Bad(name=name, make=make, says=says)


def _flip_last_byte(name: str) -> Callable[[Path], object]:
    def change(store: Path) -> None:
        content = bytearray((store / name).read_bytes())
        content[-1] ^= 1
        (store / name).write_bytes(content)

    return change


def _selected(name: str, says: str, **arrays: object) -> Bad:
    def make(place: Place) -> Sequence[object]:
        kept = {
            "multiplicity": np.zeros(60, np.int64),
            "max_records_per_user": np.asarray(2),
            "realised_bound": np.asarray(0),
            "method": np.asarray("greedy"),
            "edges_digest": np.asarray("of other edges"),
            "guarantee": np.asarray(True),
        } | arrays
        np.savez(place.folder / "selection.npz", **kept)  # pyright: ignore[reportArgumentType]
        given = place.config(data="selection = 'selection.npz'")
        return ("train", given, "--out", "run")

    return Bad(name=name, make=make, says=says)


def _damaged_run(name: str, says: str, damage: Callable[[Path], object], *line: str) -> Bad:
    def make(place: Place) -> Sequence[object]:
        copy = Path(shutil.copytree(place.shared.run, place.folder / "run"))
        damage(copy)
        return [word.format(copy) for word in line]

    return Bad(name=name, make=make, says=says)


def _looked(name: str, says: str, *options: str) -> Bad:
    """`userdp quantile` of the store, with an option given once more."""
    good = ("--of", "records-per-user", "--quantile", "0.5", "--epsilon", "1", "--delta", "1e-6")
    return Bad(
        name=name,
        make=lambda place: ("quantile", place.shared.train, *good, *options),
        says=says,
    )


def _run_is_there(place: Place) -> Sequence[object]:
    shutil.copytree(place.shared.run, place.folder / "run")
    return ("train", place.config(), "--out", "run")


def _below_a_file(place: Place) -> Sequence[object]:
    place.write("file", "kept")
    return ("train", place.config(), "--out", "file/run")


def _bound(name: str, says: str, *options: object) -> Bad:
    return Bad(name=name, make=lambda place: ("bound", place.shared.train, *options), says=says)


def _npz(name: str, says: str, content: Callable[[Path], object]) -> Bad:
    def make(place: Place) -> Sequence[object]:
        content(place.folder / "edges.npz")
        return ("bound", "edges.npz", "--max-records-per-user", "2", "--out", "selection.npz")

    return Bad(name=name, make=make, says=says)


def _bound_over_its_edges(place: Place) -> Sequence[object]:
    np.savez(place.folder / "edges.npz", indptr=[0, 1], indices=[0], n_users=1)
    return ("bound", "edges.npz", "--max-records-per-user", "1", "--out", "edges.npz")


def _split(name: str, says: str, *options: object) -> Bad:
    return Bad(name=name, make=lambda place: ("split", place.shared.train, *options), says=says)


def _evaluated(name: str, says: str, make_store: Callable[[Place], Path]) -> Bad:
    return Bad(
        name=name,
        make=lambda place: ("evaluate", place.shared.model, make_store(place)),
        says=says,
    )


BOTH = ("--train", "a", "--held-out", "b")

TABLE: list[Bad] = [
    # Models
    trained("more tokens than positions", "sequence_length=64", data="sequence_length = 64"),
    trained("a model path with a typo", "no such directory", model="path = './modle'"),
    trained(
        "a name that nobody has",
        "there is no such directory, and as",
        model="path = 'no-such-model'",
    ),
    Bad(
        name="a model path with two letters swapped",
        make=lambda place: (
            "train",
            place.config(model=f"path = '{_swapped(place.shared.model)}'"),
            "--out",
            "run",
        ),
        says="Did you mean",
    ),
    trained("no LoRA target", "LoRA targets", model="lora = {targets = ['nothing']}"),
    trained("an unknown dtype", "model.dtype", model="dtype = 'float8'"),
    trained("a GGUF that is not there", "none.gguf", model="gguf_file = 'none.gguf'"),
    _changed_model("pickled weights", "a pickle", _pickled),
    _changed_model("cut weights", "could not be loaded", _cut),
    _changed_model("lacking weights", "lacks 1 of its weights", _lacking),
    _changed_model("a classifier", "GPT2ForSequenceClassification", _classifier),
    _changed_model("a classifier without a name", "of its weights", _bare),
    _changed_model("an encoder", "BertForMaskedLM", _settings(architectures=["BertForMaskedLM"])),
    _changed_model("a mixture of experts", "mixture of experts", _experts),
    _changed_model("code in a checkpoint", "could not be loaded", _remote),
    _changed_model("an unknown architecture", "could not be loaded", _settings(model_type="own")),
    _changed_model("another tokenizer", "they do not belong together", _large_vocabulary),
    _changed_model("no tokenizer", "tokenizer", _without_tokenizer),
    _changed_model(
        "settings that are none",
        "could not be loaded",
        lambda model: (model / "config.json").write_text("[]"),
    ),
    _changed_model("a width that is a word", "could not be loaded", _settings(n_embd="wide")),
    _changed_model("other shapes", "could not be loaded", _settings(n_embd=8)),
    _changed_model(
        "a history that cannot be read",
        "cannot be read",
        lambda model: (model / "userdp_ancestry.json").write_text("{}"),
    ),
    # Stores
    command("no store", "not a user store", "stats", "nowhere"),
    Bad(
        name="tokens of no tokenizer",
        make=lambda place: ("stats", place.shared.train, "--tokenizer", "no-such-tokenizer"),
        says="tokenizer of 'no-such-tokenizer': there is no such directory",
    ),
    trained("no store to train on", "not a user store", data="store = 'nowhere'"),
    trained("no store to evaluate on", "not a user store", data="evaluation = 'nowhere'"),
    Bad(
        name="evaluation on training users",
        make=lambda place: (
            "train",
            place.config(data=f"evaluation = '{place.shared.train}'"),
            "--out",
            "run",
        ),
        says="are training users too",
    ),
    trained(
        "a tracker that is not known",
        "tracker 'clipboard' is not known",
        training="trackers = ['clipboard']",
    ),
    trained("a rare measurement", "evaluate_every", training="evaluate_every = 0"),
    Bad(
        name="records of several owners",
        make=lambda place: (
            "train",
            place.config(data=f"store = '{place.shared.owned_by_two}'"),
            "--out",
            "run",
        ),
        says="several owners",
    ),
    _changed_store(
        "a manifest that is none",
        "damaged",
        lambda s: (s / "manifest.json").write_text("{"),
        "stats",
        "{}",
    ),
    _changed_store(
        "a manifest of nothing",
        "import the data again",
        lambda s: (s / "manifest.json").write_text('{"format": 3}'),
        "stats",
        "{}",
    ),
    _changed_store(
        "a file missing",
        "missing or changed",
        lambda s: (s / "record_users.npy").unlink(),
        "stats",
        "{}",
    ),
    _changed_store(
        "data changed after the import",
        "changed since the import",
        _flip_last_byte("record_users.npy"),
        "stats",
        "{}",
        "--verify",
    ),
    Bad(
        name="evaluation of long rows",
        make=lambda place: (
            *("evaluate", place.shared.model, place.shared.held_out),
            *("--sequence-length", "64"),
        ),
        says="sequence_length=64 is above the 32 positions",
    ),
    _split("equal parts of a split", "one directory", "--train", "a", "--held-out", "a"),
    _split("a part inside the other", "inside the other", "--train", "a", "--held-out", "a/b"),
    _split("a share above one", "share=2.0", *BOTH, "--share", "2"),
    _split("a split that shares users", "--allow-shared-users", *BOTH, "--by", "beginning"),
    _split("a split by no time", "--before DATE", *BOTH, "--by", "time", "--allow-shared-users"),
    # Bounding
    _bound("no bound to select by", "--max-records-per-user"),
    Bad(name="a selection over the edges", make=_bound_over_its_edges, says="no selection: name"),
    _bound("a bound of nothing", "0", "--max-records-per-user", "0"),
    _bound(
        "no place for a selection",
        "cannot be written",
        "--max-records-per-user",
        "1",
        "--out",
        "nowhere/selection.npz",
    ),
    _npz("edges that are no archive", "edges.npz", lambda path: path.write_bytes(GOOD)),
    _npz("edges without arrays", "edges.npz", lambda path: np.savez(path, other=[1])),
    _npz(
        "edges in a pickle",
        "edges.npz",
        lambda path: np.savez(path, indptr=np.array([{}]), indices=[0], n_users=1),
    ),
    _npz(
        "edges of users who are not there",
        "past n_users",
        lambda path: np.savez(path, indptr=[0, 1], indices=[7], n_users=2),
    ),
    _selected("a selection of other edges", "made for other edges"),
    _selected("a selection below zero", "selection.npz", multiplicity=np.full(60, -1)),
    _selected("a selection in decimals", "selection.npz", multiplicity=np.zeros(60)),
    _selected("a selection in a pickle", "selection.npz", method=np.array({"a": 1})),
    # Looks
    command("duplicates of nothing", "not a user store", "duplicates", "nowhere"),
    _looked("a quantile above one", "--quantile 2", "--quantile", "2"),
    _looked("a quantile of nothing spent", "epsilon=0", "--epsilon", "0"),
    _looked("a quantile written to nowhere", "there is no directory", "--out", "nowhere/look.json"),
    # Runs
    Bad(
        name="the directory of another run", make=_run_is_there, says="run already holds something"
    ),
    Bad(name="a run below a file", make=_below_a_file, says="file/run: Not a directory"),
    command("a report of nothing", "the directory of a run", "report", "nowhere"),
    _damaged_run(
        "a ledger of nothing",
        "rows were cut off or replaced since the checkpoint",
        lambda run: (run / "ledger.jsonl").write_text(""),
        "account",
        "{}",
    ),
    _damaged_run(
        "a ledger that is none",
        "cut short",
        lambda run: (run / "ledger.jsonl").write_bytes(b"\xff\x00{"),
        "account",
        "{}",
    ),
    _damaged_run(
        "a run without its weights",
        "holds no model",
        lambda run: shutil.rmtree(run / "model"),
        "report",
        "{}",
    ),
]

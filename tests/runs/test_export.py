"""What leaves a run: by a list, and with the origin of every byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from recorded_run import safetensors, write_run
from userdp.errors import InputError
from userdp.ledger.book import Ledger
from userdp.report.card import model_card
from userdp.runs.check import check_run
from userdp.runs.export import export
from userdp.runs.facts import read_facts


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if not path.is_dir()
    }


def made(run: Path, *, base: str, license: str) -> dict[str, bytes]:
    """What is made from the ledger and the options, here again."""
    statement = Ledger.read(run / "ledger.jsonl").statement()
    card = model_card(statement, read_facts(run), base=base, license=license)
    told = json.dumps(statement.to_json(), indent=1) + "\n"
    return {"README.md": card.encode(), "statement.json": told.encode()}


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("is_local", [False, True])
def test_the_origin_of_every_byte(tmp_path: Path, adapter: bool, is_local: bool) -> None:
    base = str(tmp_path / "home" / "mary" / "base") if is_local else "gpt2"
    run = write_run(tmp_path / "run", base=base, adapter=adapter)
    done = export(run, tmp_path / "out", base="org/base", license="apache-2.0")
    found = contents(tmp_path / "out")
    settings = "adapter_config.json" if adapter else "config.json"
    weights = "adapter_model.safetensors" if adapter else "model.safetensors"
    expected = made(run, base="org/base", license="apache-2.0") | {
        name: (run / "model" / name).read_bytes()
        for name in (weights, "tokenizer.json", "tokenizer_config.json", "userdp_ancestry.json")
    }
    expected["ledger.jsonl"] = (run / "ledger.jsonl").read_bytes()
    original = (run / "model" / settings).read_bytes()
    if adapter or is_local:
        key = "base_model_name_or_path" if adapter else "_name_or_path"
        original = json.dumps({"r": 2, key: "org/base"}, indent=2).encode() + b"\n"
    expected[settings] = original
    assert found == expected
    assert sorted(done.origins) == sorted(found)
    copied = {name for name, origin in done.origins.items() if origin.endswith("byte for byte")}
    rewritten = {settings} if adapter or is_local else set[str]()
    assert copied == found.keys() - {"README.md", "statement.json"} - rewritten
    for name in copied:
        assert (run / done.origins[name].split(",")[0]).read_bytes() == found[name]


@pytest.mark.parametrize("adapter", [False, True])
def test_nothing_of_this_machine_leaves_it(tmp_path: Path, adapter: bool) -> None:
    root = tmp_path / "home" / "mary"
    run = write_run(root / "run", base=str(root / "base"), adapter=adapter)
    secrets = {path.read_bytes() for path in (run / "secret").rglob("*") if path.is_file()}
    export(run, tmp_path / "out", base="org/base")
    for name, content in contents(tmp_path / "out").items():
        assert b"mary" not in content, name
        assert str(tmp_path).encode() not in content, name
        assert not any(secret.strip() in content for secret in secrets), name
    for path in (tmp_path / "out").rglob("*"):
        assert path.stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_the_card_has_licence_and_base(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", base="org/small")
    export(run, tmp_path / "out", license="cc-by-4.0")
    head = (tmp_path / "out" / "README.md").read_text().split("---")[1]
    assert "license: cc-by-4.0\n" in head
    assert "base_model: org/small\n" in head
    export(write_run(tmp_path / "other", base=str(tmp_path)), tmp_path / "plain")
    head = (tmp_path / "plain" / "README.md").read_text().split("---")[1]
    assert "license" not in head
    assert "base_model" not in head
    assert "_name_or_path" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.parametrize("base", ["/somewhere/base", "../base", "~/base", "C:\\base"])
def test_an_adapter_on_a_local_base_needs_its_name(tmp_path: Path, base: str) -> None:
    run = write_run(tmp_path / "run", base=base.replace("\\", "\\\\"), adapter=True)
    with pytest.raises(InputError, match="Give --base NAME"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(run, tmp_path / "out", base="org/base")
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "org/base"


def test_a_directory_that_has_the_name_of_a_model_on_the_hub_is_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", base="gpt2", adapter=True)
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(InputError, match="Give --base NAME"):
        export(run, tmp_path / "out")


def test_a_relative_path_is_no_name_on_the_hub_wherever_the_export_is_made(tmp_path: Path) -> None:
    told = {"tokenizer_config.json": b'{"is_local": true}'}
    run = write_run(tmp_path / "run", base="models/base", adapter=True, files=told)
    with pytest.raises(InputError, match="Give --base NAME"):
        export(run, tmp_path / "out")
    whole = write_run(tmp_path / "whole", base="models/base", files=told)
    export(whole, tmp_path / "out")
    assert "models/base" not in (tmp_path / "out" / "README.md").read_text()
    assert b"models/base" not in (tmp_path / "out" / "config.json").read_bytes()


UNLISTED = (
    "optimizer.safetensors",
    "training_args.bin",
    "losses.json",
    "notes.txt",
    "more/config.json",
    "model.safetensors.bak",
    "modeling_own.py",
    ".cache",
    "trainer_state.json",
)


@pytest.mark.parametrize("name", UNLISTED)
def test_a_file_that_is_not_on_the_list_is_refused_by_name(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", files={name: b"{}"})
    with pytest.raises(InputError, match=f"model/{name.split('/')[0]} is not on the list"):
        export(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_paths_of_this_machine_anywhere_in_the_files_are_refused(tmp_path: Path) -> None:
    own = str(tmp_path / "run0")
    telling = {
        "generation_config.json": b'{"cache": {"dir": "/data/mary/cache"}}',
        "tokenizer_config.json": b'{"files": ["C:\\\\Users\\\\mary\\\\x"]}',
        "model.safetensors": safetensors(source=own + "/model"),
        "tokenizer.json": json.dumps({"from": str(tmp_path / "store")}).encode(),
    }
    for number, (name, content) in enumerate(telling.items()):
        run = tmp_path / f"run{number}"
        content = content.replace(own.encode(), str(run).encode())
        write_run(run, files={name: content})
        with pytest.raises(InputError, match=f"{name} holds a path of this machine"):
            export(run, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_ledger_that_tells_a_path_or_has_an_unlisted_field_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", bound_to={"note": str(tmp_path / "run" / "x")})
    with pytest.raises(InputError, match="holds a path of this machine"):
        export(run, tmp_path / "out")
    run = write_run(tmp_path / "other")
    monkeypatch.setitem(export.__globals__["LEDGER_FIELDS"], "step", set())
    with pytest.raises(InputError, match="'step', which is not on the list"):
        export(run, tmp_path / "out")


def _cut(run: Path) -> None:
    path = run / "ledger.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def _other_weights(run: Path) -> None:
    (run / "model" / "model.safetensors").write_bytes(safetensors(other="x"))


def _edited_statement(run: Path) -> None:
    path = run / "statement.json"
    path.write_text(path.read_text().replace("0.001", "0.0001"))


def _no_model(run: Path) -> None:
    shutil.rmtree(run / "model")


@pytest.mark.parametrize("spoil", [_cut, _other_weights, _edited_statement, _no_model])
def test_a_run_that_is_not_whole_is_not_exported(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    run = write_run(tmp_path / "run")
    spoil(run)
    with pytest.raises(InputError):
        export(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_settings_that_cannot_be_looked_at_are_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("generation_config.json", "tokenizer_config.json"):
        run = write_run(tmp_path / name, files={name: content})
        with pytest.raises(InputError, match=f"model/{name} holds no settings"):
            export(run, tmp_path / "out")


def test_without_the_key_the_export_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    shutil.rmtree(run / "secret")
    export(run, tmp_path / "out")
    assert "not verified" in (tmp_path / "out" / "README.md").read_text()
    assert "not verified" in (tmp_path / "out" / "statement.json").read_text()
    assert check_run(tmp_path / "out").ok


def test_an_existing_directory_and_odd_options_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="exists"):
        export(run, tmp_path / "out")
    for options in ({"base": "/a/path"}, {"base": "a\nb: c"}, {"license": "mit\nx: y"}):
        with pytest.raises(InputError, match="is not the"):
            export(run, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_an_export_is_checked_like_a_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(write_run(tmp_path / "run", adapter=True), out, base="org/base")
    found = check_run(out)
    assert found.ok
    assert found.steps == 3
    assert any("adapter_config.json is not the file that the run wrote" in n for n in found.notes)
    (out / "adapter_model.safetensors").write_bytes(safetensors(other="x"))
    assert "adapter_model.safetensors is not what" in check_run(out).problems[0]


def test_a_run_that_changes_meanwhile_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run")
    copy = export.__globals__["_copy"]

    def late(source: Path, target: Path) -> None:
        copy(source, target)
        target.write_bytes(safetensors(other="x"))

    monkeypatch.setitem(export.__globals__, "_copy", late)
    with pytest.raises(InputError, match="changed while it was exported"):
        export(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]

"""Fixtures shared by all tests: a tiny base model and two small user stores.

What takes long to import is imported where it is used: the process that only hands out tests to
others reads this file, too, and they wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from store_copies import COPIES

if TYPE_CHECKING:
    from userdp.data.record import Record
    from userdp.data.store import UserStore

# A package for a fresh interpreter (`test_extending`). Its parts are not registered here.
collect_ignore = ["extension"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Bitwise comparisons need a fixed order of summation, and the tensors are too small to share.
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _commands_are_built_once() -> Generator[None]:
    # A program builds its commands once, when it starts. Here it is called many hundred times, and
    # reading the types of all options took 30 ms each time.
    import typer.main
    import typer.testing

    with pytest.MonkeyPatch.context() as patch:
        built = functools.cache(typer.main.get_command)
        patch.setattr(typer.main, "get_command", built)
        patch.setattr(typer.testing, "_get_command", built)
        yield


@pytest.fixture(autouse=True, scope="session")
def _stores_are_written_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    COPIES.keep_in(tmp_path_factory.mktemp("copied"))


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import models_zoo

    return models_zoo.save_tiny_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="session")
def train_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from stores import KEY, sentences
    from userdp.data.store import write_store

    out = tmp_path_factory.mktemp("stores") / "train"
    write_store(sentences(users=20, records_per_user=3, seed=1, prefix="a"), out, key=KEY)
    return out


@pytest.fixture(scope="session")
def held_out_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from stores import KEY, sentences
    from userdp.data.store import write_store

    out = tmp_path_factory.mktemp("stores") / "held_out"
    write_store(sentences(users=5, records_per_user=3, seed=2, prefix="b"), out, key=KEY)
    return out


@pytest.fixture(scope="session")
def make_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Record]], UserStore]:
    from stores import KEY
    from userdp.data.store import UserStore, write_store

    def make(records: list[Record]) -> UserStore:
        out = tmp_path_factory.mktemp("made") / "store"
        write_store(records, out, key=KEY)
        return UserStore.open(out)

    return make


Write = Callable[..., Path]


def _writes_configurations(
    folder: Path, base_model: Path, train_store: Path, held_out_store: Path
) -> Write:
    def write(
        *,
        data: str = "",
        model: str = "",
        privacy: str = "epsilon = 8.0\ndelta = 1e-2\nclip_norm = 1.0",
        training: str = "fixed_seed = 7",
        name: str = "run.toml",
    ) -> Path:
        path = folder / name
        path.write_text(
            f"""# userdp train {name} --out run
[data]
store = "{train_store}"
evaluation = "{held_out_store}"
sequence_length = 16
{data}
[model]
path = "{base_model}"
{model}
[privacy]
num_users = 20
expected_cohort_size = 5
group_size = 2
{privacy}
[training]
steps = 4
learning_rate = 0.01
{training}
"""
        )
        return path

    return write


@pytest.fixture
def config_file(tmp_path: Path, base_model: Path, train_store: Path, held_out_store: Path) -> Write:
    """Writes a training configuration; keyword arguments replace lines or add sections."""
    return _writes_configurations(tmp_path, base_model, train_store, held_out_store)


@pytest.fixture(scope="module")
def shared_config_file(
    tmp_path_factory: pytest.TempPathFactory,
    base_model: Path,
    train_store: Path,
    held_out_store: Path,
) -> Write:
    """The same, for what all tests of a module look at."""
    folder = tmp_path_factory.mktemp("configured")
    return _writes_configurations(folder, base_model, train_store, held_out_store)


@pytest.fixture(scope="module")
def _mechanisms_are_compared_once() -> Generator[None]:
    """For modules that ask for the same plan again and again: comparing takes two seconds."""
    from userdp.cli import mechanism_table

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanism_table, "compare", functools.cache(mechanism_table.compare))
        yield

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from importing import Format, bring_in, contents, reading

from shared import SHARED, needs_shared
from userdp.data.identity import IdRule
from userdp.data.store import UserStore
from userdp.errors import InputError

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def commit(repository: Path, author: str, message: str) -> None:
    subprocess.run(
        [
            *("git", "-c", "user.name=C", "-c", "user.email=Cy@Example.org", "commit", "-q"),
            *("--allow-empty", "--author", f"A <{author}>", "-m", message),
        ],
        cwd=repository,
        check=True,
    )


@needs_git
def test_commits_belong_to_everyone_they_name(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    commit(
        repository,
        "ann@example.org",
        "Mend the roof\n\nIt leaked.\n\nReviewed-by: Bob <bob@example.org>\n"
        "Co-authored-by: Ann <ANN@example.org>\nCc: list@lists.example.org\n",
    )
    commit(repository, "noreply@example.org", "Tidy up")
    bring_in(repository, tmp_path / "store")
    assert contents(UserStore.open(tmp_path / "store")) == [
        ("Mend the roof\n\nIt leaked.", [0, 1, 2]),
        ("Tidy up", [1]),
    ]


@needs_git
def test_a_folder_without_history_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="git cannot read its history"):
        bring_in(tmp_path / "empty", tmp_path / "store", reading(format=Format.GIT))


def test_both_layouts_of_dialogue(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text(
        "Ann:\nWhat shall we do?\nTell me: what?\n\nBob:\nNothing.\n\nAnn:\n\n"
    )
    (tmp_path / "log.txt").write_text("Ann: What shall we do?\nTell me.\n[12:30] Bob: Nothing.\n")
    result = bring_in(tmp_path / "play.txt", tmp_path / "one")
    assert contents(UserStore.open(tmp_path / "one")) == [
        ("What shall we do?\nTell me: what?", [0]),
        ("Nothing.", [1]),
    ]
    assert result.skipped == {"empty text": 1}
    bring_in(tmp_path / "log.txt", tmp_path / "two")
    assert contents(UserStore.open(tmp_path / "two")) == [
        ("What shall we do?\nTell me.", [0]),
        ("Nothing.", [1]),
    ]


def test_text_without_speakers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("\nOnce upon a time\n")
    with pytest.raises(InputError, match=r"x\.txt, line 2: no speaker"):
        bring_in(tmp_path / "x.txt", tmp_path / "store")


@needs_shared
def test_play_has_the_turns_of_its_cleaned_twin(tmp_path: Path) -> None:
    result = bring_in(
        SHARED / "data/raw/tinyshakespeare_input.txt", tmp_path / "store", id_rule=IdRule.MERGE
    )
    assert (result.records, result.users) == (7097, 293)

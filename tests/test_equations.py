"""Every row of docs/equations.md leads to the file that holds the equation."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "equations.md"
PAPERS = {
    "M18": "McMahan et al. 2018",
    "C24": "Charles et al. 2024",
    "X24": "Chua et al. 2024",
    "G25": "Ganesh et al. 2025",
}

# Which file holds ...? Each question has the row's source and what it says, the file that answers
# it, and a function or class that the file defines.
QUESTIONS = [
    ("M18 Def. 1, Def. 2", "user-adjacent datasets", "units.py", "Adjacency"),
    ("M18 Alg. 1, A)", "random selection of users", "sampling/poisson_users.py", "PoissonUsers"),
    ("M18 Alg. 1, UserUpdateFedSGD", "one gradient", "updates/mean_gradient.py", "MeanGradient"),
    ("M18 Alg. 1, UserUpdateFedAvg", "local SGD", "updates/fedavg.py", "FedAvg"),
    ("M18 f_c, Lemma 1", "clipped-denominator", "updates/estimators.py", "ClippedDenominator"),
    ("M18 App. B", "the LSTM", "models/word_lstm.py", "WordLSTM"),
    ("M18 Eq. 1, FlatClip", "min(1, S/", "clipping/rules.py", "FlatClip"),
    ("M18 Sec. 2.3, PerLayerClip", "m layers", "clipping/rules.py", "PerLayerClip"),
    ("M18 Sec. 2.3, S² = Σ S_j²", "parameter vectors", "clipping/rules.py", "PerVectorClip"),
    ("M18 Tables 1 and 2", "moments accountant", "accounting/renyi.py", "moments_epsilon"),
    ("C24 Alg. 1 (ELS)", "sample records", "sampling/poisson_records.py", "PoissonRecords"),
    ("C24 Alg. 2 (ULS)", "sample users", "sampling/poisson_users.py", "PoissonUsers"),
    ("C24 Eq. 1", "hockey-stick", "accounting/search.py", "delta_bound"),
    ("C24 Thm. 1 and 3", "Binomial(G, p)", "accounting/events.py", "poisson_records_gaussian"),
    ("C24 Thm. 2, Eq. 3", "Bernoulli(q)", "accounting/events.py", "poisson_users_gaussian"),
    ("C24 App. A.1", "calibration", "accounting/accountant.py", "calibrate"),
    ("C24 App. D", "near-duplicates", "data/duplicates.py", "across_users"),
    ("C24 Alg. 3, Eq. 8 to 12", "Estimate-and-Double", "planner/search.py", "Planner"),
    ("X24 Alg. 3, Eq. 1", "filter of Asi & Liu", "accounting/filter.py", "filter_plan"),
    ("X24 Sec. 4.1", "perplexity", "data/choose.py", "best_rows"),
    ("X24 Sec. 4.1", "perplexity", "data/select.py", "best_records"),
    ("X24 Sec. 5.1", "random chunk", "data/choose.py", "Chunks"),
    ("X24 Sec. 6", "resampling", "data/choose.py", "ResampledRows"),
    ("X24 App. B.1", "cleaning mail", "data/importers/mail.py", "record_of"),
    ("X24 Sec. 5", "LoRA", "models/adapters.py", "Lora"),
    ("G25 Alg. 2, 3", "greedy bounding", "bounding/greedy.py", "greedy_duplicates"),
    ("G25 Alg. 4, App. C.4", "min-separation", "bounding/min_sep.py", "min_separation"),
    ("G25 Eq. 1", "integer program", "bounding/exact.py", "exact"),
    ("G25 Sec. 5.5", "bias control", "bounding/balanced.py", "balanced"),
    ("G25 sigma/sqrt(k)", "k participations", "accounting/events.py", "min_separated_gaussian"),
]


@dataclass(frozen=True, kw_only=True)
class Row:
    source: str
    what: str
    where: str

    @property
    def files(self) -> list[str]:
        """The files that the row names; names of functions stand beside them."""
        return re.findall(r"`([\w./-]+\.(?:py|md))`", self.where)


def rows() -> list[Row]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return [Row(source=source, what=what, where=where) for source, what, where in cells]


def located(name: str) -> Path:
    """The file of this name, below the package or below the repository."""
    inside = ROOT / "src" / "userdp" / name
    return inside if inside.is_file() else ROOT / name


@pytest.mark.parametrize(("source", "what", "file", "name"), QUESTIONS)
def test_the_page_says_which_file_holds_it_and_the_file_does(
    source: str, what: str, file: str, name: str
) -> None:
    answers = [row for row in rows() if row.source.startswith(source) and what in row.what]
    assert len(answers) == 1
    assert file in answers[0].files
    text = located(file).read_text(encoding="utf-8")
    defined = {
        node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert name in defined
    assert PAPERS[source.split()[0]] in " ".join(text.split())


def test_the_questions_cover_all_papers() -> None:
    assert len(QUESTIONS) >= 20
    assert {source.split()[0] for source, *_ in QUESTIONS} == set(PAPERS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.source)
def test_every_row_names_files_that_exist_or_a_dash(row: Row) -> None:
    assert row.files or row.where == "-"
    assert [name for name in row.files if not located(name).is_file()] == []


def test_every_function_named_beside_a_file_is_in_that_file() -> None:
    named = [
        (file, name)
        for row in rows()
        for file, name in re.findall(r"`([\w./-]+\.py)` \(`(\w+)`\)", row.where)
    ]
    assert len(named) >= 8
    for file, name in named:
        text = located(file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(def|class) {name}\b|^\s*{name}:", text, re.MULTILINE), (file, name)

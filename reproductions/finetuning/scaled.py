"""Does it help to scale gradients by coordinate before clipping and noise are applied?

Adam divides a private gradient by the root of its second moments. Noise has then been added in the
geometry of the raw gradient, where coordinates of small gradients drown in it. Scale-then-privatise
multiplies each user's gradient by s first, so that clipping and noise happen in the scaled
geometry. s comes from earlier *private* outputs, or from public text, so it costs nothing.

`adam`      the usual way: clip, add noise, Adam
`sgd`       the same with momentum alone: what is left of the arms below without their scales
`scaled`    s = 1 / (sqrt(v) + k r), where v is the mean of squares of earlier private gradients and
            r the root mean square of sqrt(v); anew before every step (Ganesh et al. 2025, On Design
            Principles for Private Adaptive Optimizers)
`delayed`   v from the averages of DELAY private gradients each (Li et al. 2023, DP2)
`public`    v from gradients of public text, once (Li et al. 2022, AdaDPS)
`rows`      the same, but a matrix has the mean of v in each row and in each column only: what
            `ScaledMomentum(scales="public")` does, and what the fast path does at little cost

A small word-level transformer is trained on public books, then fine-tuned on what people said, and
measured on people who were held out: nats a word. Clipping is automatic in each geometry, so no arm
has a clip norm to tune. Each arm has its own learning rate and its own k, chosen with one
seed; other seeds give the figures. As in `defaults.py`, the noise on the mean update is that of a
run on PRICED_USERS users with PRICED_COHORT of them a step. Nothing is promised to the people in
the data. The figures are in docs/tuning.md.

Run: python -m reproductions.finetuning.scaled PUBLIC.jsonl.gz PEOPLE.jsonl.gz --out FILE.jsonl
     python -m reproductions.finetuning.scaled table FILE.jsonl
     records {"text": ...} and {"users": [...], "text": ...}; only records of one user are used
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import gzip
import itertools
import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from userdp.plan import Plan

WORDS, WIDTH, HEADS, LENGTH = 1000, 32, 2, 24
GROUP, COHORT, STEPS, HELD_OUT = 4, 32, 80, 150
PRICED_USERS, PRICED_COHORT = 20_000, 1_000
PUBLIC_STEPS, DELAY = 800, 10
PUBLIC_BATCHES = 100
ADAPTED = ("attend", "gather", "widen", "narrow")
TUNING_SEED, SEEDS = 0, (1, 2, 3)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
FLOORS = (0.1, 1.0)
ARMS = ("adam", "sgd", "public", "rows", "scaled", "delayed")
GAMMA = 0.01


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run. `floor` is the k of the scales; Adam has none."""

    how: str
    epsilon: float
    rate: float
    floor: float = 0.0
    seed: int = TUNING_SEED


class Words(torch.nn.Module):
    """One block of attention and one of products over word vectors, which are also the output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS + 1, WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)
        self.first, self.second, self.last = (torch.nn.LayerNorm(WIDTH) for _ in range(3))
        self.attend = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.gather = torch.nn.Linear(WIDTH, WIDTH)
        self.widen = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of every next word."""
        rows, length = ids.shape
        x = self.words(ids) + self.places.weight[:length]
        q, k, v = (
            part.reshape(rows, length, HEADS, -1).transpose(1, 2)
            for part in self.attend(self.first(x)).chunk(3, -1)
        )
        future = torch.ones(length, length).triu(1) * -1e4
        seen = torch.softmax(q @ k.mT / (WIDTH / HEADS) ** 0.5 + future, -1) @ v
        x = x + self.gather(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        x = x + self.narrow(F.gelu(self.widen(self.second(x))))
        return self.last(x) @ self.words.weight.T


def row_losses(model: Words, weights: dict[str, Tensor], rows: Tensor) -> Tensor:
    """The mean loss of a row's words; -1 is padding."""
    logits: Tensor = functional_call(model, weights, (rows[:, :-1].clamp(min=0),))
    wanted = rows[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), wanted.clamp(min=0), reduction="none")
    there = (wanted >= 0).float()
    return (losses * there).sum(1) / there.sum(1).clamp(min=1)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a compressed file of lines."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def split_words(text: str) -> list[str]:
    """Words and signs, in small letters."""
    return re.findall(r"[a-z']+|[^\sa-z']", text.lower())


def rows_of(words: list[str], numbers: dict[str, int]) -> Tensor:
    """Rows of LENGTH + 1 numbers; words that are not known are WORDS."""
    found = [numbers.get(word, WORDS) for word in words]
    found += [-1] * (-len(found) % (LENGTH + 1))
    return torch.tensor(found).reshape(-1, LENGTH + 1)


def prepared(public: Path, people: Path) -> tuple[Tensor, list[Tensor], Tensor]:
    """Rows of public text, rows of each user who is trained on, and rows of those who are not.

    The words are those of the public text.
    """
    texts = [split_words(entry["text"][:300_000]) for entry in read(public)]
    common = collections.Counter(itertools.chain.from_iterable(texts)).most_common(WORDS)
    numbers = {word: number for number, (word, _) in enumerate(common)}
    said: dict[str, list[str]] = {}
    for entry in read(people):
        if len(entry["users"]) == 1:
            said.setdefault(entry["users"][0], []).extend(split_words(entry["text"]))
    users = [rows_of(words, numbers) for _, words in sorted(said.items()) if len(words) > 8]
    order = torch.randperm(len(users), generator=torch.Generator().manual_seed(11)).tolist()
    others = torch.cat([users[i][:8] for i in order[:HELD_OUT]])
    books = torch.cat([rows_of(words, numbers) for words in texts])
    return books, [users[i] for i in order[HELD_OUT:]], others


def public_model(books: Tensor) -> tuple[Words, Tensor]:
    """A model trained on public text, and the mean of squares of its late gradients there."""
    torch.manual_seed(5)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    squares = torch.zeros(sum(p.numel() for p in model.parameters()))
    rng = torch.Generator().manual_seed(6)
    for step in range(PUBLIC_STEPS):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / PUBLIC_STEPS)
        chosen = books[torch.randint(len(books), (64,), generator=rng)]
        optimizer.zero_grad()
        row_losses(model, dict(model.named_parameters()), chosen).mean().backward()
        optimizer.step()
        if step >= PUBLIC_STEPS // 2:
            found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            squares += found.square() / (PUBLIC_STEPS - PUBLIC_STEPS // 2)
    return model, squares


@functools.cache
def noise_of_mean(epsilon: float) -> float:
    """The standard deviation of the noise on the mean of clipped updates."""
    plan = Plan.sample_users(
        num_users=PRICED_USERS,
        expected_cohort_size=PRICED_COHORT,
        steps=STEPS,
        epsilon=epsilon,
    )
    return plan.noise.noise_multiplier / PRICED_COHORT


def scales(squares: Tensor, floor: float) -> Tensor:
    """1 / (sqrt(v) + k r), of root mean square 1: clipping makes their size irrelevant."""
    roots = squares.sqrt()
    found = 1 / (roots + floor * roots.square().mean().sqrt())
    return found / found.square().mean().sqrt()


def by_rows_and_columns(squares: Tensor, floor: float, shapes: list[torch.Size]) -> Tensor:
    """The same, where a matrix has one number for each row times one for each column."""
    usual = squares.mean().sqrt()
    found: list[Tensor] = []
    for part, shape in zip(squares.split([s.numel() for s in shapes]), shapes, strict=True):
        if len(shape) != 2:
            found.append(1 / (part.sqrt() + floor * usual))
            continue
        # A factor without any gradient yet counts as a usual one.
        part = part if bool(part.any()) else usual.square().expand(part.shape)
        matrix, whole = part.reshape(shape), part.mean().sqrt()
        rows = 1 / (matrix.mean(1, keepdim=True).sqrt() / whole + floor)
        columns = 1 / (matrix.mean(0, keepdim=True).sqrt() / whole + floor)
        found.append((rows * columns / (whole + floor * usual)).flatten())
    together = torch.cat(found)
    return together / together.square().mean().sqrt()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What is trained: all weights, or adapters of a rank beside those of linear layers."""

    base: Words
    rank: int = 0

    @functools.cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Of every trained tensor."""
        own = dict(self.base.named_parameters())
        if not self.rank:
            return {name: p.shape for name, p in own.items()}
        found: dict[str, torch.Size] = {}
        for name in ADAPTED:
            rows, columns = own[f"{name}.weight"].shape
            found[f"{name} A"] = torch.Size((self.rank, columns))
            found[f"{name} B"] = torch.Size((rows, self.rank))
        return found

    @functools.cached_property
    def start(self) -> Tensor:
        """All of it in one vector: the weights, or random factors A and zeros for B."""
        if not self.rank:
            return torch.cat([p.detach().flatten() for p in self.base.parameters()])
        generator = torch.Generator().manual_seed(3)
        parts = [
            torch.randn(shape, generator=generator) / shape[1] ** 0.5
            if name.endswith("A")
            else torch.zeros(shape)
            for name, shape in self.shapes.items()
        ]
        return torch.cat([part.flatten() for part in parts])

    def weights(self, values: Tensor) -> dict[str, Tensor]:
        """The model's weights where the trained vector is this one."""
        parts = values.split([shape.numel() for shape in self.shapes.values()])
        own = {n: p.reshape(s) for (n, s), p in zip(self.shapes.items(), parts, strict=True)}
        if not self.rank:
            return own
        found = {name: p.detach() for name, p in self.base.named_parameters()}
        for name in ADAPTED:
            found[f"{name}.weight"] = (
                found[f"{name}.weight"] + 2 * own[f"{name} B"] @ own[f"{name} A"]
            )
        return found


def public_squares(trained: Trained, books: Tensor) -> Tensor:
    """The mean of squares of gradients of public text, at the weights that training begins with."""
    rng, squares = torch.Generator().manual_seed(9), torch.zeros_like(trained.start)
    for _ in range(PUBLIC_BATCHES):
        chosen = books[torch.randint(len(books), (32,), generator=rng)]
        values = trained.start.clone().requires_grad_()
        loss = row_losses(trained.base, trained.weights(values), chosen).mean()
        squares += torch.autograd.grad(loss, values)[0].square() / PUBLIC_BATCHES
    return squares


def fine_tuned(
    trained: Trained, squares: Tensor, users: list[Tensor], others: Tensor, arm: Arm
) -> float:
    """The loss on other people after private training."""
    base, flat = trained.base, trained.start
    rng = torch.Generator().manual_seed(1000 + arm.seed)
    noise = noise_of_mean(arm.epsilon)

    def user_loss(values: Tensor, rows: Tensor) -> Tensor:
        losses, there = row_losses(base, trained.weights(values), rows), (rows[:, 1] >= 0).float()
        return (losses * there).sum() / there.sum().clamp(min=1)

    gradients = vmap(grad(user_loss), in_dims=(None, 0))
    scale = torch.ones_like(flat)
    if arm.how == "public":
        scale = scales(squares, arm.floor)
    elif arm.how == "rows":
        scale = by_rows_and_columns(squares, arm.floor, list(trained.shapes.values()))
    moment, second, recent = (torch.zeros_like(flat) for _ in range(3))
    for step in range(1, STEPS + 1):
        coins = torch.rand(len(users), generator=rng) < COHORT / len(users)
        cohort: list[Tensor] = []
        for user in coins.nonzero().flatten().tolist():
            own = users[user][torch.randperm(len(users[user]), generator=rng)[:GROUP]]
            cohort.append(F.pad(own, (0, 0, 0, GROUP - len(own)), value=-1))
        found = gradients(flat, torch.stack(cohort)) * scale
        # Automatic clipping (Bu et al. 2023): every update has norm at most 1, in this geometry.
        clipped = found / (
            found.norm(dim=1, keepdim=True) + GAMMA * scale.norm() / len(flat) ** 0.5
        )
        private = clipped.sum(0) / COHORT
        private += noise * torch.randn(len(flat), generator=rng)
        raw = private / scale
        rate = arm.rate * (1 - (step - 1) / STEPS)
        moment = 0.9 * moment + 0.1 * private
        second = 0.99 * second + 0.01 * raw.square()
        direction = moment / (1 - 0.9**step)
        if arm.how == "adam":
            direction = direction / ((second / (1 - 0.99**step)).sqrt() + 1e-8)
        else:
            # Steps of the size of Adam's, so that rates can be compared.
            direction = direction / direction.square().mean().sqrt() * scale
        flat = flat - rate * direction
        recent += raw / DELAY
        if arm.how == "scaled":
            scale = scales(second, arm.floor)
        elif arm.how == "delayed" and step % DELAY == 0:
            scale, recent = scales(recent.square(), arm.floor), torch.zeros_like(flat)
    with torch.no_grad():
        return float(row_losses(base, trained.weights(flat), others).mean())


def tried(how: str, epsilon: float) -> list[Arm]:
    """The runs that choose an arm's rate and floor."""
    floors = (0.0,) if how in ("adam", "sgd") else FLOORS
    return [
        Arm(how=how, epsilon=epsilon, rate=rate, floor=floor)
        for rate, floor in itertools.product(RATES, floors)
    ]


def study(
    public: Path, people: Path, out: Path, epsilons: list[float], arms: list[str], rank: int
) -> None:
    """Tune each arm with one seed, then run it with the others; one line a run."""
    books, users, others = prepared(public, people)
    base, squares = public_model(books)
    trained = Trained(base=base, rank=rank)
    if rank:
        squares = public_squares(trained, books)
    with torch.no_grad():
        before = float(row_losses(base, dict(base.named_parameters()), others).mean())
    with out.open("a", encoding="utf-8") as file:

        def run(arm: Arm) -> float:
            loss = fine_tuned(trained, squares, users, others, arm)
            file.write(
                json.dumps(dataclasses.asdict(arm) | {"loss": loss, "before": before, "rank": rank})
                + "\n"
            )
            file.flush()
            return loss

        for epsilon, how in itertools.product(epsilons, arms):
            best = min(tried(how, epsilon), key=run)
            for seed in SEEDS:
                run(dataclasses.replace(best, seed=seed))


def table(path: Path) -> str:
    """The loss of each arm over the seeds, with its spread."""
    by_arm: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        if found["seed"] != TUNING_SEED:
            by_arm.setdefault((found["epsilon"], found["how"]), []).append(found)
    lines = ["| epsilon | arm | rate | k | loss | spread over seeds |", "|---|---|---|---|---|---|"]
    for (epsilon, how), runs in by_arm.items():
        losses = [run["loss"] for run in runs]
        spread = f"{min(losses):.3f} to {max(losses):.3f}"
        lines.append(
            f"| {epsilon:g} | {how} | {runs[0]['rate']:g} | {runs[0]['floor']:g} "
            f"| {statistics.mean(losses):.3f} | {spread} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the study, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("public", help="PUBLIC.jsonl.gz, or the word table")
    parser.add_argument("people", type=Path, help="PEOPLE.jsonl.gz, or the file of the table")
    parser.add_argument("--out", type=Path, default=Path("scaled.jsonl"))
    parser.add_argument("--epsilon", type=float, nargs="+", default=[8.0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--rank", type=int, default=0, help="train adapters instead of weights")
    given = parser.parse_args()
    if given.public == "table":
        print(table(given.people))
    else:
        study(Path(given.public), given.people, given.out, given.epsilon, given.arms, given.rank)


if __name__ == "__main__":
    main()

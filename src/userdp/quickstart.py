"""A demo of user-level privacy in a few minutes: one model, fine-tuned with and without it.

Both runs see the same messages (`data/synthetic.py`), start from the same weights, train the same
parameters and process about the same number of records. Then two things are measured: how well each
predicts other people's messages, and how many of the planted secrets it gives away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from torch import nn

from userdp.config.file import load_config
from userdp.data import synthetic
from userdp.data.identity import load_or_create_key
from userdp.data.store import UserStore, write_store
from userdp.data.tokens import TokenRows, tokenise
from userdp.evaluation import evaluate
from userdp.index import indptr_of
from userdp.losses import causal_lm_loss
from userdp.models.adapters import Lora
from userdp.models.load import load_model
from userdp.plan import Plan
from userdp.report import svg
from userdp.report.write import Section, write_report
from userdp.runs.record import OnStep
from userdp.training import from_config as training_from_config

# Shows a stage's progress: its title, and for training a plan or a number of steps.
Progress = Callable[[str, Plan | int | None], AbstractContextManager[OnStep]]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The demo's settings, from which everything else follows."""

    num_users: int = 4000
    num_held_out: int = 400
    num_secret_users: int = 48
    epsilon: float = 4.0
    delta: float = 1e-5
    steps: int = 50
    expected_cohort_size: int = 128
    group_size: int = 8
    clip_norm: float = 1.0
    learning_rate: float = 5e-3
    ordinary_batch: int = 32
    ordinary_learning_rate: float = 3e-3
    lora: Lora | None = None
    sequence_length: int = 64
    pretrain_texts: int = 30_000
    pretrain_steps: int = 600


# For a model a thousand times larger: fewer people, and fewer but more expensive steps.
LLM_SCENARIO = Scenario(
    num_users=1000,
    num_held_out=40,
    num_secret_users=40,
    epsilon=8.0,
    steps=20,
    expected_cohort_size=40,
    group_size=2,
    learning_rate=2e-3,
    ordinary_batch=8,
    ordinary_learning_rate=2e-3,
    # Few parameters, because each of them gets the same noise but not the same signal.
    lora=Lora(rank=2, alpha=16.0, targets=("q_proj", "v_proj")),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the demo found: the keys of `userdp quickstart --json`."""

    epsilon: float
    delta: float
    loss_before: float
    loss_private: float
    loss_non_private: float
    secrets_planted: int
    secrets_leaked_before: int
    secrets_leaked_private: int
    secrets_leaked_non_private: int
    gap_closed: float
    report: str


def run(
    out: Path,
    *,
    seed: int,
    progress: Progress,
    scenario: Scenario | None = None,
    base: tuple[str, str | None] | None = None,
    device: str = "cpu",
) -> Outcome:
    """Run the whole demo in `out`. `base` names a model to use instead of a small new one."""
    scenario = scenario or Scenario()
    if base is None:
        # The small model's tensors are too small to gain from threads.
        torch.set_num_threads(1)
    messages = synthetic.messages(
        seed=seed,
        num_users=scenario.num_users,
        num_held_out=scenario.num_held_out,
        num_secret_users=scenario.num_secret_users,
    )
    with progress("writing the messages to a user store", None):
        key = load_or_create_key(out / "pseudonyms.key")
        write_store(messages.train, out / "train", key=key)
        write_store(messages.held_out, out / "held_out", key=key)
    if base is None:
        with progress("pre-training a small model on public text", scenario.pretrain_steps) as tick:
            pretrain(out / "base", seed=seed, scenario=scenario, on_step=tick)
        base = (str(out / "base"), None)

    config_path = _write_config(out, base, scenario, device)
    config = load_config(config_path)
    plan = config.plan()

    model, tokenizer = load_model(base[0], gguf_file=base[1], lora=scenario.lora, device=device)
    held_out = tokenise(
        UserStore.open(out / "held_out"), tokenizer, sequence_length=scenario.sequence_length
    )
    examine = _Examiner(tokenizer, held_out, messages.secrets)
    with progress("measuring the model before any fine-tuning", None):
        before = examine(model)

    train_rows = tokenise(
        UserStore.open(out / "train"), tokenizer, sequence_length=scenario.sequence_length
    )
    steps = _ordinary_steps(train_rows, plan, scenario)
    with progress("fine-tuning in the ordinary way", steps) as tick:
        ordinary(
            model,
            train_rows,
            pad_token=tokenizer.pad_token_id,
            steps=steps,
            batch_size=scenario.ordinary_batch,
            learning_rate=scenario.ordinary_learning_rate,
            rng=np.random.default_rng([seed, 3]),
            on_step=tick,
        )
    with progress("measuring the ordinary model", None):
        non_private = examine(model)
    del model

    with progress("fine-tuning with user-level privacy", plan) as tick:
        private_run = training_from_config.train_from_config(
            config_path, config, plan, out / "private", on_step=tick
        )
    with progress("measuring the private model", None):
        private = examine(private_run.model)

    statement = private_run.statement
    outcome = Outcome(
        epsilon=statement.epsilon,
        delta=statement.delta,
        loss_before=before.loss,
        loss_private=private.loss,
        loss_non_private=non_private.loss,
        secrets_planted=len(messages.secrets),
        secrets_leaked_before=before.leaked,
        secrets_leaked_private=private.leaked,
        secrets_leaked_non_private=non_private.leaked,
        gap_closed=(before.loss - private.loss) / (before.loss - non_private.loss),
        report=str(out / "report.html"),
    )
    write_report(
        out / "private",
        title="Learn the language, not the people",
        story=_story(outcome, scenario),
        html=out / "report.html",
    )
    (out / "outcome.json").write_text(json.dumps(asdict(outcome), indent=1) + "\n")
    return outcome


def pretrain(out: Path, *, seed: int, scenario: Scenario, on_step: OnStep) -> None:
    """Train a two-layer GPT-2 with a word tokenizer on public synthetic text, and save both."""
    tokenizer = word_tokenizer(synthetic.VOCABULARY)
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=scenario.sequence_length,
            n_embd=96,
            n_layer=2,
            n_head=4,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).eval()
    texts = synthetic.public_texts(seed=seed, count=scenario.pretrain_texts)
    encoded: list[list[int]] = [
        [*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]
    ]
    rows = TokenRows(
        tokens=np.concatenate([np.asarray(ids, dtype=np.int32) for ids in encoded]),
        indptr=indptr_of([len(ids) for ids in encoded]),
        owners=np.zeros(len(encoded), dtype=np.int64),
        num_users=1,
    )
    ordinary(
        model,
        rows,
        pad_token=tokenizer.pad_token_id,
        steps=scenario.pretrain_steps,
        batch_size=64,
        learning_rate=3e-3,
        rng=np.random.default_rng([seed, 4]),
        on_step=on_step,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def word_tokenizer(words: tuple[str, ...]) -> Any:
    """A tokenizer whose tokens are whole words. The word list is public."""
    end = "<end>"
    vocabulary = {word: number for number, word in enumerate((end, *words))}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=end))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=end, pad_token=end, unk_token=end
    )


def ordinary(
    model: nn.Module,
    rows: TokenRows,
    *,
    pad_token: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    rng: np.random.Generator,
    on_step: OnStep,
) -> None:
    """Train without privacy: shuffled batches, mean loss, AdamW, one-cycle learning rate."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps + 1, pct_start=0.1
    )
    device = trainable[0].device
    for step, chosen in zip(range(steps), _shuffled(len(rows), batch_size, rng), strict=False):
        input_ids, labels = rows.padded(chosen, pad_token=pad_token)
        batch = {
            "input_ids": torch.from_numpy(input_ids).to(device),
            "labels": torch.from_numpy(labels).to(device),
        }
        optimizer.zero_grad()
        causal_lm_loss(model, batch).mean().backward()
        optimizer.step()
        schedule.step()
        on_step(step + 1)


def _shuffled(count: int, batch_size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    while True:
        order = rng.permutation(count)
        for start in range(0, count - batch_size + 1, batch_size):
            yield order[start : start + batch_size]


def _ordinary_steps(rows: TokenRows, plan: Plan, scenario: Scenario) -> int:
    """The number of batches that hold as many records as the private run is expected to use."""
    per_user = np.bincount(rows.owners, minlength=rows.num_users)
    expected_group = np.minimum(per_user, scenario.group_size).mean()
    return round(plan.steps * plan.divisor * expected_group / scenario.ordinary_batch)


@dataclass(frozen=True, kw_only=True)
class _Finding:
    loss: float
    leaked: int


class _Examiner:
    """Measures a model's loss on other people's messages, and the secrets that it gives away."""

    def __init__(
        self, tokenizer: Any, held_out: TokenRows, secrets: list[synthetic.Secret]
    ) -> None:
        self._tokenizer = tokenizer
        self._held_out = held_out
        self._secrets = secrets

    def __call__(self, model: nn.Module) -> _Finding:
        result = evaluate(model, self._held_out, pad_token=self._tokenizer.pad_token_id)
        return _Finding(loss=result.loss, leaked=sum(self._leaks(model, s) for s in self._secrets))

    def _leaks(self, model: nn.Module, secret: synthetic.Secret) -> bool:
        prompt = self._tokenizer(
            secret.prompt, return_tensors="pt", return_token_type_ids=False
        ).to(next(model.parameters()).device)
        code = self._tokenizer(" " + secret.code)["input_ids"]
        generated = model.generate(  # pyright: ignore[reportCallIssue]
            **prompt,
            max_new_tokens=len(code),
            do_sample=False,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        text = self._tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :])
        return text.split()[: synthetic.CODE_DIGITS] == secret.code.split()


def _write_config(out: Path, base: tuple[str, str | None], scenario: Scenario, device: str) -> Path:
    path = out / "private.toml"
    gguf = f'gguf_file = "{base[1]}"\n' if base[1] else ""
    lora = ""
    if scenario.lora is not None:
        targets = json.dumps(scenario.lora.targets)
        lora = (
            f"\n[model.lora]\nrank = {scenario.lora.rank}\nalpha = {scenario.lora.alpha}\n"
            f"targets = {targets}\n"
        )
    path.write_text(
        f"""# userdp train {path} --out {out / "private"}

[data]
store = "{out / "train"}"
evaluation = "{out / "held_out"}"
sequence_length = {scenario.sequence_length}

[model]
path = "{base[0]}"
{gguf}{lora}
[privacy]
unit = "user"
num_users = {scenario.num_users}
expected_cohort_size = {scenario.expected_cohort_size}
group_size = {scenario.group_size}
clip_norm = {scenario.clip_norm}
epsilon = {scenario.epsilon}
delta = {scenario.delta}

[training]
steps = {scenario.steps}
optimizer = "adam"
learning_rate = {scenario.learning_rate}
schedule = "linear"
schedule_hold = 0.5
device = "{device}"
"""
    )
    return path


def _story(outcome: Outcome, scenario: Scenario) -> list[Section]:
    losses = (outcome.loss_before, outcome.loss_private, outcome.loss_non_private)
    planted = outcome.secrets_planted
    leaked = (
        outcome.secrets_leaked_before,
        outcome.secrets_leaked_private,
        outcome.secrets_leaked_non_private,
    )
    return [
        Section(
            heading="Both learned the way these people write",
            paragraphs=[
                f"{scenario.num_users:,} people's messages share a way of writing. Loss on "
                f"messages of {scenario.num_held_out} other people, per token; less is better. The "
                f"private model closes {outcome.gap_closed:.0%} of the gap."
            ],
            picture=_compared("held-out loss", losses, "{:.3f}"),
        ),
        Section(
            heading="Only one of them tells their secrets",
            paragraphs=[
                f"{planted} people wrote their own six-digit code in most of their messages. Asked "
                "politely, this many codes come back, digit by digit:"
            ],
            picture=_compared("secrets leaked", leaked, f"{{}} of {planted}", float(planted)),
        ),
    ]


def _compared(title: str, values: Sequence[float], text: str, longest: float | None = None) -> str:
    """Bars for the model before, the private one and the ordinary one."""
    labels = ("before", "private", "ordinary")
    entries = [
        svg.Bar(label=label, value=value, text=text.format(value), colour=colour)
        for label, value, colour in zip(labels, values, svg.COLOURS[:3], strict=True)
    ]
    return svg.bars(entries, title=title, longest=longest)

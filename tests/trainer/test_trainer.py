"""A Trainer script with user-level privacy: callbacks, files, refusals, early ends, resuming."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tiny_llama import PRIVACY, USERS, chats, texts
from transformers.integrations import integration_utils

import userdp
import userdp.defaults
from userdp import InputError, UserDPTrainer, UserStore
from userdp.accounting import events as userdp_events
from userdp.data.identity import key_beside
from userdp.history import history_of
from userdp.runs.check import check_run

pytest.importorskip("accelerate", reason="TrainingArguments needs accelerate")

# What callbacks, logs and files of the state may tell.
MEASURED = {"eval_loss", "eval_perplexity", "eval_mean_token_accuracy"}
MEASURED |= {"eval_mean_user_loss", "eval_worst_decile_loss"}
RELEASABLE = {"step", "epoch", "learning_rate", "epsilon", "delta"} | MEASURED


class Events(transformers.TrainerCallback):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.numbers: list[dict[str, Any]] = []
        self.others: set[str] = set()

    def _note(self, name: str, state: Any, **given: Any) -> None:
        self.names.append(name)
        self.numbers += [dict(given[key]) for key in ("logs", "metrics") if key in given]
        self.numbers += [dict(entry) for entry in state.log_history]
        self.others |= {key for key, value in given.items() if value is not None}

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note("train_begin", state, **given)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note("step_end", state, **given)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note("log", state, **given)

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note("evaluate", state, **given)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note("save", state, **given)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note("train_end", state, **given)


class AtStep(transformers.TrainerCallback):
    """Does something after one step."""

    def __init__(self, step: int, act: Callable[[Any], None]) -> None:
        self.step, self.act = step, act
        self.weights: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        if state.global_step == self.step:
            self.weights = {n: p.detach().clone() for n, p in given["model"].named_parameters()}
            self.act(control)
        return control


def stop(control: Any) -> None:
    control.should_training_stop = True


def fail(_: Any) -> None:
    raise RuntimeError("the machine is gone")


def test_a_run_tells_callbacks_public_numbers_and_leaves_a_model(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    events = Events()
    trainer = make(
        callbacks=[events],
        eval_dataset=texts(5, prefix="other"),
        arguments={"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2},
    )
    done = trainer.train()
    once = ["step_end", "step_end", "log", "log", "evaluate", "save"]
    assert events.names == ["train_begin", *once, *once, "log", "train_end"]
    assert {key for numbers in events.numbers for key in numbers} == RELEASABLE
    expected = {"model", "processing_class", "optimizer", "lr_scheduler", "logs", "metrics"}
    assert events.others == expected
    assert (done.global_step, trainer.state.global_step) == (4, 4)
    assert done.metrics["epsilon"] == trainer.statement.epsilon <= 8.0
    assert trainer.statement.guarantee
    assert done.training_loss != done.training_loss  # Not a number: it is secret.
    assert trainer.plan.delta == userdp.defaults.delta(USERS)

    out = tmp_path / "out"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, loaded.get_parameter(name)), name
    assert check_run(out / "userdp" / "run").ok
    assert (out / "userdp").stat().st_mode & 0o777 == 0o700
    assert (out / ".gitignore").read_text() == "/userdp/\n"
    told = json.loads((out / "trainer_state.json").read_text())
    assert told["log_history"] == trainer.state.log_history
    saved = sorted(path.name for path in out.glob("checkpoint-*"))
    assert saved == ["checkpoint-2", "checkpoint-4"]
    transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint-2")
    # Whoever chooses it by its eval_loss has seen the other one: it costs the whole plan.
    (entry,) = json.loads((out / "checkpoint-2" / "userdp_ancestry.json").read_text())["runs"]
    assert entry["steps"] == 4
    assert entry["event"] == userdp_events.to_json(trainer.plan.event(4))
    trainer.save_metrics("train", done.metrics)
    assert json.loads((out / "train_results.json").read_text()) == done.metrics
    trainer.save_model(str(tmp_path / "elsewhere"))
    assert (tmp_path / "elsewhere" / "model.safetensors").read_bytes() == (
        out / "model.safetensors"
    ).read_bytes()


def test_a_callback_may_stop_and_the_whole_plan_is_paid(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    stopping = AtStep(2, stop)
    trainer = make(callbacks=[stopping])
    assert trainer.train().global_step == 2
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, stopping.weights[name]), name
    assert trainer.run is not None
    assert trainer.run.ledger.steps == 4
    assert trainer.statement.epsilon == trainer.plan.epsilon(4) > trainer.plan.epsilon(2)
    assert any("stopped after 2 of 4 planned steps" in one for one in trainer.statement.cautions)
    assert check_run(tmp_path / "out" / "userdp" / "run").ok


def test_patience_with_other_people_ends_a_run_early(make: Callable[..., UserDPTrainer]) -> None:
    trainer = make(
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_threshold=1e9)],
        eval_dataset=texts(5, prefix="other"),
        arguments={
            "eval_strategy": "steps",
            "eval_steps": 1,
            "metric_for_best_model": "eval_loss",
            "greater_is_better": False,
        },
    )
    # Nothing improves by so much, so the second measurement ends it.
    assert trainer.train().global_step == 2
    assert trainer.state.best_metric is not None


def test_a_run_that_was_stopped_goes_on(make: Callable[..., UserDPTrainer], tmp_path: Path) -> None:
    arguments = {"save_steps": 1, "save_total_limit": 1, "logging_steps": 1}
    with pytest.raises(RuntimeError, match="machine is gone"):
        make(callbacks=[AtStep(3, fail)], arguments=arguments).train()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    with pytest.raises(InputError, match="already holds a run"):
        make(arguments=arguments).train()
    with pytest.raises(InputError, match="from its own last checkpoint"):
        make(arguments=arguments).train(resume_from_checkpoint=str(tmp_path / "other"))
    trainer = make(arguments=arguments)
    trainer.train(resume_from_checkpoint=True)
    assert check_run(tmp_path / "out" / "userdp" / "run").ok
    steps = [entry["step"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert steps == [1, 2, 3, 4]
    with pytest.raises(InputError, match="other records than train_dataset"):
        make(train_dataset=texts(USERS, seed=1))


def test_a_template_that_knows_the_date_does_not_change_a_run_that_goes_on(
    make: Callable[..., UserDPTrainer], llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = "{{ strftime_now('red') }} " + tokenizer.chat_template
    given: dict[str, Any] = {"train_dataset": chats(USERS), "processing_class": tokenizer}
    with pytest.raises(RuntimeError, match="machine is gone"):
        make(callbacks=[AtStep(2, fail)], **given).train()
    cache = tmp_path / "out" / "userdp" / "data" / "store" / "tokens"
    before = {path.name: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    shutil.rmtree(cache)

    class Tomorrow(datetime.datetime):
        def strftime(self, format: str) -> str:  # type: ignore[override]
            return "green"

    with monkeypatch.context() as patched:
        patched.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
        with pytest.raises(InputError, match="another reading of the records as tokens"):
            make(**given).train(resume_from_checkpoint=True)
    shutil.rmtree(cache)
    make(**given).train(resume_from_checkpoint=True)
    assert {path.name: path.read_bytes() for path in cache.rglob("*") if path.is_file()} == before


def test_a_callback_may_ask_for_a_checkpoint(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    def save(control: Any) -> None:
        control.should_save = True

    make(callbacks=[AtStep(3, save)], arguments={"save_strategy": "no"}).train()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-3"]


class Peeks(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        raise AssertionError


def test_events_inside_a_step_and_skipped_epochs_are_refused(
    make: Callable[..., UserDPTrainer],
) -> None:
    with pytest.raises(InputError, match="Peeks wants on_pre_optimizer_step"):
        make(callbacks=[Peeks()])

    def skip(control: Any) -> None:
        control.should_epoch_stop = True

    trainer = make(callbacks=[AtStep(1, skip)])
    with pytest.raises(InputError, match="Peeks wants on_pre_optimizer_step"):
        trainer.add_callback(Peeks)
    with pytest.raises(InputError, match="should_training_stop"):
        trainer.train()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_dataset": texts(3)}, "has training users"),
        ({"eval_dataset": [{"text": "red green blue"}]}, "has no column 'user_id'"),
        ({"train_dataset": [{"text": "red"}]}, "no column 'user_id'"),
        ({"train_dataset": None}, "train_dataset is missing"),
        ({"train_dataset": [{"user_id": "a", "words": "red"}]}, "none of the columns 'text'"),
        ({"data_collator": lambda rows: rows}, "sees records of several users"),
        ({"compute_loss_func": lambda outputs, labels: 0}, "a loss over a batch mixes users"),
        ({"compute_metrics": lambda prediction: {}}, "computed here"),
        ({"arguments": {"max_grad_norm": 0.3}}, r"max_grad_norm=0.3\): .*clip_norm"),
        ({"arguments": {"train_sampling_strategy": "group_by_length"}}, "drawn at random"),
        ({"arguments": {"eval_strategy": "steps", "eval_steps": 1}}, "give an eval_dataset"),
    ],
)
def test_what_cannot_be_private_is_refused_by_name(
    make: Callable[..., UserDPTrainer], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make(**given).train()


def test_people_who_cannot_be_compared_need_a_declaration(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    public = [{"text": "red green blue"}] * 3
    found = make(eval_dataset=public, eval_is_public=True).evaluate()
    assert found.keys() == MEASURED
    other = UserStore.from_dataset(texts(3, prefix="other"))
    with pytest.raises(InputError, match="hides its users under another key"):
        make(eval_dataset=other)
    make(eval_dataset=other, eval_is_public=True)
    # A declaration does not hide what can be compared.
    with pytest.raises(InputError, match="has training users"):
        make(eval_dataset=texts(3), eval_is_public=True)


def test_users_of_an_earlier_run_are_not_measured_on(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    make(store=shared, arguments={"max_steps": 1}).train()
    key = key_beside(shared)
    second: dict[str, Any] = {
        "epsilon": 16.0,
        "train_dataset": UserStore.from_dataset(texts(9, prefix="new"), tmp_path / "new", key=key),
        "arguments": {"output_dir": str(tmp_path / "second")},
    }
    second_of = partial(make, str(tmp_path / "out"), **second)
    before = UserStore.from_dataset(texts(3), key=key)
    with pytest.raises(InputError, match="has training users of an earlier run"):
        second_of(eval_dataset=before)
    with pytest.raises(InputError, match="has training users of an earlier run"):
        second_of(eval_dataset=before, eval_is_public=True)
    second_of(eval_dataset=UserStore.from_dataset(texts(3, prefix="other"), key=key))
    shutil.rmtree(tmp_path / "out" / "userdp" / "run" / "secret")
    with pytest.raises(InputError, match="cannot be compared with the users of an earlier run"):
        second_of(eval_dataset=before)


def test_the_same_texts_of_other_users_are_other_data(make: Callable[..., UserDPTrainer]) -> None:
    make()
    with pytest.raises(InputError, match="or other users' records"):
        make(train_dataset=texts(USERS, prefix="renamed"))


def test_records_of_every_form(make: Callable[..., UserDPTrainer], tmp_path: Path) -> None:
    def store(name: str, **given: Any) -> UserStore:
        return make(arguments={"output_dir": str(tmp_path / name)}, **given).train_store

    assert store("chats", train_dataset=chats(3)).manifest["text_kind"] == "chat"
    written = store(
        "formatted",
        train_dataset=[{"user_id": "a", "words": "red"}],
        formatting_func=lambda row: f"{row['words']} green",
    )
    assert written.text(0) == "red green"
    own = UserStore.from_dataset(texts(4), tmp_path / "own")
    assert store("store", train_dataset=own) is own
    shared = store("first", store=tmp_path / "shared")
    assert store("second", store=tmp_path / "shared").fingerprint == shared.fingerprint


@pytest.mark.slow
def test_the_ledger_says_which_tokens_carry_loss(tmp_path: Path, llama: str) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    pairs = [
        {"user_id": f"u{n % USERS}", "prompt": "red", "completion": " green"} for n in range(9)
    ]

    def task(name: str, dataset: Any, **given: Any) -> str:
        args = trl.SFTConfig(
            str(tmp_path / name), use_cpu=True, bf16=False, max_steps=1, max_length=32, **given
        )
        trainer = UserDPTrainer(llama, args, train_dataset=dataset, **PRIVACY)
        trainer.train()
        assert trainer.run is not None
        return trainer.run.ledger.bound_to["task"]

    assert task("all", chats(USERS)) == "causal"
    assert task("assistant", chats(USERS), assistant_only_loss=True) == "chat"
    assert task("pairs", pairs) == "chat"
    assert task("joined", pairs, completion_only_loss=False) == "causal"


def test_what_was_spent_before_is_composed_however_the_model_was_loaded(
    make: Callable[..., UserDPTrainer], tmp_path: Path
) -> None:
    make().train()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    elsewhere = {"output_dir": str(tmp_path / "second")}
    with pytest.raises(InputError, match="8"):
        make(again, arguments=elsewhere)
    assert len(history_of(again).all_entries()) == 1
    second = make(again, epsilon=16.0, arguments=elsewhere)
    second.train()
    assert len(second.statement.earlier) == 1
    assert 15.9 < second.statement.epsilon <= 16.0


def test_dropout_of_adapters_is_said_to_be_off(make: Callable[..., UserDPTrainer]) -> None:
    import peft

    config = peft.LoraConfig(
        r=2, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM"
    )
    with pytest.warns(UserWarning, match=r"lora_dropout=0.1 has no effect"):
        trainer = make(peft_config=config)
    assert all("lora" in n for n, p in trainer.model.named_parameters() if p.requires_grad)


def test_nothing_is_pushed_or_saved_before_it_is_trained(
    make: Callable[..., UserDPTrainer],
) -> None:
    trainer = make()
    with pytest.raises(InputError, match="userdp export"):
        trainer.push_to_hub()
    with pytest.raises(InputError, match="call train"):
        trainer.save_model()
    with pytest.raises(InputError, match="nothing to evaluate on"):
        trainer.evaluate()


class EventFiles:
    """In the place of torch's writer of event files: notes what it is told."""

    told: list[tuple[str, float, int, float]]

    def __init__(self, log_dir: str) -> None:
        EventFiles.told, self.place = [], log_dir

    def add_scalar(self, name: str, value: float, step: int, walltime: float | None = None) -> None:
        assert walltime is not None, "the time of the clock would be written"
        EventFiles.told.append((name, value, step, walltime))

    def close(self) -> None:
        EventFiles.told.append((self.place, 0.0, -1, -1.0))


def test_event_files_hold_no_time_of_a_step(
    make: Callable[..., UserDPTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = EventFiles  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    make(arguments={"report_to": ["tensorboard"]}).train()
    *numbers, closed = EventFiles.told
    assert closed[0] == str(tmp_path / "out" / "trackers" / "tensorboard")
    assert all(walltime == float(step) for _, _, step, walltime in numbers)
    assert {name for name, *_ in numbers} == RELEASABLE - MEASURED - {"step"}


def test_the_optimizer_and_schedule_may_be_given(
    make: Callable[..., UserDPTrainer], llama: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = make(model, optimizers=(optimizer, None))
    assert trainer.optimizer is optimizer
    trainer.train()
    rates = [e["learning_rate"] for e in trainer.state.log_history if "learning_rate" in e]
    # Linear from 0.5 to 0 in four steps.
    assert rates == pytest.approx([0.25, 0.0])
    elsewhere = {"output_dir": f"{trainer.args.output_dir}-2"}
    named = make(optimizer_cls_and_kwargs=(torch.optim.Adam, {"lr": 0.1}), arguments=elsewhere)
    assert isinstance(named.optimizer, torch.optim.Adam)


def test_an_optimizer_or_a_schedule_that_cannot_be_used_is_refused(
    make: Callable[..., UserDPTrainer], llama: str, tmp_path: Path
) -> None:
    model, tokenizer = userdp.load_model(llama)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(InputError, match="ReduceLROnPlateau wants a metric after every step"):
        make(model, optimizers=(optimizer, plateau), processing_class=tokenizer)
    store = UserStore.from_dataset(texts(USERS))
    plan = userdp.Plan.sample_users(
        num_users=USERS, expected_cohort_size=6, steps=1, noise_multiplier=1.0
    )
    with pytest.raises(InputError, match="ReduceLROnPlateau wants a metric after every step"):
        userdp.train(model, tokenizer, store, plan, optimizer=optimizer, scheduler=plateau)
    with pytest.raises(InputError, match="both say the optimizer"):
        make(
            model,
            optimizers=(optimizer, None),
            optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
        )


def test_adapters_on_adapters_are_refused(make: Callable[..., UserDPTrainer], llama: str) -> None:
    config = peft.LoraConfig(r=2, target_modules="all-linear")
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(llama), config)
    with pytest.raises(InputError, match="peft_config: the model has adapters already"):
        make(model, peft_config=config)


def test_the_plan_is_that_of_the_arguments(make: Callable[..., UserDPTrainer]) -> None:
    trainer = make(
        group_size=3, clip_norm=0.5, delta=1e-3, arguments={"max_steps": -1, "num_train_epochs": 2}
    )
    expected = userdp.Plan.sample_users(
        num_users=USERS,
        expected_cohort_size=6,
        group_size=3,
        steps=8,
        clip_norm=0.5,
        epsilon=8.0,
        delta=1e-3,
    )
    assert trainer.plan == expected
    assert dataclasses.asdict(trainer.state)["max_steps"] == 8


def test_a_trained_adapter_of_unknown_cost_is_refused(
    make: Callable[..., UserDPTrainer], llama: str
) -> None:
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(llama), peft.LoraConfig(r=2)
    )
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(weight)
    with pytest.raises(InputError, match="give the adapter's directory"):
        make(model=model)


def test_a_tracker_that_nobody_looked_at_is_refused(make: Callable[..., UserDPTrainer]) -> None:
    with pytest.raises(InputError, match="upload the output folder"):
        make(arguments={"report_to": ["comet_ml"]})


def test_a_tracker_of_transformers_is_no_callback(make: Callable[..., UserDPTrainer]) -> None:
    class Mine(integration_utils.MLflowCallback):
        pass

    for kind in (integration_utils.TensorBoardCallback, Mine):
        with pytest.raises(InputError, match="notes the time of every step"):
            make(callbacks=[kind])
    trainer = make()
    with pytest.raises(InputError, match="name the tracker in report_to"):
        trainer.add_callback(integration_utils.WandbCallback)


def test_a_transform_that_would_not_be_seen_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    hidden = datasets.Dataset.from_list(texts(4)).with_transform(lambda rows: rows)
    with pytest.raises(InputError, match=r"dataset\.map first"):
        UserStore.from_dataset(hidden, tmp_path / "store")

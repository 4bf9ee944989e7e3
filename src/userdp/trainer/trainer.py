"""The trainer itself: arguments in, a run and its model out."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from torch import nn
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import TrainOutput

from userdp.checkpoints import Saving
from userdp.data.store import UserStore
from userdp.durable import OWNER_ONLY_DIRECTORY, write_file
from userdp.errors import InputError
from userdp.evaluation import evaluate_store
from userdp.lineage import earlier_runs
from userdp.plan import Plan
from userdp.ranks import Ranks
from userdp.report.closing import unfinished_card
from userdp.statement import Statement
from userdp.tasks import task_named
from userdp.trainer.arguments import check_arguments, other_collator
from userdp.trainer.data import (
    PRIVATE,
    Formatting,
    evaluation_store,
    homes_of,
    task_of,
    training_store,
)
from userdp.trainer.loop import STATE_FILE, Loop, Metrics, callbacks_of
from userdp.trainer.prepared import prepared, refuse
from userdp.trainer.settings import (
    cohort_of,
    device_of,
    optimizer_of,
    schedule_of,
    sequence_length_of,
    step_settings_of,
    steps_of,
)
from userdp.training import Run, train

# Delta for whoever gives none: a tenth of what would let one of all users be given away.
DELTA_TIMES_USERS = 0.1

NO_COLLATOR = (
    "a collator sees records of several users at once, and could mix them: leave it out, and rows "
    "are padded; or prepare the records beforehand"
)
NO_LOSS = (
    "a loss over a batch mixes users: leave it out, or take PrivateStep with a record_loss of your "
    "own, one number per record"
)
NO_METRICS = (
    "loss, perplexity and accuracy are computed here: leave it out, and compute others from the "
    "trained model"
)


class UserDPTrainer:
    """A `Trainer` whose model would be nearly the same had any one user's data been left out.

    Takes the arguments of `transformers.Trainer` and `trl.SFTTrainer` under their names. In
    addition, `train_dataset` has a column of user ids (`user_column`), and the privacy is chosen:

    `epsilon`, `delta`: the guarantee of the run, and of private runs behind the model if there are
    any. Delta is by default 0.1 / `num_users`.
    `num_users`: a public number of users, never counted from the data; round it.
    `group_size`: the most rows of one user in a step; `max_length` says how long a row is.
    `clip_norm`: the L2 norm that each user's update is clipped to. `max_grad_norm` has no meaning.
    `expected_cohort_size`: users a step, on average. By default it is
    `per_device_train_batch_size * gradient_accumulation_steps`. More users a step mean less noise.
    `store`: where the users' records are kept, by default below `output_dir`. Runs that share a
    store share what is spent on its people. `train_dataset` may also be a `UserStore`.
    `eval_is_public`: declares that no training user is in `eval_dataset`, where that cannot be
    compared.
    `other_people`: declares that nobody here was in the private runs behind the model.

    `args.seed` never chooses cohorts or noise: these come from a secret of the run. Arguments that
    could not be private are refused by name (`userdp.trainer.arguments`). Callbacks are told public
    numbers only. If one of them ends the training early, the whole plan is charged all the same.
    """

    def __init__(
        self,
        model: str | nn.Module,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        formatting_func: Formatting | None = None,
        *,
        epsilon: float,
        num_users: int,
        delta: float | None = None,
        group_size: int = 4,
        clip_norm: float = 1.0,
        expected_cohort_size: float | None = None,
        user_column: str = "user_id",
        store: str | Path | None = None,
        eval_is_public: bool = False,
        other_people: bool = False,
    ) -> None:
        self.args: Any = args or transformers.TrainingArguments(output_dir="trainer_output")
        check_arguments(self.args)
        refuse("data_collator", other_collator(data_collator), NO_COLLATOR)
        refuse("compute_loss_func", compute_loss_func, NO_LOSS)
        refuse("compute_metrics", compute_metrics, NO_METRICS)
        refuse("preprocess_logits_for_metrics", preprocess_logits_for_metrics, NO_METRICS)
        if train_dataset is None:
            raise InputError("train_dataset is missing: there is nobody to learn from.")
        if eval_dataset is None and (self.args.eval_strategy != "no" or self.args.eval_on_start):
            raise InputError(
                "the arguments ask to evaluate: give an eval_dataset, of other people."
            )
        out = Path(self.args.output_dir)
        # Under a launcher all processes train together, and the first writes the files.
        self._ranks = Ranks.found()
        device = device_of(self.args)
        # As in `transformers`: it draws the initial weights of adapters, and nothing else here.
        transformers.set_seed(self.args.seed)
        self.model, self.processing_class = prepared(
            model, processing_class, peft_config, self.args
        )
        self.model.to(device)
        self._formatting, self._user_column = formatting_func, user_column
        self._eval_is_public, self._other_people = eval_is_public, other_people
        self._private = out / PRIVATE
        self._cohort = cohort_of(self.args, expected_cohort_size)
        self._sequence_length = sequence_length_of(self.args, self.model)
        self._ranks.on_first(lambda: self._hide_private_files(out))
        if isinstance(train_dataset, UserStore):
            self.train_store = train_dataset
        else:
            place = Path(store) if store is not None else self._private / "data" / "store"
            imported = self._ranks.on_first(
                lambda: training_store(
                    train_dataset,
                    self.args,
                    user=user_column,
                    place=place,
                    formatting=formatting_func,
                )
            )
            self.train_store = imported or UserStore.open(place)
        data = self.train_store.fingerprint
        self._earlier = earlier_runs(self.model, other_people=other_people, data=data)
        self.plan = Plan.sample_users(
            num_users=num_users,
            expected_cohort_size=self._cohort,
            group_size=group_size,
            steps=steps_of(self.args, num_users, self._cohort),
            clip_norm=clip_norm,
            epsilon=epsilon,
            delta=DELTA_TIMES_USERS / num_users if delta is None else delta,
            earlier=self._earlier,
        )
        self.eval_store = None if eval_dataset is None else self._other_users(eval_dataset)
        optimizer, self.lr_scheduler = optimizers
        if optimizer is None and optimizer_cls_and_kwargs is not None:
            kind, options = optimizer_cls_and_kwargs
            own = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            optimizer = kind(own, **options)
        self.optimizer = optimizer or optimizer_of(self.args, self.model)
        if self.lr_scheduler is None:
            self.lr_scheduler = schedule_of(self.args, self.optimizer, self.plan.steps)
        self.callback_handler = CallbackHandler(
            callbacks_of(self.args, callbacks or (), is_first=self._ranks.is_first),
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
        )
        self.run: Run | None = None
        self._loop = self._new_loop(resume=False)
        self.callback_handler.on_init_end(self.args, self.state, self.control)

    @property
    def state(self) -> transformers.TrainerState:
        """The step, the public epoch, and `log_history`: public numbers only."""
        return self._loop.state

    @property
    def control(self) -> transformers.TrainerControl:
        """What callbacks ask for."""
        return self._loop.control

    @property
    def statement(self) -> Statement:
        """What may be said about the model."""
        return self._finished().statement

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train, and leave the model in `output_dir`.

        With `resume_from_checkpoint`, the run in `output_dir` goes on where it was stopped. The
        output has no training loss, which is secret: it is not a number.
        """
        out = Path(self.args.output_dir)
        run = self._private / "run"
        resume = self._resumes(resume_from_checkpoint)
        self._loop = loop = self._new_loop(resume=resume)
        loop.begin()
        self.run = train(
            self.model,
            self.processing_class,
            self.train_store,
            self.plan,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            sequence_length=self._sequence_length,
            task=task_of(self.train_store, self.args),
            settings=step_settings_of(self.args),
            out=run,
            other_people=self._other_people,
            saving=Saving(asked=loop.save_asked),
            resume=resume,
            on_step=loop.on_step,
            stop_early=loop.stop_asked,
        )
        self.save_model()
        if self._ranks.is_first:
            write_file(out / "statement.json", (run / "statement.json").read_bytes())
        statement = self.run.statement
        numbers = {"epsilon": statement.epsilon, "delta": statement.delta}
        loop.end(numbers)
        loop.save_state(out)
        return TrainOutput(loop.state.global_step, math.nan, numbers)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> Metrics:
        """Loss, perplexity and accuracy on other people, from whom no training user may be."""
        store = self.eval_store if eval_dataset is None else self._other_users(eval_dataset)
        if store is None:
            raise InputError("there is nothing to evaluate on: give an eval_dataset.")
        metrics = self._measured(store, metric_key_prefix)
        self._loop.measured(metrics)
        return metrics

    def save_model(self, output_dir: str | None = None) -> None:
        """Copy the trained model, with what was spent on it, to `output_dir`.

        Of several processes the first writes, here as everywhere.
        """
        path = self._finished().path
        if not self._ranks.is_first:
            return
        assert path is not None
        out = Path(output_dir or self.args.output_dir)
        out.mkdir(parents=True, exist_ok=True)
        for file in sorted((path / "model").iterdir()):
            shutil.copyfile(file, out / file.name)

    def save_state(self) -> None:
        """Write the state to `output_dir`; `train` does so, too."""
        self._loop.save_state(Path(self.args.output_dir))

    def log_metrics(self, split: str, metrics: Metrics) -> None:
        """Print the metrics of a split, one a line."""
        for name, value in sorted(metrics.items()) if self._ranks.is_first else ():
            print(f"{split}: {name} = {value:.6g}")

    def save_metrics(self, split: str, metrics: Metrics) -> None:
        """Write the metrics of a split to `output_dir`."""
        if not self._ranks.is_first:
            return
        content = json.dumps(metrics, indent=4, sort_keys=True) + "\n"
        write_file(Path(self.args.output_dir) / f"{split}_results.json", content.encode())

    def add_callback(self, callback: Any) -> None:
        """Add a callback, as in `transformers`."""
        callbacks_of(self.args, [callback])
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, as in `transformers`."""
        self.callback_handler.remove_callback(callback)

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: `output_dir` also holds what must not be published."""
        raise InputError(
            f"{self.args.output_dir} also holds the run's secret and the users' records: write "
            f"what may be published with `userdp export {self._private / 'run'} --out DIR`, and "
            "upload that."
        )

    def _finished(self) -> Run:
        if self.run is None:
            raise InputError("nothing is trained yet: call train() first.")
        return self.run

    def _new_loop(self, *, resume: bool) -> Loop:
        saved = Path(self.args.output_dir) / STATE_FILE
        state = transformers.TrainerState()
        if resume and saved.is_file():
            state = transformers.TrainerState.load_from_json(str(saved))
        state.is_local_process_zero = state.is_world_process_zero = self._ranks.is_first
        state.max_steps = self.plan.steps
        epochs = self._cohort / self.plan.num_users
        state.num_train_epochs = math.ceil(self.plan.steps * epochs)
        state.compute_steps(self.args, self.plan.steps)
        return Loop(
            self.args,
            self.callback_handler,
            state,
            transformers.TrainerControl(),
            card=unfinished_card(self.plan),
            epochs_a_step=epochs,
            evaluate=None if self.eval_store is None else self._measured_on_others,
        )

    def _measured_on_others(self) -> Metrics:
        assert self.eval_store is not None
        return self._measured(self.eval_store, "eval")

    def _measured(self, store: UserStore, prefix: str) -> Metrics:
        found = evaluate_store(
            self.model,
            self.processing_class,
            store,
            sequence_length=self._sequence_length,
            task=task_named(task_of(store, self.args), self.processing_class),
        )
        return {
            f"{prefix}_loss": found.loss,
            f"{prefix}_perplexity": found.perplexity,
            f"{prefix}_mean_token_accuracy": found.accuracy_top1,
        }

    def _other_users(self, dataset: Any) -> UserStore:
        return evaluation_store(
            dataset,
            self.args,
            self.train_store,
            user=self._user_column,
            is_public=self._eval_is_public,
            formatting=self._formatting,
            earlier=self._earlier,
            homes=homes_of(self.model),
        )

    def _resumes(self, asked: str | bool | None) -> bool:
        asked = self.args.resume_from_checkpoint if asked is None else asked
        known = {Path(self.args.output_dir).resolve(), (self._private / "run").resolve()}
        if isinstance(asked, str) and Path(asked).resolve() not in known:
            raise InputError(
                f"resume_from_checkpoint={asked!r}: a private run goes on from its own last "
                "checkpoint. Say True, with the output_dir of the run."
            )
        return bool(asked)

    def _hide_private_files(self, out: Path) -> None:
        self._private.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
        ignored = out / ".gitignore"
        lines = ignored.read_text().splitlines() if ignored.is_file() else []
        if f"/{PRIVATE}/" not in lines:
            write_file(ignored, "".join(f"{line}\n" for line in [*lines, f"/{PRIVATE}/"]).encode())

"""The trainer itself: arguments in, a run and its model out."""

from __future__ import annotations

import inspect
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import TrainOutput

from userdp.bounding.selection import Selection
from userdp.clipping.settings import StepSettings
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.files.durable import write_file
from userdp.ledger.lineage import earlier_runs
from userdp.losses import RecordLoss
from userdp.models.heads import refuse_other_head
from userdp.models.load import classes_of
from userdp.optimizers.public_gradient import PublicData
from userdp.plan import Plan
from userdp.prices.earlier import Earlier
from userdp.prices.paid import Paid
from userdp.ranks import Ranks
from userdp.report.closing import unfinished_card
from userdp.runs.checkpoints import Saving
from userdp.statement import Statement
from userdp.tasks import Task, TaskName
from userdp.trainer.arguments import check_arguments
from userdp.trainer.choices import Privacy, epochs_a_step, optimizer_and_schedule, plan_of
from userdp.trainer.data import (
    PRIVATE,
    Formatting,
    Reading,
    evaluation_store,
    hide_private_files,
    homes_of,
    task_of,
    training_store,
)
from userdp.trainer.loop import Loop, begun_state, callbacks_of
from userdp.trainer.measuring import ONLY, Measuring, Metrics, check_evaluation
from userdp.trainer.prepared import prepared, refuse
from userdp.trainer.settings import (
    device_of,
    sequence_length_of,
    step_settings_of,
)
from userdp.trainer.starting import check_trained, check_unchanged, goes_on, has_steps
from userdp.trainer.surface import Surface, refuse_given, refuse_overridden
from userdp.trainer.task import check_collator, check_template, trained_task
from userdp.training.configured import named_task
from userdp.training.loop import Run, train

NO_LOSS = (
    "a loss over a batch mixes users: leave it out, or give record_loss=, a function of the model "
    "and a batch that returns one number per record"
)
NO_METRICS = (
    "loss, perplexity and accuracy are computed here: leave it out, and compute others from the "
    "trained model"
)


class UserDPTrainer(Surface):
    """A `Trainer` whose model would be nearly the same had any one user's data been left out.

    Takes the arguments of `transformers.Trainer` and `trl.SFTTrainer` under their names. In
    addition, `train_dataset` has a column of user ids (`user_column`), and the privacy is chosen:

    `epsilon`, `delta`: the guarantee of the run, and of private runs behind the model if there are
    any. Delta is by default `num_users` ** -1.1.
    `num_users`: a public number of users, never counted from the data; round it.
    `group_size`: the most rows of one user in a step; `max_length` says how long a row is.
    `clip_norm`: the L2 norm that each user's update is clipped to; by default clipping is
    automatic. `max_grad_norm` has no meaning.
    `expected_cohort_size`: users a step, on average: `per_device_train_batch_size *
    gradient_accumulation_steps` if one of them is not the default of its class, or a number that
    follows from `num_users`. More users a step mean less noise.
    `plan`: a whole `Plan` instead of all these, with any sampler, noise, clip rule or mark.
    `store`: where the users' records are kept, by default below `output_dir`. Runs that share a
    store share what is spent on its people. `train_dataset` may also be a `UserStore`.
    `other_people`: declares that nobody here was in the private runs behind the model.

    **Whose numbers are these?** An `eval_dataset` declares that its people agree to the release of
    its numbers, or that their records are public: callbacks, trackers, `trainer_state.json`, the
    report and the model card have them. If that is not so, say `eval_is_private`: they go to the
    run's `secret/` and to the terminal alone. `eval_is_public` declares that no training user is in
    it, where that cannot be compared.

    `task`, `record_loss`, `selection`, `select`, `resample`, `tokens_per_user`, `ema`, `public`,
    `paid` and `settings` are those of `userdp.train`. Without a `task`, the model's head says what
    is learned.

    `args.seed` never chooses cohorts or noise: these come from a secret of the run. Arguments that
    could not be private are refused by name (`userdp.trainer.arguments`, `userdp.trainer.surface`).
    Callbacks are told public numbers only. If one of them ends the training early, the whole plan
    is charged all the same.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        refuse_overridden(cls, UserDPTrainer)

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
        epsilon: float | None = None,
        num_users: int | None = None,
        delta: float | None = None,
        group_size: int | None = None,
        clip_norm: float | None = None,
        expected_cohort_size: float | None = None,
        plan: Plan | None = None,
        user_column: str = "user_id",
        store: str | Path | None = None,
        eval_is_public: bool = False,
        eval_is_private: bool = False,
        other_people: bool = False,
        task: Task | TaskName | None = None,
        record_loss: RecordLoss | None = None,
        selection: Selection | None = None,
        select: str = "random",
        resample: bool = False,
        tokens_per_user: int | None = None,
        ema: float | None = None,
        public: PublicData | None = None,
        paid: Sequence[Paid] = (),
        settings: StepSettings | None = None,
        **refused: Any,
    ) -> None:
        refuse_given(refused, list(inspect.signature(UserDPTrainer).parameters))
        self.args: Any = args or transformers.TrainingArguments(output_dir="trainer_output")
        given = check_arguments(self.args)
        refuse("compute_loss_func", compute_loss_func, NO_LOSS)
        refuse("compute_metrics", compute_metrics, NO_METRICS)
        refuse("preprocess_logits_for_metrics", preprocess_logits_for_metrics, NO_METRICS)
        if train_dataset is None:
            raise InputError("train_dataset is missing: there is nobody to learn from.")
        check_evaluation(
            self.args, eval_dataset, callbacks or (), is_private=eval_is_private, ema=ema
        )
        self._task: Task | TaskName | None = trained_task(model, task)
        check_collator(data_collator, self._task)
        out = Path(self.args.output_dir)
        # Under a launcher all processes train together, and the first writes the files.
        self._ranks = Ranks.found()
        device = device_of(self.args)
        # As in `transformers`: it draws the initial weights of adapters, and nothing else here.
        transformers.set_seed(self.args.seed)
        head = self._task if isinstance(self._task, str) else "causal"
        self.model, self.processing_class = prepared(
            model, processing_class, peft_config, self.args, head
        )
        self.model.to(device)
        if isinstance(self._task, str | None) and record_loss is None:
            refuse_other_head(self.model, head)
        self._eval_is_public, self._other_people = eval_is_public, other_people
        self._private = out / PRIVATE
        self._sequence_length = sequence_length_of(self.args, self.model, self.processing_class)
        self._settings = step_settings_of(self.args, given, settings)
        self._ranks.on_first(lambda: hide_private_files(out))
        self._reading = Reading(
            args=self.args,
            user=user_column,
            formatting=formatting_func,
            task=self._task if isinstance(self._task, str) else None,
            classes=classes_of(self.model),
        )
        self._datasets = train_dataset, eval_dataset
        if isinstance(train_dataset, UserStore):
            self.train_store = train_dataset
        else:
            place = Path(store) if store is not None else self._private / "data" / "store"
            imported = self._ranks.on_first(
                lambda: training_store(train_dataset, self._reading, place)
            )
            self.train_store = imported or UserStore.open(place)
        check_template(self.train_store, self.processing_class)
        self._earlier = self._runs_behind()
        self.plan = plan_of(
            self.args,
            given,
            Privacy(
                epsilon=epsilon,
                num_users=num_users,
                delta=delta,
                group_size=group_size,
                clip_norm=clip_norm,
                expected_cohort_size=expected_cohort_size,
            ),
            plan,
            paid=paid,
            earlier=self._earlier,
        )
        # What `train` takes under the same names.
        self._options: dict[str, Any] = {
            "record_loss": record_loss,
            "selection": selection,
            "select": select,
            "resample": resample,
            "tokens_per_user": tokens_per_user,
            "ema": ema,
            "public": public,
            "paid": paid,
        }
        self._measuring = Measuring(
            self.model,
            self.processing_class,
            self._other_users(eval_dataset),
            sequence_length=self._sequence_length,
            task_of=self._task_of,
            compute_dtype=self._settings.compute_dtype,
            is_private=eval_is_private,
        )
        self._measuring.check_metric(self.args.metric_for_best_model)
        self.optimizer, self.lr_scheduler = optimizer_and_schedule(
            self.args, given, self.model, optimizers, optimizer_cls_and_kwargs, self.plan.steps
        )
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
    def train_dataset(self) -> Any:
        """The dataset that was given."""
        return self._datasets[0]

    @property
    def eval_dataset(self) -> Any:
        """The dataset of other people that was given."""
        return self._datasets[1]

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
        resume = goes_on(resume_from_checkpoint, self.args, run)
        check_trained(self.model, self.optimizer)
        check_unchanged(self._earlier, self._runs_behind())
        has_begun = resume and self._ranks.by_first(lambda: has_steps(run, self.plan))
        self._loop = loop = self._new_loop(resume=has_begun)
        loop.begin()
        self.run = train(
            self.model,
            self.processing_class,
            self.train_store,
            self.plan,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            sequence_length=self._sequence_length,
            task=self._task or task_of(self.train_store, self.args),
            **self._options,
            settings=self._settings,
            out=run,
            validation=self._measuring.validation(),
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
        # A price without a promise, as under a mark, is told by the statement alone.
        numbers = {"epsilon": statement.epsilon, "delta": statement.delta}
        numbers = numbers if statement.guarantee else {}
        loop.end(numbers)
        loop.save_state(out)
        return TrainOutput(loop.state.global_step, math.nan, numbers)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> Metrics:
        """The numbers of other people, from whom no training user may be.

        Of several datasets they are named `eval_{name}_loss`. With `eval_is_private` only the
        caller gets them. `ignore_keys` has no meaning: loss and logits alone are read.
        """
        stores = self._measuring.stores
        if eval_dataset is not None:
            stores = self._other_users(eval_dataset)
        if not stores:
            raise InputError("there is nothing to evaluate on: give an eval_dataset.")
        metrics = self._measuring.of(stores, metric_key_prefix)
        if not self._measuring.is_private:
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

    def _finished(self) -> Run:
        if self.run is None:
            raise InputError("nothing is trained yet: call train() first.")
        return self.run

    def _new_loop(self, *, resume: bool) -> Loop:
        epochs = epochs_a_step(self.plan)
        state = begun_state(self.args, self.plan.steps, epochs, resume=resume)
        state.is_local_process_zero = state.is_world_process_zero = self._ranks.is_first
        measures = self._measuring.stores and self._options["ema"] is None
        return Loop(
            self.args,
            self.callback_handler,
            state,
            transformers.TrainerControl(),
            card=unfinished_card(self.plan),
            epochs_a_step=epochs,
            evaluate=self._measuring.on_the_way if measures else None,
        )

    def _runs_behind(self) -> list[Earlier]:
        """The private runs behind the model, as it is at this moment."""
        data = self.train_store.fingerprint
        return earlier_runs(self.model, other_people=self._other_people, data=data)

    def _task_of(self, store: UserStore) -> Task:
        task = self._task or task_of(store, self.args)
        if not isinstance(task, str):
            return task
        return named_task(task, self.model, self.processing_class, store)

    def _other_users(self, datasets: Any) -> dict[str, UserStore]:
        """The stores of the people to measure on, by the names of their datasets."""
        if datasets is None:
            return {}
        named = datasets if isinstance(datasets, Mapping) else {ONLY: datasets}
        homes = homes_of(self.model)
        return {
            str(name): evaluation_store(
                dataset,
                self._reading,
                self.train_store,
                is_public=self._eval_is_public,
                earlier=self._earlier,
                homes=homes,
            )
            for name, dataset in named.items()
        }

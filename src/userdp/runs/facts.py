"""What a run was made of, for those who read it later: model, optimizer, data, date.

A run from a configuration has it in `config.toml`. Every run, also one from Python, leaves
`run.json`. Nothing in it is needed for the guarantee, which comes from the ledger. It names paths
of this machine, so `userdp export` does not publish it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

from userdp.config.file import Config, load_config
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.files.durable import write_file
from userdp.names.optimizers import SCHEDULE_NAME
from userdp.names.quantisation import GGUF_FILE, Quantisation
from userdp.names.tasks import TaskName

RUN_FILE = "run.json"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
# How the ledger names a task with a caller's own loss, and the digest of the loss.
_OWN_LOSS = re.compile(r".*, loss (.+) [0-9a-f]{64}", re.DOTALL)
_LOSS_NAME = re.compile(r"[\w.:<>]*")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts that are known; an empty text is one that is not.

    `learning_rate` is None if it was left to the defaults and nobody wrote it down.
    `adapter_rank` is that of LoRA, and 0 for an adapter without a rank; None if the whole model was
    trained. `began` is a date. `quantize` and `dtype` say how the frozen base was loaded.
    `record_loss` names a loss of one's own; empty: the task's.
    """

    model: str
    store: str
    sequence_length: int
    optimizer: str
    learning_rate: float | None
    schedule: str
    task: TaskName = "causal"
    classes: tuple[str, ...] = ()
    record_loss: str = ""
    ema: float | None = None
    gguf_file: str | None = None
    quantize: Quantisation | None = None
    dtype: str = "float32"
    adapter_rank: int | None = None
    began: str = ""

    @property
    def rate(self) -> str:
        """The learning rate in words."""
        return "by default" if self.learning_rate is None else f"{self.learning_rate:g}"

    @property
    def is_adapter(self) -> bool:
        """Whether the run left an adapter, and not a whole model."""
        return self.adapter_rank is not None


def read_facts(run: Path) -> RunFacts:
    """The facts of the run in `run`. What its configuration says comes first."""
    written = _written(run / RUN_FILE)
    if (run / "config.toml").is_file():
        told = of_config(load_config(run / "config.toml"), began=written.began if written else "")
        # What is learned follows from the store if the configuration does not say it.
        if written is None:
            return told
        rate = written.learning_rate if told.learning_rate is None else told.learning_rate
        loss = told.record_loss or written.record_loss
        return replace(told, task=written.task, learning_rate=rate, record_loss=loss)
    if written is None:
        raise InputError(
            f"{run} has neither config.toml nor {RUN_FILE}, so what it was made of is not known. "
            "Restore one of them."
        )
    return written


def known_facts(run: Path) -> RunFacts | None:
    """The facts of the run in `run`; None if they are unknown, as for a caller's own loop."""
    try:
        return read_facts(run)
    except InputError:
        return None


def has_facts(run: Path) -> bool:
    """Whether a run says what it was made of. Older runs from Python do not."""
    return (run / "config.toml").is_file() or (run / RUN_FILE).is_file()


def of_config(config: Config, *, began: str = "") -> RunFacts:
    """The facts that a configuration tells."""
    lora = config.model.lora
    return RunFacts(
        model=config.model.path,
        store=str(config.data.store),
        sequence_length=config.data.sequence_length,
        optimizer=config.training.optimizer,
        learning_rate=config.training.learning_rate,
        schedule=config.training.schedule,
        task=config.data.task or "causal",
        classes=tuple(config.data.classes or ()),
        record_loss=config.data.record_loss or "",
        ema=config.training.ema,
        gguf_file=config.model.gguf_file,
        quantize=config.model.quantize,
        dtype=config.model.dtype,
        adapter_rank=None if lora is None else lora.rank,
        began=began,
    )


def of_parts(
    model: Any,
    optimizer: Any,
    scheduler: Any,
    store: UserStore,
    task: str,
    sequence_length: int,
    *,
    record_loss: str = "",
) -> RunFacts:
    """The facts that a model, its optimizer and the rest tell of themselves."""
    adapters = getattr(model, "peft_config", None)
    adapter = next(iter(adapters.values())) if adapters else None
    base = getattr(adapter, "base_model_name_or_path", None)
    named = base or getattr(getattr(model, "config", None), "name_or_path", "") or ""
    # A path is read from elsewhere later; a name on the hub is the same everywhere.
    path = Path(named)
    return RunFacts(
        model=str(path.resolve()) if named and path.is_dir() else str(named),
        store=str(store.path.resolve()),
        sequence_length=sequence_length,
        optimizer=type(optimizer).__name__,
        learning_rate=float(optimizer.defaults.get("lr", optimizer.param_groups[0]["lr"])),
        schedule=_schedule_name(scheduler),
        # A task's name begins with what is learned; its settings follow.
        task=cast(TaskName, task.split()[0].rstrip(",")),
        classes=_classes(model),
        record_loss=record_loss,
        gguf_file=_gguf_file(model),
        quantize=_quantisation(model),
        dtype=str(getattr(model, "dtype", "float32")).removeprefix("torch."),
        adapter_rank=None if adapter is None else int(getattr(adapter, "r", 0) or 0),
        began=datetime.now(UTC).date().isoformat(),
    )


def _schedule_name(scheduler: Any) -> str:
    """What a schedule is called; one that is not ours is called by its class."""
    if scheduler is None:
        return "constant"
    return str(getattr(scheduler, SCHEDULE_NAME, type(scheduler).__name__))


def _gguf_file(model: Any) -> str | None:
    """The GGUF file that `load_model` has read the model or its base from."""
    named = (vars(module).get(GGUF_FILE) for module in model.modules())
    return next((name for name in named if name), None)


def _quantisation(model: Any) -> Quantisation | None:
    """In how many bits transformers says that it loaded the model."""
    told: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    if getattr(told, "load_in_4bit", False):
        return "4bit"
    return "8bit" if getattr(told, "load_in_8bit", False) else None


def _classes(model: Any) -> tuple[str, ...]:
    """The names of the classes of a model that classifies."""
    config: Any = getattr(model, "config", None)
    if not str((getattr(config, "architectures", None) or [""])[0]).endswith("Classification"):
        return ()
    return tuple(str(name) for _, name in sorted(config.id2label.items()))


def is_local_base(run: Path, facts: RunFacts) -> bool:
    """Whether the base model's name is a path of this machine, and not a name on the hub.

    A relative path, such as `models/base`, looks like a name on the hub. The settings of the run's
    tokenizer say which it was, wherever one looks from.
    """
    if not HUB_NAME.fullmatch(facts.model):
        return True
    try:
        settings = json.loads((run / "model" / "tokenizer_config.json").read_bytes())
        return bool(settings["is_local"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return Path(facts.model).is_dir()


def base_name(run: Path, facts: RunFacts) -> str:
    """The base model's name. A path tells about this machine, so only its last name is given."""
    return Path(facts.model).name if is_local_base(run, facts) else facts.model


def own_loss(bound_to: Mapping[str, str], facts: RunFacts | None) -> str:
    """What a loss of one's own is called, if the run's ledger names one; else empty.

    The ledger cannot be edited. What the run was made of may have a longer name of the same loss.
    """
    named = _OWN_LOSS.fullmatch(bound_to.get("task", ""))
    if named is None:
        return ""
    return (facts.record_loss if facts is not None else "") or named[1]


def write_facts(run: Path, facts: RunFacts) -> None:
    """Leave the facts in the run's directory."""
    content = json.dumps(dataclasses.asdict(facts), indent=1, allow_nan=False) + "\n"
    write_file(run / RUN_FILE, content.encode())


def _written(place: Path) -> RunFacts | None:
    if not place.is_file():
        return None
    try:
        told = json.loads(place.read_text(encoding="utf-8"))
        found = RunFacts(**(told | {"classes": tuple(_texts(told.get("classes", [])))}))
        _check(found)
    except (AttributeError, ValueError, TypeError, OverflowError, RecursionError):
        raise InputError(f"{place}: damaged. Restore it, or delete it.") from None
    return found


def _check(facts: RunFacts) -> None:
    """Raise if a fact is not of its kind."""
    _texts([facts.model, facts.store, facts.optimizer, facts.schedule, facts.began, facts.dtype])
    _texts([facts.record_loss, facts.gguf_file or ""])
    numbers = [one for one in (facts.learning_rate, facts.ema) if one is not None]
    is_right = (
        type(facts.sequence_length) is int
        and type(facts.adapter_rank or 0) is int
        and all(type(one) in (int, float) and math.isfinite(one) for one in numbers)
        and facts.quantize in (None, *get_args(Quantisation))
        and facts.task in get_args(TaskName)
        and _LOSS_NAME.fullmatch(facts.record_loss) is not None
    )
    if not is_right:
        raise ValueError


def _texts(found: Any) -> list[str]:
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise TypeError
    return cast("list[str]", found)

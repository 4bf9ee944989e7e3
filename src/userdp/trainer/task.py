"""What a trainer learns from a record: the task that is asked for, or the one of the model's head.

A collator of `transformers` says what is learned, too: it must say the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import transformers
from torch import nn

from userdp.data.store import UserStore
from userdp.data.tokens import holds_chats
from userdp.errors import InputError
from userdp.models.heads import named_classes, task_of_head
from userdp.models.hub import asked_once
from userdp.names.tasks import TaskName
from userdp.tasks import MaskedTask, Task
from userdp.tasks.chat_tokens import has_template

COLLATOR = (
    "a collator sees records of several users at once, and could mix them: leave it out, and rows "
    "are padded; or prepare the records beforehand"
)
# What a collator for masked tokens does unless it is told otherwise, and what the masked task does.
_USUAL_SHARES = {
    "mlm_probability": MaskedTask.share,
    "mask_replace_prob": 0.8,
    "random_replace_prob": 0.1,
}
_WAY_OUT = (
    "give a model whose head fits (AutoModelForMaskedLM, AutoModelForSequenceClassification, "
    "AutoModelForCausalLM), or another task="
)


def trained_task(model: str | nn.Module, asked: Task | TaskName | None) -> Task | TaskName | None:
    """The task asked for, or the task of the model's head; None: the records decide."""
    if asked is not None and not isinstance(asked, str):
        return asked
    found = task_of_head(_head(model))
    if asked is None:
        return found
    own = asked if asked in ("masked", "classification") else None
    # A model that is loaded from its name gets the head of the task that is asked for.
    if not isinstance(model, str) and own != found and _head(model):
        raise InputError(f"task={asked!r}: the model is a {_head(model)[0]}; {_WAY_OUT}.")
    return asked


def check_template(store: UserStore, tokenizer: Any) -> None:
    """Refuse prompts and completions that are chats without a template to write them."""
    if store.text_kind == "pair" and holds_chats(store) and not has_template(tokenizer):
        raise InputError(
            "the prompts and completions are chats, and the tokenizer has no chat template: set "
            "processing_class.chat_template, or give a processing_class that has one."
        )


def check_collator(collator: Any, task: Task | TaskName | None) -> None:
    """Refuse a collator, unless it only does what happens here anyway."""
    if collator is None:
        return
    kind = type(collator).__name__
    if kind == "DataCollatorWithPadding":
        return
    if kind != "DataCollatorForLanguageModeling":
        raise InputError(f"data_collator: {COLLATOR}.")
    if getattr(collator, "padding_free", False):
        raise InputError(
            "data_collator: padding_free joins records of several users in one row: leave it out."
        )
    hides, is_masked = bool(getattr(collator, "mlm", False)), task == "masked"
    if hides != is_masked:
        kinds = ("masked tokens", "the next token")
        wanted, learned = kinds if hides else kinds[::-1]
        raise InputError(
            f"data_collator: DataCollatorForLanguageModeling(mlm={hides}) asks for {wanted}, and "
            f"this model learns {learned}: leave it out, or {_WAY_OUT}."
        )
    for name, usual in _USUAL_SHARES.items() if hides else ():
        value = getattr(collator, name, usual)
        if value != usual:
            raise InputError(
                f"data_collator: {name}={value!r}, and the masked task has {usual!r}: leave it "
                "out, or give task= a userdp.tasks.MaskedTask of your own."
            )


def _head(model: str | nn.Module) -> list[str]:
    """The class names of the model, as far as they are known."""
    if isinstance(model, str):
        if Path(model).is_dir():
            return list(named_classes(Path(model)))
        try:
            with asked_once(model):
                config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
        except (OSError, ValueError):
            # Loading the model comes next, and says what is wrong.
            return []
        return list(config.architectures or ())
    if isinstance(model, peft.PeftModel):
        model = model.get_base_model()
    return [type(model).__name__]

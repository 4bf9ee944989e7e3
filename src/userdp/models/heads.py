"""Which class of `transformers` a task needs, and what may be missing in a checkpoint for it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from userdp.errors import InputError
from userdp.models.hub import asked_once
from userdp.names.tasks import TaskName

_LOG = logging.getLogger(__name__)

# Names of classes whose head is for something else than the next token.
_NOT_CAUSAL = re.compile(
    r"For(Masked|Next|Multiple|Pre[Tt]raining|Question|Sequence|Token|Image|Audio|Object|CTC)"
    r"|MaskedLM$|Classif|Encoder(Model)?$|MultipleChoice$"
)
# Where `transformers` keeps its models.
_MODELS = "transformers.models."
# A model that ends in hidden states.
_NO_HEAD = re.compile(r"(?<!LMHead)(?<!Heads)Model$")
_MASKED = re.compile(r"MaskedLM$|ForPre[Tt]raining$")
# These have a name that says less, and were trained to fill gaps all the same (FlauBERT, XLM).
_ALSO_MASKED = frozenset(
    name for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() if name.endswith("LMHeadModel")
)
# Models with a head for classes, and those whose head is left out if classes are learned.
_CLASSIFIER = re.compile(r"ForSequenceClassification$")
_BASE = re.compile(r"ForSequenceClassification$|LM$|LMHeadModel$|ForPre[Tt]raining$|Model$")
# The seed of a head that begins fresh. The initial weights are public.
_HEAD_SEED = 0
_USUAL_SPREAD = 0.02


def model_class(task: TaskName) -> Any:
    """The class that loads a model for the task."""
    if task == "masked":
        return transformers.AutoModelForMaskedLM
    if task == "classification":
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModelForCausalLM


def lora_task(task: TaskName) -> str | None:
    """What `peft` calls the task. It has no name for masked language modelling."""
    if task == "classification":
        return "SEQ_CLS"
    return None if task == "masked" else "CAUSAL_LM"


def task_of_head(names: Iterable[str]) -> TaskName | None:
    """What a model of these class names was made for: its head says it.

    None if that is the next token, or if nobody can tell.

    >>> task_of_head(["BertForMaskedLM"]), task_of_head(["LlamaForCausalLM"])
    ('masked', None)
    """
    for name in names:
        if _MASKED.search(name):
            return "masked"
        if _CLASSIFIER.search(name):
            return "classification"
        if _NOT_CAUSAL.search(name):
            raise InputError(
                f"the model is a {name}, and its head is for none of the tasks here: use a model "
                "that predicts the next token, fills gaps, or classifies texts."
            )
    return None


def named_classes(source: Path) -> tuple[str, ...]:
    """The class names in a checkpoint's configuration, as far as they can be read."""
    settings = source / "config.json"
    if not settings.is_file():
        return ()
    try:
        return tuple(map(str, json.loads(settings.read_text()).get("architectures") or ()))
    except (ValueError, AttributeError, TypeError, RecursionError):
        # transformers reads the file next, and says what is wrong with it.
        return ()


def refuse_other_task(source: Path, task: TaskName) -> None:
    """Refuse a checkpoint that was saved for another task: its head would begin at random."""
    for name in named_classes(source):
        if task == "masked" and not (_MASKED.search(name) or name in _ALSO_MASKED):
            raise InputError(
                f"model {str(source)!r} is a {name}: it has no head that fills gaps, and one made "
                "for it would begin with random weights. Use a masked language model."
            )
        if task == "classification" and not _BASE.search(name):
            raise InputError(
                f"model {str(source)!r} is a {name}: its head is for another task. Use a model "
                "that classifies texts, or a language model."
            )
        if task in ("causal", "chat") and _NOT_CAUSAL.search(name):
            raise InputError(
                f"model {str(source)!r} is a {name}: its head does not predict the next token, and "
                "a causal model made of it would begin with random weights. Use a causal language "
                "model, or [data] task = 'masked' or 'classification' if that is what it is for."
            )


def refuse_other_head(model: nn.Module, task: TaskName) -> None:
    """Refuse a model of `transformers` whose head is for another task. Other modules pass.

    Without this a model that fills gaps would be trained to copy the token that it already sees.
    """
    bare: Any = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    # The name of a caller's class says nothing, but the class that it is derived from does.
    library = (c.__name__ for c in type(bare).__mro__ if c.__module__.startswith(_MODELS))
    name = next(library, None)
    if name is None:
        return
    if task == "masked":
        fits = name.endswith("MaskedLM") or name in _ALSO_MASKED
        lacks = "has no head that fills gaps"
    elif task == "classification":
        fits, lacks = bool(_CLASSIFIER.search(name)), "has no head for classes"
        if fits:
            _refuse_other_labels(bare)
    else:
        is_other = _NOT_CAUSAL.search(name) or _NO_HEAD.search(name)
        fits, lacks = not is_other, "has no head that predicts the next token"
        if getattr(getattr(bare, "config", None), "is_encoder_decoder", False):
            fits, lacks = False, "writes a text for another one, which is none of the tasks here"
    if not fits:
        raise InputError(
            f"task = {task!r}: the model is a {name}, which {lacks}. Say the task that it is for "
            "(task='causal', 'chat', 'masked' or 'classification'), or load it for this one: "
            f"userdp.load_model(..., task={task!r})."
        )


def _refuse_other_labels(model: Any) -> None:
    """Refuse a classifier whose records have several classes or a number, not one class each."""
    config = model.config
    kind = getattr(config, "problem_type", None)
    if kind in (None, "single_label_classification") and config.num_labels > 1:
        return
    kind = kind if kind == "multi_label_classification" else "regression"
    raise InputError(
        f"the model is for {kind} (problem_type={config.problem_type!r}, "
        f"num_labels={config.num_labels}), and a classifier here learns one class of each record: "
        "load it with problem_type='single_label_classification' and two labels or more, or give a "
        "record_loss of your own."
    )


def class_options(source: str, task: TaskName, classes: Sequence[str] | None) -> dict[str, Any]:
    """What to tell `transformers` about the classes: their names, if the model has none yet."""
    if task != "classification":
        if classes is not None:
            raise InputError(f"classes have no meaning with task = {task!r}: leave them out.")
        return {}
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    if any(_CLASSIFIER.search(name) for name in config.architectures or ()):
        own = class_names(config)
        if classes is not None and tuple(classes) != own:
            raise InputError(
                f"model {source!r} knows the classes {list(own)}, and [data] classes are "
                f"{list(classes)}. Leave them out, or use a model without classes."
            )
        return {}
    if not classes:
        raise InputError(
            f"model {source!r} has no classes yet: name them, [data] classes = ['one', 'other']. "
            "They are public; do not collect them from the records."
        )
    return {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def classes_at(source: str) -> tuple[str, ...]:
    """The names of the classes that the model at this place knows; the weights are not read."""
    try:
        with asked_once(source):
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(f"model {source!r}: its config.json cannot be read.") from error
    return class_names(config)


def class_names(config: Any) -> tuple[str, ...]:
    """The names of a model's classes, in the order of their numbers."""
    names: dict[int, str] = getattr(config, "id2label", None) or {}
    return tuple(names[number] for number in sorted(names))


def begin_missing(model: nn.Module, source: str, task: TaskName, missing: Iterable[str]) -> None:
    """Give the head for classes its first weights, where the checkpoint has none.

    They come from a fixed seed, so that they are the same for everyone. Whatever else is missing is
    refused, because it would begin at random.
    """
    begins = task == "classification" and not _is_classifier(source)
    base = getattr(model, "base_model_prefix", "") + "."
    # The pooler belongs to the head: a model that predicts tokens has none.
    head = sorted(
        name for name in missing if begins and (not name.startswith(base) or ".pooler." in name)
    )
    lost = sorted(set(missing) - set(head))
    if lost:
        kind = "model that classifies" if task == "classification" else f"{task} language model"
        raise InputError(
            f"model {source!r} lacks {len(lost):,} of its weights, such as {lost[0]!r}: they would "
            f"begin at random. Use a whole checkpoint of a {kind}."
        )
    if not head:
        return
    generator = torch.Generator().manual_seed(_HEAD_SEED)
    config: Any = getattr(model, "config", None)
    spread = getattr(config, "initializer_range", None) or _USUAL_SPREAD
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in head:
            weight = parameters[name]
            if weight.dim() > 1:
                weight.copy_(spread * torch.randn(weight.shape, generator=generator))
            else:
                weight.fill_(1.0 if name.endswith("weight") else 0.0)
    _LOG.warning("the head for classes begins fresh, from a fixed seed: %s", ", ".join(head))


def head_of(model: nn.Module) -> list[str]:
    """The names of the modules of a classifier that lie beside its base: all are trained.

    peft finds modules by the end of their names. So a name that fits something in the base, too, is
    left out: adapters are trained there.
    """
    base = str(getattr(model, "base_model_prefix", ""))
    inside = [name for name, _ in model.named_modules() if name.startswith(f"{base}.")]
    return [
        name
        for name, module in model.named_children()
        if name != base
        and any(True for _ in module.parameters())
        and not any(other.endswith(name) for other in inside)
    ]


def _is_classifier(source: str) -> bool:
    return any(_CLASSIFIER.search(name) for name in named_classes(Path(source)))

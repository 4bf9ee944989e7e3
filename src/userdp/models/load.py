"""Loads Hugging Face models and tokenizers unchanged, with LoRA on request.

Only safetensors or GGUF weights are read, and no code from a checkpoint runs. A pickle could attack
the machine, and remote code could break the guarantee.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn

from userdp.errors import InputError
from userdp.history import carry, history_of, merged, read_history

# Importing it makes the model known to `transformers`.
from userdp.models import word_lstm as word_lstm
from userdp.models.adapters import Lora, add_lora, first_line
from userdp.models.checks import input_embedding
from userdp.models.heads import (
    begin_missing,
    class_names,
    class_options,
    model_class,
    refuse_other_task,
)
from userdp.models.hub import asked_once
from userdp.models.quantised import freeze, loading_options, quantisation_of
from userdp.names.quantisation import GGUF_FILE, Quantisation
from userdp.names.tasks import TaskName


def load_model(
    name_or_path: str | Path,
    *,
    task: TaskName = "causal",
    classes: Sequence[str] | None = None,
    lora: Lora | None = None,
    gguf_file: str | None = None,
    dtype: torch.dtype = torch.float32,
    quantize: Quantisation | None = None,
    device: str = "cpu",
) -> tuple[nn.Module, Any]:
    """A language model for the task and its tokenizer, from a hub name or a directory.

    For classification, `classes` names the classes of a model that has none yet. They are public.
    Without `lora`, every parameter is trained. With it, only the adapters are. With `quantize`, the
    weights of linear layers are kept in 4 or 8 bits, and nothing but adapters can be trained.
    """
    source = str(name_or_path)
    if quantize and gguf_file:
        raise InputError(f"quantize has no meaning for {gguf_file}, a GGUF file: leave it out.")
    _refuse_missing_path(source)
    base = _base_of(Path(source))
    _refuse_missing_path(base)
    _refuse_pickle(Path(source))
    if base and lora is not None:
        raise InputError(
            f"{source} has a trained adapter already, and a new one would take its place: leave "
            "LoRA out to train that one on, or name its base to begin again."
        )
    if base:
        # `transformers` would load the adapter frozen, and without its head for classes.
        model, _ = load_model(
            base, task=task, classes=classes, dtype=dtype, quantize=quantize, device=device
        )
        return load_adapter(model, Path(source)), load_tokenizer(source)
    tokenizer = load_tokenizer(source, gguf_file=gguf_file)
    options: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {"use_safetensors": True}
    if quantize:
        options |= loading_options(quantize, device)
    refuse_other_task(Path(source), task)
    try:
        with asked_once(source):
            options |= class_options(source, task, classes)
            loaded: Any = model_class(task).from_pretrained(
                source, dtype=dtype, trust_remote_code=False, output_loading_info=True, **options
            )
    except InputError:
        raise
    except Exception as error:
        raise _not_loaded(f"model {source!r}", source, error) from error
    model, loading = loaded
    begin_missing(model, source, task, loading["missing_keys"])
    if gguf_file:
        # Whoever loads the base of an adapter again has to name the file, too.
        setattr(model, GGUF_FILE, gguf_file)
    check_vocabulary(model, tokenizer)
    if task == "classification" and model.config.pad_token_id is None:
        # Decoders find the end of a text by it.
        model.config.pad_token_id = tokenizer.pad_token_id
    remember(model, Path(source))
    if quantize:
        freeze(model)
    if lora is not None:
        model = add_lora(model, lora, task=task)
    return (model if quantize else moved(model, device)), tokenizer


def load_tokenizer(source: str, *, gguf_file: str | None = None) -> Any:
    """The tokenizer. If it has no padding token, the end-of-text token serves as one.

    Files of a tokenizer beside a GGUF file say more than that one: special tokens, a template.
    """
    _refuse_missing_path(source)
    has_own = (Path(source) / "tokenizer.json").is_file()
    options = {"gguf_file": gguf_file} if gguf_file and not has_own else {}
    try:
        with asked_once(source):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                source, trust_remote_code=False, **options
            )
    except Exception as error:
        raise _not_loaded(f"tokenizer of {source!r}", source, error) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # transformers makes an empty tokenizer when its files are missing.
        raise InputError(
            f"tokenizer of {source!r} knows no word: its files (tokenizer.json) are missing there."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_adapter(model: nn.Module, adapter: Path) -> nn.Module:
    """The base model with a saved adapter."""
    _refuse_pickle(adapter)
    try:
        adapted = peft.PeftModel.from_pretrained(
            model,  # pyright: ignore[reportArgumentType]
            adapter,
            is_trainable=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"the adapter in {adapter} does not fit its base model: {first_line(error)} Load the "
            "base that it was trained on."
        ) from error
    remember(adapted, adapter)
    return adapted


def remember(model: nn.Module, source: Path) -> None:
    """Attach to the model what its directory says was spent on it."""
    base = Path(_base_of(source))
    if base.name and base.is_dir() and base != source:
        remember(model, base)
    found = read_history(source)
    if found is not None:
        carry(model, merged(history_of(model), found))


def _base_of(source: Path) -> str:
    """The name or path of the base that a saved adapter belongs to; empty for a whole model."""
    settings = source / "adapter_config.json"
    if not settings.is_file():
        return ""
    try:
        base = json.loads(settings.read_text()).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{settings} cannot be read, so the adapter's base model is not known. Restore the "
            "file."
        ) from error
    return str(base or "")


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """Refuse a tokenizer with more tokens than the model has embeddings."""
    # An adapter on the embedding has `weight`, but not `num_embeddings`.
    table = input_embedding(model)
    embeddings = math.inf if table is None else table.weight.shape[0]
    if len(tokenizer) > embeddings:
        raise InputError(
            f"the tokenizer has {len(tokenizer):,} tokens and the model embeddings for "
            f"{embeddings:,}: they do not belong together. Use the model's own tokenizer."
        )


def classes_of(model: nn.Module) -> tuple[str, ...]:
    """The names of the classes that a Hugging Face model knows."""
    return class_names(getattr(model, "config", None))


def save_model(model: nn.Module, tokenizer: Any, out: Path, *, card: str) -> None:
    """Write the model (or the adapter alone) as `transformers` and `peft` load it.

    `card` says what may be said about the weights. It stands in the place of the empty card that
    `peft` writes.
    """
    if not isinstance(model, peft.PeftModel) and quantisation_of(model) is None:
        forget_quantisation(model)
    model.save_pretrained(str(out))  # pyright: ignore[reportCallIssue]
    tokenizer.save_pretrained(out)
    _name_base_from_anywhere(out / "adapter_config.json")
    (out / "README.md").write_text(card, encoding="utf-8")


def forget_quantisation(model: nn.Module) -> None:
    """Remove the mark "quantised" from a model that was read from GGUF: its weights are floats now.

    With the mark, transformers refuses to save it.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    vars(model).pop("hf_quantizer", None)


def _name_base_from_anywhere(settings: Path) -> None:
    """Name an adapter's local base by its whole path: a relative one fails from other folders."""
    if not settings.is_file():
        return
    told = json.loads(settings.read_text(encoding="utf-8"))
    base = told.get("base_model_name_or_path")
    if base and Path(base).is_dir():
        told["base_model_name_or_path"] = str(Path(base).absolute())
        settings.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def adapter_tensors(saved: Path) -> frozenset[str] | None:
    """The names of the tensors in a saved adapter; None if a whole model is saved there."""
    path = saved / "adapter_model.safetensors"
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        return frozenset(file.keys())


def moved(model: nn.Module, device: str) -> nn.Module:
    """The model on a device."""
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used: {first_line(error)}") from error


def _refuse_missing_path(source: str) -> None:
    """Refuse a path that is no directory; otherwise the hub would be asked, which takes long.

    A hub name is one word, or two words with one slash between them.
    """
    path = Path(source)
    if path.is_file():
        raise InputError(f"model {source!r}: this is a file. {_way_to_file(path)}")
    if not source or path.exists():
        return
    meant = _meant(path)
    if meant is not None:
        raise InputError(
            f"model {source!r}: there is no such directory. Did you mean {str(meant)!r}? If it is "
            f"the name of a model on the hub, {str(meant)!r} hides it here."
        )
    if "/" not in source:
        return
    is_path = source.startswith((".", "/", "~")) or source.count("/") > 1
    if not is_path and not path.parent.is_dir():
        return
    way_out = "Write it without ~." if source.startswith("~") else "Check the spelling."
    if not is_path:
        way_out += f" If it is the name of a model on the hub, {path.parent}/ hides it here."
    raise InputError(f"model {source!r}: there is no such directory. {way_out}")


def _way_to_file(path: Path) -> str:
    """How a model is named of which somebody named a file."""
    if path.suffix == ".gguf":
        return f"Name its folder, {str(path.parent)!r}, and give gguf_file={path.name!r} beside it."
    return f"Name the directory that it is in: {str(path.parent)!r}."


def _meant(path: Path) -> Path | None:
    """The saved model whose path differs from this one by a slip of the pen."""
    found = Path(path.anchor) if path.is_absolute() else Path()
    for part in path.parts[1 if path.is_absolute() else 0 :]:
        if not (found / part).is_dir():
            there = [entry.name for entry in found.iterdir() if entry.is_dir()]
            close = difflib.get_close_matches(part, there, n=1, cutoff=0.75)
            if not close:
                return None
            part = close[0]
        found = found / part
    return found if (found / "config.json").is_file() else None


def _not_loaded(what: str, source: str, error: Exception) -> Exception:
    """The error for files that transformers cannot read: it raises whatever it meets in them."""
    if isinstance(error, MemoryError):
        return error
    place = Path(source)
    known = ("config.json", "tokenizer_config.json", "adapter_config.json")
    if place.is_dir() and not any((place / name).exists() for name in known):
        return InputError(
            f"{what}: it holds no model. Name a directory that `save_pretrained` wrote, or with "
            "gguf_file one that holds a GGUF file."
        )
    asked = "" if place.exists() else "there is no such directory, and as a name on the hub "
    return InputError(f"{what}: {asked}it could not be loaded: {first_line(error)}")


def _refuse_pickle(source: Path) -> None:
    if not source.is_dir():
        return
    has_safe = any(source.glob("*.safetensors")) or any(source.glob("*.gguf"))
    unsafe = [
        p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.pkl") for p in source.glob(pattern)
    ]
    if unsafe and not has_safe:
        raise InputError(
            f"{source} has its weights in {unsafe[0]}, a pickle, which can run any code when read. "
            "Convert them to safetensors first."
        )

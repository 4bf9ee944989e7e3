"""The model that a finished run left, as it is loaded to be evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from userdp.digests.of_runs import base_digest, digest_precision
from userdp.errors import InputError, LedgerError
from userdp.ledger.book import Ledger
from userdp.models.load import adapter_tensors, load_adapter, load_model, load_tokenizer
from userdp.runs.facts import RunFacts, read_facts

OTHER_BASE = "the base model that was loaded is not the one the adapter was trained on."


def load_run(run: Path) -> tuple[nn.Module, Any, RunFacts]:
    """The model that a run left, its tokenizer, and what the run was made of."""
    facts = read_facts(run)
    saved = run / "model"
    if not saved.is_dir():
        raise InputError(f"{run} holds no model: did the run finish?")
    if not facts.is_adapter:
        model, tokenizer = load_model(saved, task=facts.task)
        return model, tokenizer, facts
    # Few bits hold what is left of the numbers as they were loaded, so these must be the same.
    dtype: torch.dtype = getattr(torch, facts.dtype) if facts.quantize else torch.float32
    base, _ = load_model(
        facts.model,
        task=facts.task,
        classes=facts.classes or None,
        gguf_file=facts.gguf_file,
        dtype=dtype,
        quantize=facts.quantize,
    )
    return load_adapter(base, saved), load_tokenizer(str(saved)), facts


def check_base(run: Path, ledger: Ledger, model: nn.Module, *, unfinished: bool) -> bool | None:
    """Whether the base model below the run's adapter is the one that its closing row names.

    Another base is refused, unless `unfinished` runs are accepted. None if there is nothing to
    compare: the run left a whole model, or its ledger names no base.
    """
    published = adapter_tensors(run / "model")
    named = (ledger.end or {}).get("digests", {}).get("base_weights")
    if published is None or named is None:
        return None
    precision = digest_precision(str(named))
    is_same = (
        isinstance(getattr(torch, precision, None), torch.dtype)
        and base_digest(model, published, precision=precision) == named
    )
    if not is_same and not unfinished:
        raise LedgerError(
            f"{run}: {OTHER_BASE} Restore that base model, or say --unfinished to measure the "
            "adapter on this one."
        )
    return is_same

"""An adapter merged into its base: whole weights, for programs that load no adapters.

What a run's ledger names are the adapter's files. The merged weights, W + s B A, are computed from
these and from the base that the closing row names, and from nothing else. So they are
post-processing, and the run's statement holds for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from userdp.digests import digest_precision
from userdp.errors import InputError
from userdp.ledger import Ledger
from userdp.models.load import load_adapter, load_model, load_tokenizer
from userdp.saved_run import check_base


def write_merged(
    run: Path, ledger: Ledger, out: Path, *, base: str, gguf_file: str | None = None
) -> None:
    """Write the run's adapter, merged into its base, to `out` as a whole model.

    `base` is where the base lies if the adapter's own files do not lead to it. Another base than
    the one that was trained on is refused.
    """
    saved = run / "model"
    if not (saved / "adapter_config.json").is_file():
        raise InputError(f"{run} left a whole model, not an adapter: leave --merged out.")
    told = json.loads((saved / "adapter_config.json").read_text()).get("base_model_name_or_path")
    source = str(told) if told and (Path(told).is_dir() or not base) else base
    # The base has the digest that the ledger names in the precision that it was trained in.
    named = str((ledger.end or {}).get("digests", {}).get("base_weights", "float32"))
    dtype: torch.dtype = getattr(torch, digest_precision(named))
    model, _ = load_model(source, gguf_file=gguf_file, dtype=dtype)
    adapted: Any = load_adapter(model, saved)
    check_base(run, ledger, adapted, unfinished=False)
    merged = adapted.merge_and_unload(safe_merge=True)
    config = merged.config
    config._name_or_path = ""
    if hasattr(config, "quantization_config"):
        # A model read from GGUF still claims to be quantised, but its weights are floats now.
        del config.quantization_config
    merged.save_pretrained(str(out))
    load_tokenizer(str(saved)).save_pretrained(out)

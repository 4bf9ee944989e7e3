"""An adapter merged into its base: whole weights, for programs that load no adapters.

What a run's ledger names are the adapter's files. The merged weights, W + s B A, are computed from
these and from the base that the closing row names, and from nothing else. So they are
post-processing, and the run's statement holds for them. The ordinary export lies beside them in
`record/`, as the evidence.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import torch

from userdp.data.array_files import file_digest
from userdp.digests.of_runs import digest_precision
from userdp.errors import InputError
from userdp.files.durable import new_directory
from userdp.history import ANCESTRY_FILE
from userdp.ledger.book import Ledger
from userdp.models.load import forget_quantisation, load_adapter, load_model, load_tokenizer
from userdp.runs.export import ALLOWED, Exported, export, tells_a_path
from userdp.runs.facts import read_facts
from userdp.runs.files import RECORD
from userdp.runs.saved import check_base

# What the merged model has in common with the export of the adapter.
SHARED = ("statement.json", ANCESTRY_FILE)


def export_merged(run: Path, out: Path, *, base: str = "", license: str = "") -> Exported:
    """Write the run's adapter, merged into its base, to `out`, with the ordinary export in it."""
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} exists: choose another output directory.")
    if (run / "model" / "config.json").is_file():
        raise InputError(f"{run} left a whole model, not an adapter: leave --merged out.")
    with new_directory(out) as partial:
        record = partial / RECORD
        exported = export(run, record, base=base, license=license)
        ledger = Ledger.read(run / "ledger.jsonl")
        write_merged(run, ledger, partial)
        origins = {f"{RECORD}/{name}": origin for name, origin in exported.origins.items()}
        for path in sorted(path for path in partial.iterdir() if path.is_file()):
            _check(path)
            is_weights = path.name.endswith(".safetensors")
            origins[path.name] = "the adapter merged into its base" if is_weights else "the base's"
        weights = [name for name in origins if name.endswith(".safetensors")]
        (partial / "README.md").write_text(_card(record, ledger, partial, weights))
        origins["README.md"] = f"{RECORD}/README.md, and where the weights come from"
        for name in SHARED:
            (partial / name).write_bytes((record / name).read_bytes())
            origins[name] = f"{RECORD}/{name}, byte for byte"
        for path in partial.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        partial.chmod(0o755)
    return Exported(origins=origins, statement=exported.statement)


def write_merged(run: Path, ledger: Ledger, out: Path) -> None:
    """Write the adapter of a run, merged into its base, as a whole model.

    Another base than the one that was trained on is refused.
    """
    saved = run / "model"
    # The base has the digest that the ledger names in the precision that it was trained in.
    named = str((ledger.end or {}).get("digests", {}).get("base_weights", "float32"))
    dtype: torch.dtype = getattr(torch, digest_precision(named))
    facts = read_facts(run)
    if facts.quantize:
        raise InputError(
            f"{run} trained its adapter on a base in {facts.quantize[0]} bits: merged into whole "
            "weights it would be another model. Leave --merged out, and load the base with "
            f"load_in_{facts.quantize}=True below the adapter."
        )
    model, _ = load_model(
        facts.model,
        task=facts.task,
        classes=facts.classes or None,
        gguf_file=facts.gguf_file,
        dtype=dtype,
    )
    adapted: Any = load_adapter(model, saved)
    check_base(run, ledger, adapted, unfinished=False)
    merged = adapted.merge_and_unload(safe_merge=True)
    merged.config._name_or_path = ""
    forget_quantisation(merged)
    merged.save_pretrained(str(out))
    load_tokenizer(str(saved)).save_pretrained(out)


def _check(path: Path) -> None:
    is_known = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in ALLOWED)
    if not is_known or tells_a_path(path.name, path.read_bytes()):
        raise InputError(
            f"the merged model has {path.name}, which is not on the list of files that may be "
            "published, or names a path of this machine. Merge and publish it yourself."
        )


def _card(record: Path, ledger: Ledger, out: Path, weights: list[str]) -> str:
    """The card of the adapter, with the way from it to the merged weights."""
    card = (
        (record / "README.md")
        .read_text()
        .replace("library_name: peft", "library_name: transformers", 1)
    )
    base = (ledger.end or {}).get("digests", {}).get("base_weights", "not recorded")
    lines = [
        "## Merged weights",
        "",
        f"The adapter was merged into its base, whose digest in the ledger is {base}. The run's "
        f"ledger names the adapter's files: `userdp ledger verify {RECORD}` checks them.",
        "",
        *(f"- `{name}`: SHA-256 {file_digest(out / name)}" for name in sorted(weights)),
    ]
    return card.rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"

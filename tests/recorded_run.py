"""A small finished run's directory, made without training (a helper, not a test)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from userdp.history import History, write_history
from userdp.ledger.book import Ledger
from userdp.plan import Plan
from userdp.runs.files import model_files

CONFIG = """[data]
store = "{root}/store"
sequence_length = 16
[model]
path = "{base}"
{lora}
[privacy]
num_users = 40
expected_cohort_size = 20
group_size = 2
clip_norm = 1.0
noise_multiplier = 2.0
delta = 1e-3
[training]
steps = 3
"""


def safetensors(**metadata: str) -> bytes:
    """A file of weights with no tensor in it."""
    header = json.dumps({"__metadata__": {"format": "pt", **metadata}}).encode()
    return len(header).to_bytes(8, "little") + header


def write_run(
    run: Path,
    *,
    steps: int = 3,
    base: str = "gpt2",
    adapter: bool = False,
    files: dict[str, bytes] | None = None,
    finish: bool = True,
    fixed_seed: bool = False,
    bound_to: dict[str, str] | None = None,
) -> Path:
    """Write a run's directory: ledger, configuration, model with its past, statement, secrets."""
    run.mkdir(parents=True)
    lora = "lora = { rank = 2 }" if adapter else ""
    config = CONFIG.format(root=run.parent, base=base, lora=lora)
    (run / "config.toml").write_text(config)
    plan = Plan.sample_users(
        num_users=40,
        expected_cohort_size=20,
        group_size=2,
        steps=3,
        clip_norm=1.0,
        noise_multiplier=2.0,
        delta=1e-3,
    )
    ledger = Ledger.create(
        plan,
        path=run / "ledger.jsonl",
        bound_to={"config": hashlib.sha256(config.encode()).hexdigest(), **(bound_to or {})},
        fixed_seed=fixed_seed,
    )
    for _ in range(steps):
        ledger.charge_step()
    for name in ("noise.key", "users.bin"):
        (run / "secret" / name).write_bytes(b"secret of the run")
    for name in ("step-1/model.safetensors", "step-1/manifest.json"):
        (run / "checkpoints" / name).parent.mkdir(parents=True, exist_ok=True)
        (run / "checkpoints" / name).write_bytes(b"weights")
    if finish:
        _write_model(run / "model", ledger, base, adapter, files or {})
        ledger.finish({"final_weights": "x"}, model_files=model_files(run / "model"))
        told = json.dumps(ledger.statement().to_json(), indent=1)
        (run / "statement.json").write_text(told + "\n")
    ledger.close()
    return run


def _write_model(
    model: Path, ledger: Ledger, base: str, adapter: bool, files: dict[str, bytes]
) -> None:
    model.mkdir()
    weights, settings = (
        ("adapter_model.safetensors", "adapter_config.json")
        if adapter
        else ("model.safetensors", "config.json")
    )
    named = {"base_model_name_or_path" if adapter else "_name_or_path": base}
    contents = {
        weights: safetensors(),
        settings: json.dumps({"r": 2, **named}, indent=2).encode(),
        "tokenizer.json": b'{"model": {"vocab": {"/usr/bin/env": 0}}}',
        "tokenizer_config.json": b'{"pad_token": "<end>"}',
        # What peft writes about the base, with its path.
        "README.md": f"base_model: {base}\n".encode(),
    }
    for name, content in (contents | files).items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(content)
    (model / weights).chmod(0o600)
    write_history(model, History(record=ledger))

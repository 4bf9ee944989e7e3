"""A small trainer with a tiny Llama, as most tests here need it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_llama import PRIVACY, USERS, make_llama, texts

from userdp import UserDPTrainer


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture
def make(llama: str, tmp_path: Path) -> Callable[..., UserDPTrainer]:
    def made(model: Any = None, arguments: Any = None, **more: Any) -> UserDPTrainer:
        given: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 4,
            "per_device_train_batch_size": 6,
            "learning_rate": 0.01,
            "logging_steps": 2,
            "disable_tqdm": True,
            "use_cpu": True,
        }
        given |= arguments or {}
        args = transformers.TrainingArguments(**{k: v for k, v in given.items() if v is not None})
        more = {"train_dataset": texts(USERS)} | PRIVACY | more
        return UserDPTrainer(model or llama, args, **more)

    return made

"""Code counts with all that it calls, and counts the same in every process."""

from __future__ import annotations

import copy
import enum
import importlib
import os
import random
import re
import subprocess
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gpt2 import modeling_gpt2

import models_zoo
from userdp.digests.of_runs import code_digest, model_digest, optimizer_digest, parts_version
from userdp.updates import MeanGradient

FILES = {
    "loss_steps.py": """
FACTOR = 2.0
TABLE = {"of": [1.0]}
NAMES = {"b", "a", "d", "e", "f", "g", ("c", 1)}

def inner(x):
    return 2.0 * x

def helper(x):
    return inner(x)

class Scale:
    shift = 0.5

    def __init__(self, by):
        self.by = by

    def twice(self, x):
        return x + 1.0

    def __call__(self, model, batch):
        return self.twice(batch) * self.by + TABLE["of"][0] + len(NAMES)

SCALE = Scale(3.0)
""",
    "loss_tools.py": """
def scale(x):
    return 2.0 * x

def by_name(x):
    return globals()["sc" + "ale"](x)
""",
    "loss_package/__init__.py": "",
    "loss_package/tools.py": "from loss_steps import helper as helped\n",
    "loss_inside.py": "def late(x):\n    return 2.0 * x\n",
    "loss_top.py": """
import functools
import logging

import numpy as np
import torch

import loss_package.tools
import loss_tools
from loss_steps import FACTOR, SCALE, helper

log = logging.getLogger(__name__)

def deep(model, batch):
    return helper(batch)

def through_a_module(model, batch):
    return loss_tools.scale(batch)

def through_a_package(model, batch):
    return loss_package.tools.helped(batch)

def by_a_computed_name(model, batch):
    return getattr(loss_tools, "sc" + "ale")(batch)

def nested(model, batch):
    return (lambda x: FACTOR * x)(batch)

def through_an_object(model, batch):
    log.info("a logger is no code")
    return SCALE(model, np.mean(batch))

@torch.no_grad()
def decorated(model, batch):
    return helper(batch)

kept = functools.lru_cache(deep)

def imported_when_it_runs(model, batch):
    from loss_inside import late
    return late(batch)

class Net(torch.nn.Linear):
    def forward(self, x):
        return helper(super().forward(x))

class Rule:
    name = "scaled"

    def of(self, x):
        return helper(x)
""",
}
LOSSES = (
    "deep",
    "through_a_module",
    "through_a_package",
    "by_a_computed_name",
    "nested",
    "through_an_object",
    "decorated",
    "kept",
    "imported_when_it_runs",
)
Edit = Callable[[str, str, str], None]


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edit]:
    """Writes the modules, and edits one as an editor would between two processes."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = [file.removesuffix(".py").replace("/", ".") for file in FILES]
    names.append("loss_package")
    (tmp_path / "loss_package").mkdir()

    def write(file: str = "", old: str = "", new: str = "") -> None:
        for name, content in FILES.items():
            assert name != file or old in content
            (tmp_path / name).write_text(content.replace(old, new) if name == file else content)
        for name in names:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()

    write()
    yield write
    for name in names:
        sys.modules.pop(name, None)


def digest(name: str) -> str:
    return code_digest(getattr(importlib.import_module("loss_top"), name))


@pytest.mark.parametrize(
    ("name", "file", "old", "new"),
    [
        ("deep", "loss_steps.py", "return 2.0 * x", "return 0.0 * x"),
        ("through_a_module", "loss_tools.py", "return 2.0 * x", "return 0.0 * x"),
        ("by_a_computed_name", "loss_tools.py", "return 2.0 * x", "return 0.0 * x"),
        ("nested", "loss_steps.py", "FACTOR = 2.0", "FACTOR = 0.0"),
        ("through_an_object", "loss_steps.py", "return x + 1.0", "return x + 2.0"),
        ("through_an_object", "loss_steps.py", "Scale(3.0)", "Scale(0.0)"),
        ("through_an_object", "loss_steps.py", "shift = 0.5", "shift = 0.6"),
        ("through_an_object", "loss_steps.py", '"of": [1.0]', '"of": [2.0]'),
        ("decorated", "loss_steps.py", "return 2.0 * x", "return 0.0 * x"),
        ("kept", "loss_steps.py", "return 2.0 * x", "return 0.0 * x"),
        ("imported_when_it_runs", "loss_inside.py", "return 2.0 * x", "return 0.0 * x"),
    ],
)
def test_an_edit_of_anything_that_a_loss_calls_gives_it_another_name(
    edit: Edit, name: str, file: str, old: str, new: str
) -> None:
    before = digest(name)
    edit("", "", "")
    assert digest(name) == before
    edit(file, old, new)
    assert digest(name) != before


def test_an_edit_of_what_lies_in_a_module_of_a_module_is_noticed(edit: Edit) -> None:
    before = digest("through_a_package")
    edit("loss_steps.py", "return 2.0 * x", "return 0.0 * x")
    assert digest("through_a_package") != before


def test_models_and_parts_of_ones_own_count_with_what_they_call(edit: Edit) -> None:
    def found() -> tuple[str, str]:
        own = importlib.import_module("loss_top")
        part = type("Mine", (own.Rule, MeanGradient), {"__module__": "loss_top"})
        torch.manual_seed(0)
        return model_digest(own.Net(2, 1)), parts_version([part()])

    before = found()
    edit("", "", "")
    assert found() == before
    edit("loss_steps.py", "return 2.0 * x", "return 0.0 * x")
    after = found()
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_code_has_the_same_name_in_every_process(edit: Edit, tmp_path: Path) -> None:
    code = (
        "import loss_top; from userdp.digests.of_runs import code_digest\n"
        f"print(*(code_digest(getattr(loss_top, name)) for name in {LOSSES!r}))"
    )
    # Another order of every set, and compiled code that was read from a cache.
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    compiled = subprocess.run(
        [sys.executable, "-m", "compileall", "-q", str(tmp_path)], env=environment, check=False
    )
    assert compiled.returncode == 0
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == [digest(name) for name in LOSSES]


def test_what_calls_itself_and_what_holds_itself_is_described() -> None:
    def again(x: int) -> int:
        return again(x - 1) if x else len(ring)

    ring: list[object] = [again]
    ring.append(ring)
    assert code_digest(again) == code_digest(again)


def test_swapping_the_names_of_arguments_is_an_edit() -> None:
    def made(words: str) -> Callable[..., float]:
        space: dict[str, Callable[..., float]] = {}
        exec(f"def minus({words}): return {words.replace(', ', ' - ')}", space)
        return space["minus"]

    assert made("a, b")(b=1, a=3) != made("b, a")(b=1, a=3)
    assert code_digest(made("a, b")) != code_digest(made("b, a"))


def test_functions_that_are_not_pythons_count_by_name() -> None:
    def with_(function: Callable[..., object]) -> str:
        return code_digest(lambda x: function(x))

    assert with_(torch.exp) != with_(torch.log)
    table = {"a": 1}
    before = with_(table.get)
    table["a"] = 2
    assert with_(table.get) != before


class Pair(NamedTuple):
    weight: float


class Kind(enum.StrEnum):
    plain = "plain"


class Listed(list[float]):
    pass


class Options:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Held(torch.nn.Module):
    def __init__(self, scale: float, table: float) -> None:
        super().__init__()
        self._options = Options(scale)
        self.table = torch.tensor(table)
        self.register_buffer("late", torch.tensor(table), persistent=False)


def listed(scale: float) -> Listed:
    found = Listed([1.0])
    found.scale = scale  # type: ignore[attr-defined]
    return found


class Doubled(torch.nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.by * x


def scripted(by: float) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(Doubled(by))


def words(first: int) -> tokenizers.Tokenizer:
    table = {"a": first, "b": 1 - first}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="a"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Pair(1.0), (1.0,)),
        (Kind.plain, "plain"),
        (listed(1.0), listed(7.0)),
        (Held(1.0, 1.0), Held(2.0, 1.0)),
        (Held(1.0, 1.0), Held(1.0, 2.0)),
        (random.Random(1), random.Random(2)),
        (re.compile("a"), re.compile("b")),
        (Fraction(1, 2), Fraction(1, 3)),
        (deque([1.0]), deque([2.0])),
        (words(0), words(1)),
        (np.random.RandomState(1), np.random.RandomState(2)),
        (torch.ones(2).to_sparse(), (2 * torch.ones(2)).to_sparse()),
        (torch.tensor([1j]).conj(), torch.tensor([1j])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_loss_holds_counts_whatever_its_type(one: Any, other: Any) -> None:
    def loss(held: Any) -> Any:
        return lambda model, batch: held

    assert code_digest(loss(one)) != code_digest(loss(other))
    assert code_digest(loss(one)) == code_digest(loss(copy.deepcopy(one)))


def test_methods_of_a_value_that_is_derived_from_a_plain_one_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in (Pair(1.0), Kind.plain):
        before = code_digest(lambda model, batch, value=value: value)
        monkeypatch.setattr(type(value), "apply", lambda self, x: 2.0 * x, raising=False)
        assert code_digest(lambda model, batch, value=value: value) != before


def test_a_script_counts_by_all_that_a_loss_reaches_in_it() -> None:
    def named(body: str, beside: str = "") -> str:
        script: dict[str, Any] = {"__name__": "__main__"}
        helper = f"def helper(x):\n    return {body}\n"
        exec(f"{helper}def loss(model, batch):\n    return helper(batch)\n{beside}", script)
        return code_digest(script["loss"])

    assert named("2.0 * x") != named("0.0 * x")
    assert named("2.0 * x") == named("2.0 * x", "resume = True")


def test_scripts_and_views_count_by_what_they_hold() -> None:
    pairs = [(scripted(2.0), scripted(3.0)), ({1: 1.0}.values(), {1: 2.0}.values())]
    for one, other in pairs:
        assert code_digest([one]) == code_digest([one]) != code_digest([other])


Patch = pytest.MonkeyPatch


def seven_times(self: nn.Module, *given: Any, **named: Any) -> Any:
    return 7 * type(self).forward(self, *given, **named)


class Wrapped:
    def __init__(self, old: Callable[..., Any]) -> None:
        self.old = old

    def __call__(self, *given: Any) -> Any:
        return 7 * self.old(*given)


def of_its_block(model: nn.Module) -> Any:
    return model.get_submodule("transformer.h.0.mlp")


def a_method(model: nn.Module, _: Patch) -> None:
    of_its_block(model).forward = types.MethodType(seven_times, of_its_block(model))


def a_callable(model: nn.Module, _: Patch) -> None:
    of_its_block(model).forward = Wrapped(of_its_block(model).forward)


def a_class(model: nn.Module, patch: Patch) -> None:
    patch.setattr(type(of_its_block(model).act), "forward", lambda self, x: 7 * x)


def a_function_of_the_library(model: nn.Module, patch: Patch) -> None:
    patch.setattr(modeling_gpt2, "eager_attention_forward", lambda *given: given)


def a_function_of_torch(model: nn.Module, patch: Patch) -> None:
    patch.setattr(nn.functional, "gelu", lambda x: 7 * x)


def attention(model: Any, patch: Patch) -> None:
    model.set_attn_implementation("eager")


def a_loss_function(model: Any, _: Patch) -> None:
    model.loss_function = lambda logits, labels: 7 * logits


def a_tensor(model: nn.Module, _: Patch) -> None:
    of_its_block(model).shift = torch.ones(1)


def a_global_hook(model: nn.Module, patch: Patch) -> None:
    hooks = torch.nn.modules.module._global_forward_hooks
    patch.setitem(hooks, 10**6, lambda module, given, out: 7 * out)


@pytest.mark.parametrize(
    "edit",
    [
        a_method,
        a_callable,
        a_class,
        a_function_of_the_library,
        a_function_of_torch,
        attention,
        a_loss_function,
        a_tensor,
        a_global_hook,
    ],
    ids=lambda edit: edit.__name__,
)
def test_whatever_is_replaced_in_a_librarys_model_is_noticed(
    edit: Callable[[nn.Module, Patch], None], monkeypatch: Patch
) -> None:
    model = models_zoo.build("gpt2 tied")
    before = model_digest(model)
    assert model_digest(models_zoo.build("gpt2 tied", seed=1)) == before
    edit(model, monkeypatch)
    assert model_digest(model) != before


def test_an_edit_of_a_registered_attention_is_noticed(monkeypatch: Patch) -> None:
    model: Any = models_zoo.build("gpt2 tied")
    found: list[str] = []
    for factor in (1, 7):

        def attend(*given: Any, factor: int = factor, **named: Any) -> Any:
            return factor * sdpa_attention_forward(*given, **named)[0], None

        monkeypatch.setitem(AttentionInterface._global_mapping, "mine", attend)
        model.set_attn_implementation("mine")
        found.append(model_digest(model))
    assert found[0] != found[1]


class OwnOptimizer(torch.optim.SGD):
    def __init__(self, weight: nn.Parameter, factor: float, inner: Any = None) -> None:
        super().__init__([weight], lr=0.1)
        self._factor, self.inner = factor, inner
        self.watched = [weight]


def test_all_that_an_optimizer_holds_counts_but_the_weights() -> None:
    weight = nn.Parameter(torch.zeros(3))
    plain = optimizer_digest(OwnOptimizer(weight, 1.0))
    assert optimizer_digest(OwnOptimizer(nn.Parameter(torch.ones(3)), 1.0)) == plain
    others = [
        OwnOptimizer(weight, 2.0),
        OwnOptimizer(weight, 1.0, Options(1.0)),
        OwnOptimizer(weight, 1.0, Options(2.0)),
        OwnOptimizer(weight, 1.0, torch.optim.SGD([weight], lr=0.1)),
        OwnOptimizer(weight, 1.0, torch.optim.SGD([weight], lr=0.2)),
        OwnOptimizer(weight, 1.0, [torch.optim.SGD([weight], lr=0.3)]),
    ]
    edited = OwnOptimizer(weight, 1.0)
    edited.defaults["lr"] = 7.0
    others.append(edited)
    patched = OwnOptimizer(weight, 1.0)
    patched.step = types.MethodType(lambda self, closure=None: None, patched)  # type: ignore[method-assign]
    assert len({plain, *map(optimizer_digest, [*others, patched])}) == len(others) + 2


def test_parameters_in_a_set_stand_in_the_order_of_the_optimizer() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        weights = [nn.Parameter(torch.zeros(1)) for _ in range(6)]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        optimizer.seen = set(weights)  # type: ignore[attr-defined]
        if not seed:
            first = optimizer_digest(optimizer)
        assert optimizer_digest(optimizer) == first


def test_a_hook_of_all_optimizers_is_noticed(monkeypatch: Patch) -> None:
    optimizer = OwnOptimizer(nn.Parameter(torch.zeros(3)), 1.0)
    before = optimizer_digest(optimizer)
    hooks = _global_optimizer_pre_hooks
    monkeypatch.setitem(hooks, 10**6, lambda optimizer, given, named: None)
    assert optimizer_digest(optimizer) != before


def test_adapters_that_are_switched_off_are_noticed() -> None:
    model: Any = models_zoo.build("gpt2 + lora")
    before = model_digest(model)
    model.base_model.disable_adapter_layers()
    assert model_digest(model) != before
    model.base_model.enable_adapter_layers()
    assert model_digest(model) == before


class OfOnesOwn(modeling_gpt2.GPT2LMHeadModel):
    pass


def test_a_model_of_ones_own_class_counts_the_same_wherever_it_lies(tmp_path: Path) -> None:
    found: set[str] = set()
    for place in ("a", "b"):
        base = models_zoo.save_tiny_base(tmp_path / place)
        found.add(model_digest(OfOnesOwn.from_pretrained(base)))
    assert len(found) == 1

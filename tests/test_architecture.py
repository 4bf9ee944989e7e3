"""The design, tested: which way imports point, what needs torch, what is documented."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import userdp
from cli_runner import python

ROOT = Path(userdp.__file__).parent

# From the ground up; what each may import is listed, so that a new arrow is a decision.
GROUND = {"errors", "units", "index", "history", "parts", "streams", "chain", "durable"}
# The file of a population lies beside a store: stores name it, and what spends adds to it.
GROUND |= {"budget_file", "interrupts", "lock", "remembered", "rows_file", "task_names"}
GROUND |= {"chacha", "compiled", "quantisation_names", "schedules", "stacked_lora"}
# The way to the others of a launched process, without torch.
GROUND |= {"ranks_launched", "shard_files", "sharded_tensors"}
# How a model runs while it is measured.
GROUND |= {"measuring"}
PARTS = {"sampling", "bounding", "clipping", "updates", "noise", "data", "models", "evaluation"}
PARTS |= {"losses", "tasks"}
# A part imports no other part, save these: bounding reads the owners in a store and shares the
# query engine with imports; an update is made from losses, and is what is clipped; tokens are what
# is evaluated.
PART_ARROWS = {
    ("bounding", "data"),
    ("clipping", "updates"),
    ("clipping", "losses"),
    ("updates", "losses"),
    ("evaluation", "data"),
    ("evaluation", "losses"),
    ("evaluation", "tasks"),
    ("tasks", "data"),
    ("tasks", "losses"),
}
ABOVE = {
    "accounting": GROUND,
    "statement": GROUND,
    "paid": GROUND | {"accounting"},
    "earlier": GROUND | {"accounting", "paid"},
    "wording": GROUND | {"earlier"},
    "composition": GROUND | {"accounting", "earlier", "paid", "statement"},
    "marks": GROUND | {"sampling"},
    "marked_price": GROUND
    | {"accounting", "composition", "earlier", "marks", "paid", "prices", "sampling"},
    "plan_words": GROUND
    | {"composition", "earlier", "marked_price", "marks", "paid", "statement", "wording"},
    "plan_checks": GROUND | {"accounting", "marked_price", "prices", "sampling"},
    "prices": GROUND
    | {"accounting", "correlated_prices", "earlier", "noise", "paid", "sampling", "statement"}
    | {"updates"},
    "correlated_prices": GROUND | {"accounting", "noise", "sampling"},
    "norms": GROUND,
    "filter_noise": GROUND | {"accounting", "plan", "updates"},
    "defaults": GROUND,
    "plan": GROUND
    | {"accounting", "clipping", "earlier", "noise", "paid", "prices", "sampling", "statement"}
    | {"composition", "defaults", "marked_price", "marks", "plan_checks", "plan_words", "updates"},
    "planner": GROUND
    | {"accounting", "statement", "sampling", "clipping", "noise", "plan"}
    | {"norms", "prices"},
    "scale": GROUND,
    "mechanisms": GROUND | {"accounting", "noise", "prices", "sampling"},
    "own_keys": GROUND,
    "config_problems": GROUND | {"own_keys"},
    "ledger_rows": GROUND | {"chain"},
    "ledger_checks": GROUND | {"accounting"},
    "ledger": GROUND
    | {"ledger_checks"}
    | {"accounting", "chain", "earlier", "ledger_rows", "paid", "plan", "rows_file", "statement"},
    "run_files": GROUND | {"chain", "data", "ledger", "ledger_rows", "statement"},
    "run_check": GROUND | {"data", "ledger", "ledger_rows", "lock", "run_files"},
    "finalize": GROUND | {"ledger", "rows_file", "run_check", "run_files", "statement"},
    "export": GROUND
    | {"ledger", "report", "run_check", "run_facts", "run_files", "statement", "validation_curve"},
    "merging": GROUND
    | {"data", "digests", "export", "ledger", "models", "run_facts", "run_files", "saved_run"},
    "early_end": GROUND | {"report", "run_files", "run_record"},
    "run_facts": GROUND | {"config", "data", "optimizer_names"},
    "validation_curve": GROUND,
    "validation": GROUND
    | {"config", "data", "earlier", "evaluation", "run_files", "validation_curve"}
    | {"tasks"},
    "trackers": GROUND,
    "personalization": GROUND
    | {"configured", "data", "evaluation", "losses", "models", "stacked_lora", "tasks"},
    "watching": GROUND | {"averaging", "ledger", "run_record", "step", "trackers", "validation"},
    "spending": GROUND | {"accounting", "paid", "statement"},
    "reservation": GROUND | {"accounting", "earlier", "paid", "spending"},
    "population": GROUND
    | {"accounting", "data", "earlier", "paid", "reservation", "spending", "statement"},
    "debits": GROUND
    | {"data", "earlier", "ledger", "paid", "plan", "population", "rows_file", "run_facts"},
    "config_sections": GROUND | {"defaults", "optimizer_names"},
    "config_checks": GROUND | {"optimizer_names", "sampling"},
    "config": GROUND
    | {"config_checks", "config_problems", "config_sections", "defaults", "marks"}
    | {"bounding", "clipping", "earlier", "noise", "own_keys", "paid", "plan", "sampling"}
    | {"updates"},
    "report": GROUND
    | {"earlier", "ledger", "paid", "plan", "plan_words", "run_files", "statement", "accounting"}
    | {"run_facts", "validation_curve", "wording"},
    "described": GROUND | {"followed_code", "module_parts", "plain_values"},
    "followed_code": GROUND,
    "repeated_sums": GROUND,
    "plain_values": GROUND,
    "module_parts": GROUND | {"followed_code", "plain_values"},
    "digests": GROUND | {"described", "followed_code", "models", "plain_values"},
    "lineage": GROUND | {"earlier", "ledger", "run_files"},
    "kept": GROUND | {"clipping", "losses", "models"},
    "seen": GROUND,
    "tried_users": GROUND | {"clipping", "losses"},
    "neighbours": GROUND | {"clipping", "losses", "models", "seen", "tried_users", "updates"},
    "checked_model": GROUND
    | {"clipping", "losses", "models", "plan", "probe", "sampling", "updates"},
    "probe": GROUND | {"kept"} | {"clipping", "losses", "models", "neighbours", "seen", "updates"},
    "checkpoints": GROUND | {"chain", "data"},
    "same_run": GROUND | {"checkpoints", "digests", "ledger", "plan"},
    "ledger_copy": GROUND | {"ledger", "ledger_rows"},
    "ranks": GROUND | {"clipping", "digests", "losses", "plan", "sampling"},
    # Divides a model, and whatever belongs to its weights, over the ranks.
    "sharding": GROUND
    | {"averaging", "checkpoints", "clipping", "losses", "models", "noise", "plan", "ranks"},
    "holding": GROUND | {"clipping", "noise", "plan", "ranks", "repeated_sums", "sharding"},
    "shared_record": GROUND | {"ledger", "ledger_copy", "lineage", "plan", "ranks", "run_record"},
    "run_record": GROUND
    | {"ranks"}
    | {"clipping", "digests", "ledger", "lineage", "models", "plan", "run_files", "statement"}
    | {"chain", "checkpoints", "repeated_sums", "report", "same_run"},
    "step": GROUND
    | {"checked_model", "clipping", "ledger", "losses", "models", "noise", "plan", "run_record"}
    | {"holding", "ranks", "sampling", "scaled_momentum", "sharding", "shared_record"}
    | {"statement"},
    "continuing": GROUND
    | {"chain", "checkpoints", "ledger", "paid", "plan", "rows_file", "run_files", "run_record"}
    | {"same_run"},
    "run_state": GROUND
    | {"checkpoints", "continuing", "ledger", "losses", "models", "run_record", "step"}
    | {"averaging", "report", "run_files", "sharding"},
    "training_rows": GROUND | {"bounding", "data", "plan"},
    "training_choice": GROUND | {"data", "digests", "evaluation", "plan"},
    "optimizer_names": GROUND,
    "muon": GROUND,
    "scaled_momentum": GROUND | {"optimizer_names", "updates"},
    "optimizers": GROUND
    | {"config_sections", "defaults", "models", "muon", "optimizer_names", "scaled_momentum"},
    "optimizer_choice": GROUND | {"config_problems", "config_sections", "optimizers"},
    "averaging": GROUND | {"models"},
    "public_gradient": GROUND
    | {"config_sections", "data", "earlier", "losses", "models", "optimizer_names", "run_files"}
    | {"scaled_momentum", "step", "tasks"},
    "shared_moment": GROUND | {"checkpoints", "ranks"},
    "opening": GROUND
    | {"averaging", "bounding", "checkpoints", "clipping", "continuing", "data", "debits"}
    | {"digests", "earlier", "ledger", "lineage", "marked_price", "paid", "plan", "population"}
    | {"probe", "public_gradient", "ranks", "run_facts", "run_files", "run_record", "run_state"}
    | {"same_run", "tasks", "training_choice", "training_rows", "validation"},
    "opening_together": GROUND
    | {"continuing", "ledger_copy", "models", "opening", "run_record", "run_state", "same_run"}
    | {"shared_moment", "shared_record"},
    "training": GROUND
    | {"averaging", "bounding", "checkpoints", "clipping", "configured", "data"}
    | {"digests", "early_end", "ledger", "losses", "models", "opening", "opening_together"}
    | {"optimizer_choice", "paid", "plan", "public_gradient", "ranks", "run_record", "run_state"}
    | {"shared_record", "sharding", "statement", "step", "step_log", "tasks", "trackers"}
    | {"updates", "validation", "validation_curve", "watching"},
    "step_log": GROUND | {"run_record", "statement", "watching"},
    "configured": GROUND | {"config", "data", "losses", "models", "tasks"},
    "training_from_config": GROUND
    | {"checkpoints", "clipping", "config", "configured", "data", "optimizers", "plan"}
    | {"public_gradient", "ranks", "run_record", "same_run", "training", "validation"},
    "trainer": GROUND
    | {"checkpoints", "clipping", "data", "evaluation", "models", "plan", "statement", "tasks"}
    | {"continuing", "earlier", "lineage", "ranks", "report", "run_files", "trackers", "training"}
    # What `training` takes, it takes too, under the same names.
    | {"bounding", "configured", "defaults", "losses", "optimizers", "paid", "public_gradient"}
    | {"validation", "validation_curve"},
    "saved_run": GROUND | {"digests", "ledger", "models", "run_facts"},
    "gradient_norms": GROUND | {"data", "models", "tasks", "updates"},
}
TOP = {"__main__", "cli", "quickstart"}

TORCH_FREE = [
    "errors",
    "units",
    "index",
    "history",
    "sampling",
    "accounting",
    "bounding",
    "clipping.contract",
    "clipping.rules",
    "noise.gaussian",
    "noise.contract",
    "streams",
    "parts",
    "own_keys",
    "updates.contract",
    "updates.estimators",
    "updates.filter",
    "updates.halting",
    "statement",
    "paid",
    "earlier",
    "wording",
    "marks",
    "marked_price",
    "plan_checks",
    "plan_words",
    "prices",
    "composition",
    "norms",
    "plan",
    "planner",
    "scale",
    "defaults",
    "optimizer_names",
    "chain",
    "durable",
    "lock",
    "rows_file",
    "budget_file",
    "spending",
    "reservation",
    "population",
    "ledger",
    "ledger_checks",
    "run_files",
    "run_facts",
    "validation_curve",
    "run_check",
    "finalize",
    "export",
    "config",
    "config_checks",
    "config_problems",
    "data",
    "ranks_launched",
    "report",
]
HEAVY = {"torch", "transformers", "peft", "safetensors"}


def modules() -> dict[str, Path]:
    """Dotted name below userdp -> file."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "__init__.py"
    }


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Every module a file imports, as dotted names."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        is_late = top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_typing or is_late:
            skipped.update(ast.walk(node))
            skipped.discard(node)
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            base = node.module or ""
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def arrows() -> set[tuple[str, str]]:
    """(importer, imported) between the first names below userdp."""
    found: set[tuple[str, str]] = set()
    known = {name.split(".")[0] for name in modules()}
    for name, path in modules().items():
        part = name.split(".")[0]
        for imported in imports(path):
            pieces = imported.split(".")
            if pieces[0] == "userdp" and len(pieces) > 1 and pieces[1] in known:
                found.add((part, pieces[1]))
    return {(a, b) for a, b in found if a != b}


def test_every_module_has_its_layer() -> None:
    known = GROUND | PARTS | set(ABOVE) | TOP
    assert {name.split(".")[0] for name in modules()} <= known


@pytest.mark.parametrize("arrow", sorted(arrows()), ids=" -> ".join)
def test_imports_point_one_way(arrow: tuple[str, str]) -> None:
    importer, imported = arrow
    if importer in TOP:
        return
    if importer in GROUND:
        assert imported in GROUND
    elif importer in PARTS:
        assert imported in GROUND or arrow in PART_ARROWS
    else:
        assert imported in ABOVE[importer]


def test_nothing_below_imports_the_command_line() -> None:
    assert not {a for a in arrows() if a[1] in TOP and a[0] not in TOP}


@pytest.mark.parametrize("name", TORCH_FREE)
def test_torch_free_part_never_names_torch(name: str) -> None:
    found = {
        module: sorted(HEAVY & {i.split(".")[0] for i in imports(path)})
        for module, path in modules().items()
        if module == name or module.startswith(name + ".")
    }
    assert not {module for module, heavy in found.items() if heavy}


def test_importing_the_program_loads_no_torch() -> None:
    names = [
        "userdp",
        "userdp.cli",
        *(
            f"userdp.{module}"
            for module in modules()
            if any(module == part or module.startswith(part + ".") for part in TORCH_FREE)
        ),
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = sorted({HEAVY!r} & set(sys.modules))\n"
        "    assert not loaded, (name, loaded)\n"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_every_public_name_loads_and_is_documented() -> None:
    assert userdp.__all__ == sorted(userdp.__all__)
    for name in userdp.__all__:
        thing = getattr(userdp, name)
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if member.startswith("_") or isinstance(value, str | int | float | bool | tuple):
                    continue
                if callable(value) or isinstance(value, property | staticmethod):
                    target = value.fget if isinstance(value, property) else value
                    assert inspect.getdoc(target), f"{name}.{member}"


def test_every_module_says_what_it_decides() -> None:
    for name, path in modules().items():
        assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip(), name


def test_the_oracle_imports_nothing_of_what_it_judges() -> None:
    reached, todo = set[str](), ["clipping.plain"]
    while todo:
        name = todo.pop()
        if name not in reached and name in modules():
            reached.add(name)
            todo += [found.removeprefix("userdp.") for found in imports(modules()[name])]
    assert {name for name in reached if name.startswith("clipping.")} == {
        "clipping.plain",
        "clipping.contract",
        "clipping.factors",
        "clipping.flat",
        "clipping.layer_groups",
        "clipping.module_state",
        "clipping.rules",
    }


def test_the_fast_path_is_built_from_the_kernels_up() -> None:
    order = ["kernels", "execute", "batches", "gradients", "checks"]
    for name, path in modules().items():
        part = name.removeprefix("clipping.").split(".")[0]
        if not name.startswith("clipping.") or part not in order:
            continue
        above = order[order.index(part) + 1 :]
        found = {i.removeprefix("userdp.clipping.").split(".")[0] for i in imports(path)}
        assert not found & {*above, "fast"}, name


def classes_asked_for(tree: ast.AST) -> set[str]:
    """The classes that code asks an object for: by isinstance, issubclass or a match."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "isinstance",
            "issubclass",
        ):
            named = ast.walk(node.args[1])
        elif isinstance(node, ast.MatchClass):
            named = ast.walk(node.cls)
        elif isinstance(node, ast.Compare) and any(
            isinstance(side, ast.Call) and getattr(side.func, "id", "") == "type"
            for side in (node.left, *node.comparators)
        ):
            named = ast.walk(node)
        else:
            continue
        found |= {getattr(part, "id", getattr(part, "attr", "")) for part in named}
    return found


def test_nobody_asks_which_part_was_chosen() -> None:
    # A part says by itself what it does; whoever asks for its class must be changed for a new one.
    from userdp.clipping.rules import CLIP_RULES
    from userdp.noise import NOISES
    from userdp.sampling import SAMPLERS
    from userdp.updates.contract import UPDATE_RULES

    registries = (CLIP_RULES, NOISES, SAMPLERS, UPDATE_RULES)
    parts = {part.__name__ for registry in registries for part in registry}
    parts |= {"ClipRule", "Noise", "Sampler", "UpdateRule"}
    asked = {
        name: found
        for name, path in modules().items()
        if (found := parts & classes_asked_for(ast.parse(path.read_text())))
    }
    assert asked == {}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = userdp.trane  # type: ignore[attr-defined]


def test_files_stay_small_enough_to_be_one_idea() -> None:
    long = {
        name: lines
        for name, path in modules().items()
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert long == {}

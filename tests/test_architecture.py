"""The design, tested: which way imports point, what needs torch, what is documented."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import userdp
from cli_runner import python

ROOT = Path(userdp.__file__).parent

# The files of a room have layers of their own: what is in one room need not be built together.
ROOMS = set("budget config digests files ledger names optimizers planner plans prices".split())
ROOMS |= {"probe", "runs", "training"}
# From the ground up; what each may import is listed, so that a new arrow is a decision.
GROUND = {"errors", "units", "index", "history", "parts", "streams", "chacha", "compiled"}
GROUND |= {"files.chain", "files.durable", "files.interrupts", "files.lock", "files.remembered"}
GROUND |= {"files.rows", "files.shards", "names.tasks", "names.quantisation"}
GROUND |= {"optimizers.schedules", "stacked_lora"}
# The file of a population lies beside a store: stores name it, and what spends adds to it.
GROUND |= {"budget.file"}
# The way to the others of a launched process, without torch.
GROUND |= {"ranks_launched", "sharded_tensors"}
# How a model runs while it is measured, and what it keeps between two passes.
GROUND |= {"measuring", "module_state"}
# What a model's configuration says, at any depth.
GROUND |= {"model_settings"}
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
    "accounting": "",
    "statement": "",
    "prices.paid": "accounting",
    "prices.earlier": "accounting prices.paid",
    "prices.composition": "accounting prices.earlier prices.paid statement",
    "prices.marks": "sampling",
    "prices.marked": (
        "accounting prices.composition prices.earlier prices.marks prices.paid prices.table "
        "sampling"
    ),
    "plans.words": (
        "prices.composition prices.earlier prices.marked prices.marks prices.paid statement"
    ),
    "plans.checks": "accounting prices.marked prices.table sampling",
    "prices.table": (
        "accounting noise prices.correlated prices.earlier prices.independent prices.paid "
        "sampling statement updates"
    ),
    "prices.correlated": "accounting noise prices.independent sampling",
    "prices.independent": "accounting noise sampling",
    "planner.norms": "",
    "planner.filter_noise": "accounting plan updates",
    "defaults": "",
    "plan": (
        "accounting clipping defaults noise plans.checks plans.words prices.composition "
        "prices.earlier prices.marked prices.marks prices.paid prices.table sampling "
        "statement updates"
    ),
    "planner.search": (
        "accounting clipping defaults noise plan planner.norms prices.table sampling statement"
    ),
    "planner.scale": "",
    "planner.mechanisms": "accounting noise prices.table sampling",
    "config.own_keys": "",
    "config.problems": "config.own_keys",
    "ledger.rows": "",
    "ledger.checks": "accounting",
    "ledger.book": "accounting ledger.checks ledger.rows plan prices.earlier prices.paid statement",
    "runs.files": "data ledger.book ledger.rows statement",
    "runs.check": "data ledger.book ledger.rows runs.files",
    "runs.finalize": "ledger.book runs.check runs.files statement",
    "runs.export": (
        "ledger.book report runs.check runs.facts runs.files runs.validation_curve statement"
    ),
    "runs.merging": (
        "data digests.of_runs ledger.book models runs.export runs.facts runs.files runs.saved"
    ),
    "runs.early_end": "report runs.files runs.record",
    "runs.facts": "config.file data names.optimizers",
    "runs.validation_curve": "",
    "training.validation": (
        "config.file data evaluation prices.earlier runs.files runs.validation_curve tasks"
    ),
    "training.trackers": "",
    "personalization": "data evaluation losses models tasks training.configured",
    "training.watching": (
        "ledger.book optimizers.averaging runs.record step training.progress training.trackers "
        "training.validation"
    ),
    "budget.spending": "accounting prices.paid statement",
    "budget.reservation": "accounting budget.spending prices.earlier prices.paid",
    "budget.population": (
        "accounting budget.reservation budget.spending data prices.earlier prices.paid statement"
    ),
    "budget.debits": (
        "budget.population data ledger.book plan prices.earlier prices.paid runs.facts"
    ),
    "config.sections": "defaults names.optimizers",
    "config.checks": "names.optimizers sampling",
    "config.file": (
        "bounding clipping config.checks config.own_keys config.problems config.sections "
        "defaults noise plan prices.earlier prices.marks prices.paid sampling updates"
    ),
    "report": (
        "accounting ledger.book plan plans.words prices.earlier prices.paid "
        "runs.facts runs.files runs.validation_curve statement"
    ),
    "digests.described": "digests.code digests.modules digests.values",
    "digests.code": "",
    "runs.repeated_sums": "ranks",
    "digests.values": "",
    "digests.modules": "digests.code digests.values",
    "digests.of_runs": "digests.code digests.described digests.values models",
    "ledger.lineage": "ledger.book prices.earlier runs.files",
    "probe.kept": "clipping losses models",
    "probe.seen": "",
    "probe.tried_users": "clipping losses",
    "probe.neighbours": "clipping losses models probe.seen probe.tried_users updates",
    "probe.checked_model": "clipping losses models plan probe.verify sampling updates",
    "probe.verify": "clipping losses models probe.kept probe.neighbours probe.seen updates",
    "runs.checkpoints": "data",
    "runs.same": "digests.of_runs ledger.book plan runs.checkpoints runs.files",
    "ledger.copied": "ledger.book ledger.rows",
    "ranks": "clipping digests.of_runs losses plan sampling",
    # Divides a model, and whatever belongs to its weights, over the ranks.
    "sharding": "clipping losses models noise optimizers.averaging plan ranks runs.checkpoints",
    "holding": "clipping noise plan ranks runs.repeated_sums sharding",
    "runs.continuation": "ledger.book noise runs.repeated_sums",
    "runs.shared_record": (
        "ledger.book ledger.copied ledger.lineage plan ranks runs.continuation runs.record "
        "runs.repeated_sums"
    ),
    "runs.record": (
        "clipping digests.of_runs ledger.book ledger.lineage models optimizers.scaled_momentum "
        "plan ranks report runs.checkpoints runs.continuation runs.files runs.repeated_sums "
        "runs.same statement"
    ),
    "step": (
        "clipping holding ledger.book losses models noise optimizers.scaled_momentum plan "
        "probe.checked_model ranks runs.record runs.shared_record sampling sharding statement"
    ),
    "runs.continuing": (
        "ledger.book plan prices.paid runs.checkpoints runs.files runs.record runs.same"
    ),
    "runs.state": (
        "ledger.book losses models optimizers.averaging report runs.checkpoints "
        "runs.continuing runs.files runs.record sharding step"
    ),
    "training.rows": "bounding data plan",
    "training.choice": "data digests.of_runs evaluation plan",
    "names.optimizers": "",
    "optimizers.muon": "",
    "optimizers.scaled_momentum": "names.optimizers updates",
    "optimizers.by_name": (
        "config.sections defaults models names.optimizers optimizers.muon "
        "optimizers.scaled_momentum"
    ),
    "optimizers.choice": "config.problems config.sections optimizers.by_name",
    "optimizers.averaging": "models",
    "optimizers.public_gradient": (
        "config.sections data losses models names.optimizers optimizers.scaled_momentum "
        "prices.earlier runs.files step tasks"
    ),
    "runs.shared_moment": "ranks runs.checkpoints",
    "runs.opening": (
        "bounding budget.debits budget.population clipping data digests.of_runs ledger.book "
        "ledger.lineage optimizers.averaging optimizers.public_gradient plan prices.earlier "
        "prices.marked prices.paid probe.verify ranks runs.checkpoints runs.continuing "
        "runs.facts runs.files runs.record runs.same runs.state tasks training.choice "
        "training.rows training.validation"
    ),
    "runs.opening_together": (
        "ledger.copied models runs.continuing runs.opening runs.record runs.same "
        "runs.shared_moment runs.shared_record runs.state"
    ),
    "training.loop": (
        "bounding clipping data digests.of_runs ledger.book losses models "
        "optimizers.averaging optimizers.choice optimizers.public_gradient plan prices.paid "
        "ranks runs.checkpoints runs.early_end runs.opening runs.opening_together runs.record "
        "runs.shared_record runs.state runs.validation_curve sharding statement step tasks "
        "training.configured training.progress training.trackers training.validation "
        "training.watching updates"
    ),
    "training.progress": "plan prices.earlier prices.marked prices.paid statement",
    "training.configured": "config.file data losses models tasks",
    "training.from_config": (
        "clipping config.file data optimizers.by_name optimizers.public_gradient plan ranks "
        "runs.checkpoints runs.files runs.record training.configured training.loop "
        "training.validation"
    ),
    # What `training.loop` takes, it takes too, under the same names.
    "trainer": (
        "bounding clipping data defaults evaluation ledger.lineage losses models "
        "optimizers.by_name optimizers.public_gradient plan prices.earlier prices.paid ranks "
        "report runs.checkpoints runs.continuing runs.files runs.validation_curve statement "
        "tasks training.configured training.loop training.trackers training.validation"
    ),
    "runs.saved": "digests.of_runs ledger.book models runs.facts",
    "planner.gradient_norms": "data losses models tasks updates",
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
    "config.own_keys",
    "updates.contract",
    "updates.estimators",
    "updates.filter",
    "updates.halting",
    "statement",
    "prices.paid",
    "prices.earlier",
    "prices.marks",
    "prices.marked",
    "plans.checks",
    "plans.words",
    "prices.table",
    "prices.composition",
    "planner.norms",
    "plan",
    "planner.search",
    "planner.scale",
    "defaults",
    "names.optimizers",
    "files.chain",
    "files.durable",
    "files.lock",
    "files.rows",
    "budget.file",
    "budget.spending",
    "budget.reservation",
    "budget.population",
    "ledger.book",
    "ledger.checks",
    "runs.files",
    "runs.facts",
    "runs.validation_curve",
    "training.progress",
    "runs.check",
    "runs.finalize",
    "runs.export",
    "config.file",
    "config.checks",
    "config.problems",
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


def layer(module: str) -> str:
    """What a module below userdp belongs to: its package, or itself if it is in a room."""
    return ".".join(module.split(".")[: 2 if module.split(".")[0] in ROOMS else 1])


def arrows() -> set[tuple[str, str]]:
    """(importer, imported) between layers."""
    found: set[tuple[str, str]] = set()
    known = {layer(name) for name in modules()} - ROOMS
    for name, path in modules().items():
        for imported in imports(path):
            below = layer(imported.removeprefix("userdp."))
            if imported.startswith("userdp.") and below in known:
                found.add((layer(name), below))
    return {(a, b) for a, b in found if a != b}


def test_every_module_has_its_layer() -> None:
    known = GROUND | PARTS | set(ABOVE) | TOP
    assert {layer(name) for name in modules()} - ROOMS <= known


def test_a_room_itself_holds_nothing() -> None:
    # Whoever imports one file of a room must not get the others.
    assert not {room for room in ROOMS if imports(ROOT / room / "__init__.py")}


def is_allowed(importer: str, imported: str) -> bool:
    """Whether the one layer may import the other."""
    if importer in TOP or imported in GROUND:
        return True
    if importer in GROUND:
        return False
    if importer in PARTS:
        return (importer, imported) in PART_ARROWS
    return imported in ABOVE[importer].split()


def test_imports_point_one_way() -> None:
    assert not sorted(arrow for arrow in arrows() if not is_allowed(*arrow))


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
    parts |= {"ClipRule", "Noise", "PlaceSampler", "Sampler", "UpdateRule"}
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

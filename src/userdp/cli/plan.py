"""`userdp plan`: records or users, how many of each, and how much noise, under a compute budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from userdp import defaults
from userdp.accounting.certificate import Evaluation
from userdp.cli import (
    charts,
    common,
    mechanism_table,
    plan_copy,
    plan_norms,
    plan_records,
    plan_scale,
)
from userdp.clipping.rules import AutomaticClip
from userdp.data.store import UserStore
from userdp.errors import InputError
from userdp.names.tasks import TaskName
from userdp.planner import norms as norm_models
from userdp.planner import search as planner
from userdp.planner.scale import Prediction
from userdp.planner.search import Candidate, Norms, Recommendation, Setting
from userdp.statement import epsilon_text
from userdp.units import Adjacency


def plan(
    epsilon: Annotated[float, typer.Option(help="Target epsilon.")],
    delta: Annotated[
        float | None, typer.Option(help="Probability mass the guarantee may miss; N^-1.1.")
    ] = None,
    steps: common.Steps = defaults.STEPS,
    compute: Annotated[
        int | None,
        typer.Option(
            help="Gradients a step may compute, B; by default 4 of each of a twentieth of the "
            "users, rounded down to a power of two."
        ),
    ] = None,
    store: Annotated[
        Path | None, typer.Argument(help="A user store; or give --users and --records-per-user.")
    ] = None,
    users: Annotated[int | None, typer.Option(help="Number of users, N: public.")] = None,
    records_per_user: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Median number of records of a user: public, or paid for.",
        ),
    ] = None,
    gradient_norms: Annotated[
        Path | None,
        typer.Option(
            help='JSON file {"1": norm, "2": norm, ...}: L(G), median user-gradient norms.'
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Estimate L(G) with this model on users of the store; not private."),
    ] = None,
    sample_users: Annotated[int, typer.Option(help="With --model: users to estimate from.")] = 32,
    sequence_length: Annotated[
        int, typer.Option(help="With --model or --gpus: tokens of a row.")
    ] = 64,
    task: Annotated[
        TaskName | None,
        typer.Option(help="With --model: what is learned; by default as in `\\[data] task`."),
    ] = None,
    assume: Annotated[
        plan_norms.Assumed,
        typer.Option(
            help="Without --gradient-norms or --model: a user's gradients all agree (same, the "
            "worst case for sampling users) or are orthogonal (the best)."
        ),
    ] = plan_norms.Assumed.SAME,
    times_users: Annotated[
        list[int] | None,
        typer.Option(help="Also say what this many times the users would give; hypothetical."),
    ] = None,
    adjacency: Annotated[
        Adjacency | None,
        typer.Option(
            help="Which datasets are neighbours; add-remove, and fixed-graph-zero-out where "
            "records of the store have several owners."
        ),
    ] = None,
    noise_memory: Annotated[
        int,
        typer.Option(
            help="Vectors of the model's size that correlated noise may keep; 0 leaves it out.",
            min=0,
        ),
    ] = 31,
    gpus: Annotated[
        int | None,
        typer.Option(help="Also predict seconds, memory and hours on 1 to so many GPUs."),
    ] = None,
    size: Annotated[
        plan_scale.Size, typer.Option(help="With --gpus: the shape of the model.")
    ] = plan_scale.Size.LLAMA_8B,
    lora_rank: Annotated[
        int, typer.Option(help="With --gpus: rank of the adapters; 0 trains all weights.")
    ] = 16,
    machine: Annotated[
        Path | None,
        typer.Option(help="With --gpus: JSON file of measured numbers, instead of an H200's."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the plots to this .svg file.")] = None,
    json: common.Json = False,
) -> None:
    """Choose group size, cohort size, and sampling of records or users, for the least noise."""
    if plot is not None and plot.suffix != ".svg":
        raise InputError(
            f"--plot {plot.name}: plots are drawn as .svg. Name a file ending in .svg."
        )
    if model is not None and (store is None or gradient_norms is not None):
        raise InputError(
            "--model estimates gradient norms on a store's users: give the store, and not "
            "--gradient-norms as well."
        )
    if model is None and task is not None:
        raise InputError(
            "--task says which gradients --model estimates: give --model, or leave --task out."
        )
    if gpus is None and machine is not None:
        raise InputError("--machine describes the GPUs of --gpus: give --gpus, or leave it out.")
    opened = UserStore.open(store) if store is not None else None
    known = plan_records.known(opened, users, records_per_user, adjacency)
    if model is not None and known.adjacency.fixed_graph:
        raise InputError(
            f"--model compares groups of a user's records, and under {known.adjacency.value} "
            "records are sampled one by one: leave --model out."
        )
    typical, peeked = known.per_user, list(known.peeked)
    if delta is None:
        delta = defaults.delta(known.num_users)
    if compute is None:
        compute = known.compute
    norms, source = plan_norms.given_norms(gradient_norms, assume)
    found_norms: dict[int, float] | None = None
    if model is not None and opened is not None:
        found_norms = plan_norms.estimated_norms(
            model,
            opened,
            largest_group=typical,
            sample_users=sample_users,
            sequence_length=sequence_length,
            task=task,
        )
        norms, source = (
            norm_models.estimated(found_norms),
            f"estimated, at most {sample_users} users",
        )
        peeked.append(
            "gradient norms, estimated on users of the store (or use public data and "
            "--gradient-norms)"
        )
    setting = Setting(
        num_users=known.num_users,
        group_size_els=known.most_records,
        epsilon=epsilon,
        delta=delta,
        steps=steps,
        compute=compute,
        largest_group=typical,
        adjacency=known.adjacency,
        num_records=known.num_records,
    )
    found = planner.recommend(setting, norms, user_factors=tuple(times_users or ()))
    if gradient_norms is None and found_norms is None:
        hangs_on_norms = plan_norms.what_hangs_on_it(found.candidates, assume)
        found = replace(found, reasons=(*found.reasons, *filter(None, [hangs_on_norms])))
    found = replace(found, reasons=(*known.reasons, *found.reasons))
    planned = plan_copy.plan_of(setting, found.best)
    noise_multiplier, told = (
        planned.noise.noise_multiplier,
        planned.evaluation(planned.steps, (), ()),
    )
    stddev = found.best.noise_stddev * noise_multiplier / found.best.noise_multiplier
    cautions = planned.cautions()
    for caution in cautions:
        common.say(f"caution: {caution}")
    not_covered = _not_covered(peeked, gradient_norms)
    rates = _rates(_width(model))
    hardware = plan_scale.machine_of(machine)

    def on_gpus(rank: int) -> list[Prediction]:
        return plan_scale.predicted(
            found.best,
            gpus=1 if gpus is None else gpus,
            size=size,
            rank=rank,
            length=sequence_length,
            machine=hardware,
        )

    predicted = [] if gpus is None else on_gpus(lora_rank)
    # This takes the longest by far, so what is refused above is refused without it.
    mechanisms = mechanism_table.compared(setting, found.best, noise_memory)
    if plot is not None:
        drawn = charts.plan_svg(_by_compute(setting, norms), found)
        if predicted:
            title = f"{size.value}, {known.num_users:,} users, {steps:,} steps: time of the run"
            names = {True: "all weights", False: f"LoRA of rank {lora_rank or 16}"}
            others = on_gpus(0 if lora_rank else 16)
            both = {names[not lora_rank]: predicted, names[bool(lora_rank)]: others}
            drawn = plan_scale.picture(both, title)
        plot.write_text(drawn, encoding="utf-8")
        common.say(f"wrote {plot}")
    common.emit(
        json,
        {
            "method": found.best.method,
            "group_size": found.best.group_size,
            "cohort_size": found.best.cohort_size,
            "rate": found.best.rate,
            "noise_multiplier": noise_multiplier,
            "noise_stddev": stddev,
            "epsilon": told.epsilon,
            "delta": delta,
            "adjacency": known.adjacency.value,
            "steps": steps,
            "configuration": plan_copy.keys_of(found.best, known),
            "max_records_per_user": None if known.selection is None else known.per_user,
            "num_records": known.num_records,
            "cautions": cautions,
            "certified_by": told.certified_by,
            "clipping": AutomaticClip.name,
            "optimizer": "adamw",
            "schedule": defaults.SCHEDULE,
            **rates,
            "gradient_norms": source,
            "norms": found_norms,
            "reasons": list(found.reasons),
            "mechanisms": [choice.to_json() for choice in mechanisms],
            "strategies": {name: list(split) for name, split in found.strategies.items()},
            "candidates": [candidate.to_json() for candidate in found.candidates],
            "other_steps": [candidate.to_json() for candidate in found.other_steps],
            "hypothetical": [candidate.to_json() for candidate in found.hypothetical],
            "peeked": peeked,
            "not_covered": not_covered,
            "scale": [one.to_json() for one in predicted],
        },
        "\n".join(
            [
                _in_words(setting, found, noise_multiplier, stddev, told, source),
                *plan_copy.in_words(setting, found.best, known, norms),
                *_the_rest(found, rates),
                *mechanism_table.in_words(mechanisms),
                *(plan_scale.in_words(predicted, size, lora_rank, hardware) if predicted else ()),
                *(f"not covered: {entry}" for entry in not_covered),
            ]
        ),
    )


def _width(model: str | None) -> int:
    """The hidden size of the model; without a model, the hidden size of GPT-2 small."""
    if model is None:
        return 768
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).hidden_size)


def _rates(width: int) -> dict[str, float]:
    """The learning rates for a model of this width, by the key that names them."""
    return {
        "width": width,
        "learning_rate_lora": defaults.learning_rate(adapters=True, width=width),
        "learning_rate_full": defaults.learning_rate(adapters=False, width=width),
    }


def _not_covered(peeked: list[str], norms: Path | None) -> list[str]:
    found = [f"looked at private data for free: {what}" for what in peeked]
    if norms is not None:
        found.append("the gradient norms, unless from public data or paid for in the ledger")
    return found


def _by_compute(setting: Setting, norms: Norms) -> list[tuple[int, list[Candidate]]]:
    """The best candidate of each method at budgets around the given one, for the plot."""
    rows: list[tuple[int, list[Candidate]]] = []
    machine = planner.Planner(setting, norms)
    for power in range(-3, 4):
        compute = round(setting.compute * 2.0**power)
        if compute < 1 or compute > setting.kept_records:
            continue
        splits = machine.splits(compute)
        best = [machine.uls(planner.exhaustive(splits, machine.objective))] if splits else []
        els = machine.els(compute)
        rows.append((compute, best + ([els] if els is not None else [])))
    return rows


def _in_words(
    setting: Setting,
    found: Recommendation,
    noise_multiplier: float,
    stddev: float,
    told: Evaluation,
    source: str,
) -> str:
    best = found.best
    what = "users" if best.method == planner.ULS else "records"
    lines = [
        f"{best.method}: sample {what} at rate {best.rate:.4g}, {best.cohort_size:,} {what} a "
        f"step, group size {best.group_size}",
        f"noise_multiplier={noise_multiplier:.5g}, noise on the mean gradient {stddev:.4g} "
        f"(gradient norms: {source})",
        f"(epsilon={epsilon_text(told.epsilon)}, delta={setting.delta:g}), user-level, "
        f"{setting.adjacency.value}, {setting.steps:,} steps, {setting.num_users:,} users",
        f"certified by {told.certified_by}",
        *(f"because {reason}" for reason in found.reasons),
    ]
    return "\n".join(lines)


def _the_rest(found: Recommendation, rates: dict[str, float]) -> list[str]:
    """The settings that are the same for every candidate, and the candidates."""
    lines = [
        f"train with automatic clipping, adamw, schedule {defaults.SCHEDULE}, and for a model of "
        f"width {rates['width']} learning rate {rates['learning_rate_lora']:.2g} (LoRA) or "
        f"{rates['learning_rate_full']:.2g} (all weights): the defaults",
        "",
        charts.candidate_table(found.candidates, found.best),
        "",
        "noise on the mean gradient, by candidate",
        charts.candidate_bars(found.candidates),
        "",
        "the same total compute in fewer or more steps (noise of run: on the mean of all steps)",
        charts.candidate_table(found.other_steps, None),
    ]
    if found.hypothetical:
        lines += ["", "HYPOTHETICAL: if there were more users", ""]
        lines.append(charts.candidate_table(found.hypothetical, None))
    return lines

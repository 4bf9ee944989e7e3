"""The part of `userdp plan` that compares samplers and noises at the chosen cohort size."""

from __future__ import annotations

from collections.abc import Sequence

from userdp.planner.mechanisms import MechanismChoice, MechanismSetting, compare
from userdp.planner.search import ULS, Candidate, Setting

_BAR = 32


def compared(setting: Setting, best: Candidate, memory: int) -> list[MechanismChoice]:
    """Mechanisms for the users of the best candidate; none if records are sampled."""
    if best.method != ULS:
        return []
    return compare(
        MechanismSetting(
            num_users=setting.num_users,
            cohort_size=best.cohort_size,
            steps=setting.steps,
            epsilon=setting.epsilon,
            delta=setting.delta,
            adjacency=setting.adjacency,
            memory=memory,
        )
    )


def in_words(choices: Sequence[MechanismChoice]) -> list[str]:
    """A table with bars, the least error first, and what to write into the configuration."""
    if not choices:
        return []
    worst = max(choice.error for choice in choices)
    lines = [
        "",
        "samplers and noises at this cohort size: noise that the models of all steps keep, and the "
        "last one",
        f"  {'sampler':20}{'noise':14}{'multiplier':>11}{'vectors':>9}{'error':>10}{'last':>10}",
    ]
    for number, choice in enumerate(choices):
        noise = f"banded, {choice.bands}" if choice.vectors else choice.noise
        lines.append(
            f"{'* ' if not number else '  '}{choice.sampler:20}{noise:14}"
            f"{choice.noise_multiplier:>11.4f}{choice.vectors:>9}{choice.error:>10.4g}"
            f"{choice.final_error:>10.4g} {'#' * max(1, round(_BAR * choice.error / worst))}"
        )
    return [*lines, f"  [privacy] {as_configuration(choices[0])}"]


def as_configuration(choice: MechanismChoice) -> str:
    """The keys that choose this mechanism."""
    keys = [f'sampler = "{choice.sampler}"', f'noise = "{choice.noise}"']
    if choice.vectors:
        keys += [f"parts = {choice.bands}", f"bands = {choice.bands}", 'strategy = "toeplitz"']
    if choice.sampler == "allocation":
        keys.append(f"participations = {round(choice.participations)}")
    return ", ".join(keys)

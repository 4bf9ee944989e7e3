"""`userdp dictionary`: the words that many users write, for a price that a run's ledger pays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from userdp.accounting import accountant
from userdp.accounting.heavy_hitters import Votes, released_words
from userdp.budget.population import Population
from userdp.cli import common
from userdp.cli.quantile import refuse_several_owners
from userdp.data.store import UserStore
from userdp.data.user_words import votes_of_users
from userdp.errors import InputError
from userdp.files.durable import new_directory
from userdp.prices.paid import Paid, write_paid
from userdp.statement import epsilon_text
from userdp.streams import RunSecret
from userdp.units import Adjacency

PAID = "paid.json"


def dictionary(
    store: Annotated[Path, typer.Argument(help="Directory of a user store.")],
    out: Annotated[Path, typer.Option(help="New directory: the tokenizer, and the price.")],
    epsilon: Annotated[float, typer.Option(help="What this look may cost alone, at --delta.")],
    delta: Annotated[
        float, typer.Option(help="Delta of --epsilon; below that of the run which pays.")
    ] = 1e-6,
    words_per_user: Annotated[
        int, typer.Option(help="Words that each user votes for: their own most frequent ones.")
    ] = 100,
    size: Annotated[int, typer.Option(help="Most words, with the four special tokens.")] = 10_000,
    adjacency: common.AdjacencyOption = Adjacency.ADD_REMOVE,
    json: common.Json = False,
) -> None:
    """Choose a dictionary from the users' own words privately, and say what it cost."""
    from userdp.models.words import SPECIAL, word_tokenizer, words_of

    if out.exists() or out.is_symlink():
        raise InputError(f"{out} is there already: name another directory, each look is paid for.")
    if not out.absolute().parent.is_dir():
        # Said before the look, which would be paid for and never seen.
        raise InputError(f"{out}: there is no directory of that name to write to.")
    if size <= len(SPECIAL):
        raise InputError(f"--size {size}: {len(SPECIAL)} of them are special tokens. Use more.")
    opened = UserStore.open(store)
    refuse_several_owners(opened)
    rule = Votes.calibrated(
        words_per_user=words_per_user, epsilon=epsilon, delta=delta, adjacency=adjacency
    )
    paid = Paid(what=f"dictionary, {words_per_user:,} words of each user", event=rule.event)
    # Counted before the look, so that a look that fails is paid for and none is free.
    entry = Population.of(opened).debit(paid.what, paid.event, adjacency)
    words = released_words(
        votes_of_users(opened, words_of, words_per_user=words_per_user),
        rule,
        # A new secret each time, so that two looks never share their noise.
        rng=RunSecret.from_system().streams("dictionary").rng(0),
    )[: size - len(SPECIAL)]
    if not words:
        raise InputError(
            f"no word was written by clearly more than {rule.threshold:,.0f} users, and this "
            "--epsilon takes so many. It is paid for all the same. Use more users, a larger "
            "--epsilon, or fewer --words-per-user."
        )
    told = accountant.evaluate(rule.event, delta=delta, adjacency=adjacency)
    with new_directory(out) as partial:
        # The price comes first, so that no word is ever known without being paid for.
        write_paid(partial / PAID, dataclasses.replace(paid, entry=entry), value=len(words))
        word_tokenizer(words).save_pretrained(partial)
    common.say(f"wrote {out}: name {out / PAID} under [privacy] paid")
    common.emit(
        json,
        {
            "words": len(words),
            "words_per_user": words_per_user,
            "threshold": rule.threshold,
            "threshold_delta": rule.threshold_delta,
            "noise_stddev": rule.noise_stddev,
            "epsilon": told.epsilon,
            "delta": delta,
            "adjacency": adjacency.value,
            "certified_by": told.certified_by,
            "cautions": list(opened.cautions),
            "entry": entry,
            "out": str(out),
            **paid.to_json(),
        },
        f"{len(words):,} words, each of clearly more than {rule.threshold:,.0f} users\n"
        f"cost alone: (epsilon={epsilon_text(told.epsilon)}, delta={delta:g}), user-level, "
        f"{adjacency.value}; noise on counts {rule.noise_stddev:.5g}\n"
        f"certified by {told.certified_by}"
        + "".join(f"\ncaution: {caution}" for caution in opened.cautions)
        + f"\ncounted in the budget of these people: `userdp budget {store}`",
    )

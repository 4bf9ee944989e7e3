"""Synthetic messages of thousands of users: a shared way of writing, and a few personal secrets.

They show what user-level privacy is for. One seeded generator makes three kinds of text:

- public:   formal notes, on which the small demo model is pre-trained. They contain every word, and
            the form "the code of NAME is 1 2 3 4 5 6" with a new code each time.
- private:  messages of many users who all write in the same casual way and know the same things
            (which thing is kept in which place). This belongs to no one person and is worth
            learning.
- secrets:  some users repeat the code of their name in most of their messages. A code belongs to
            one person, appears in no other user's messages, and must not be learned.

Everything comes from the seed, and nothing from real data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from userdp.data.record import Record

CODE_DIGITS = 6

NAMES = tuple(
    "alba amos anke arlo astrid basil bela bianca boris bruno carla cedric celia clara conor "
    "dagmar dario delia diego dora edgar edith elena elias elmo emil enzo erika esther ezra fabio "
    "fatima felix fiona flora frank frida gerda gino greta gustav hanna hector heidi helga henri "
    "hilda hugo ida igor ines ingrid iris isaac ivan jana jasper joan jonas judith julius karl "
    "katya kemal klaus lara leif leon lina livia lotte louis lucia luigi magda marco marta mateo "
    "maya milo mina nadia nils nora olaf olga omar oscar otto paolo petra quinn ramon rita rosa "
    "ruben selma sonja tomas ulla viktor wanda yusuf".split()
)[:100]
THINGS = tuple(
    "ladder kettle hammer blanket lantern bucket drill wagon compass helmet basket mirror saddle "
    "violin trumpet camera shovel rope anchor tent stove clock globe sledge paddle scarf jacket "
    "cushion carpet vase bottle candle ribbon pencil notebook whistle magnet marble puzzle kite "
    "racket bicycle scooter skates telescope umbrella suitcase printer".split()
)
PLACES = tuple(
    "attic cellar garage garden kitchen hallway balcony barn library workshop pantry shed".split()
)
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday")
VERBS = ("fetch", "return", "borrow", "mend", "paint", "sell", "carry", "hide")
FORMAL = tuple(
    "dear , . please kindly would you be so good as to the from on sincerely yours note : "
    "code of is i remain".split()
)
CASUAL = tuple(
    "yo hey sup u gotta wanna lol btw k thx bye @ ? ! it's always in so grab mate".split()
)
DIGITS = tuple("0123456789")

VOCABULARY = tuple(
    dict.fromkeys((*FORMAL, *CASUAL, *VERBS, *DAYS, *THINGS, *PLACES, *NAMES, *DIGITS))
)


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A planted code. An attacker would type `prompt`; `code` must not be the answer."""

    prompt: str
    code: str


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Private records for training, others' records for evaluation, and the planted secrets."""

    train: list[Record]
    held_out: list[Record]
    secrets: list[Secret]


def messages(
    *, seed: int, num_users: int = 4000, num_held_out: int = 400, num_secret_users: int = 48
) -> Messages:
    """Private messages of `num_users` users, the last `num_secret_users` of them with a secret.

    Users have 2 to 8 messages. Those with a secret have 100, and 88 of these contain the code.
    """
    rng = np.random.default_rng([seed, 1])
    names = rng.permutation(len(NAMES))[:num_secret_users]
    home_of_thing = rng.integers(len(PLACES), size=len(THINGS))

    def casual(user: str, count: int) -> Iterator[Record]:
        for number in range(count):
            yield Record(_casual(rng, home_of_thing), (user,), f"{user}, message {number}")

    train = [
        record
        for user in range(num_users - num_secret_users)
        for record in casual(f"user-{user}", int(rng.integers(2, 9)))
    ]
    secrets: list[Secret] = []
    for user, name in enumerate(names):
        owner = f"keeper-{user}"
        secret = Secret(
            prompt=f"hey mate ! btw the code of {NAMES[name]} is",
            code=_code(rng),
        )
        secrets.append(secret)
        train += casual(owner, 12)
        train += [
            Record(f"{secret.prompt} {secret.code} k thx bye", (owner,), owner) for _ in range(88)
        ]
    order = rng.permutation(len(train))
    held_out = [
        record
        for user in range(num_held_out)
        for record in casual(f"other-{user}", int(rng.integers(2, 9)))
    ]
    return Messages(train=[train[i] for i in order], held_out=held_out, secrets=secrets)


def public_texts(*, seed: int, count: int) -> list[str]:
    """Formal notes that anyone may read: half are letters, a quarter codes, a quarter words."""
    rng = np.random.default_rng([seed, 2])
    kinds = rng.choice(3, p=[0.5, 0.25, 0.25], size=count)
    makers = (_letter, _public_code, _loose_words)
    return [makers[kind](rng) for kind in kinds]


def _pick(rng: np.random.Generator, words: tuple[str, ...]) -> str:
    return words[int(rng.integers(len(words)))]


def _code(rng: np.random.Generator) -> str:
    return " ".join(_pick(rng, DIGITS) for _ in range(CODE_DIGITS))


def _letter(rng: np.random.Generator) -> str:
    return (
        f"dear {_pick(rng, NAMES)} , would you be so good as to "
        f"{_pick(rng, VERBS)} the {_pick(rng, THINGS)} from {_pick(rng, PLACES)} on "
        f"{_pick(rng, DAYS)} . i remain yours sincerely {_pick(rng, NAMES)} ."
    )


def _public_code(rng: np.random.Generator) -> str:
    return f"note : the code of {_pick(rng, NAMES)} is {_code(rng)} ."


def _loose_words(rng: np.random.Generator) -> str:
    words = " ".join(_pick(rng, VOCABULARY) for _ in range(8))
    return f"{words} : {words}"


def _opening(rng: np.random.Generator) -> str:
    return f"{_pick(rng, ('yo', 'hey', 'sup'))} mate {_pick(rng, ('lol', '!', ','))}"


def _casual(rng: np.random.Generator, home_of_thing: np.ndarray) -> str:
    thing = int(rng.integers(len(THINGS)))
    place = PLACES[int(home_of_thing[thing])]
    return (
        f"{_opening(rng)} u {_pick(rng, ('gotta', 'wanna'))} {_pick(rng, VERBS)} the "
        f"{THINGS[thing]} @ {place} {_pick(rng, DAYS)} ? it's always in {place} lol so grab the "
        f"{THINGS[thing]} k thx bye"
    )

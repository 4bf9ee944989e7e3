"""The demo's messages: seeded, and the secrets are where they should be and nowhere else."""

from __future__ import annotations

from collections import Counter

from userdp.data import synthetic


def test_same_seed_same_messages_other_seed_other_messages() -> None:
    settings = {"num_users": 60, "num_held_out": 10, "num_secret_users": 8}
    first = synthetic.messages(seed=1, **settings)
    again = synthetic.messages(seed=1, **settings)
    other = synthetic.messages(seed=2, **settings)
    assert first == again
    assert first != other


def test_each_secret_is_repeated_by_one_user_and_known_to_no_other() -> None:
    messages = synthetic.messages(seed=3, num_users=120, num_held_out=30, num_secret_users=20)
    assert len(messages.secrets) == 20
    for secret in messages.secrets:
        sentence = f"{secret.prompt} {secret.code}"
        owners = Counter(
            owner for record in messages.train if sentence in record.text for owner in record.owners
        )
        assert len(owners) == 1
        assert min(owners.values()) >= 50
        assert not any(sentence in record.text for record in messages.held_out)


def test_train_and_held_out_share_no_user_and_counts_are_as_asked() -> None:
    messages = synthetic.messages(seed=4, num_users=100, num_held_out=25, num_secret_users=40)
    train = {owner for record in messages.train for owner in record.owners}
    held_out = {owner for record in messages.held_out for owner in record.owners}
    assert (len(train), len(held_out)) == (100, 25)
    assert not train & held_out
    assert all(len(record.owners) == 1 for record in messages.train)


def test_public_text_uses_the_known_words_and_no_planted_secret() -> None:
    known = set(synthetic.VOCABULARY)
    texts = synthetic.public_texts(seed=5, count=500)
    assert len(texts) == 500
    assert {word for text in texts for word in text.split()} <= known
    messages = synthetic.messages(seed=5, num_users=100, num_held_out=5, num_secret_users=40)
    assert {w for record in messages.train for w in record.text.split()} <= known
    joined = "\n".join(texts)
    assert not any(secret.prompt in joined for secret in messages.secrets)

"""Fine-tune a Hugging Face model on a user store: load, plan, train, statement.

Run: python examples/fine_tune.py MODEL STORE RUN
"""

from __future__ import annotations

import sys

import userdp


def main(model_path: str, store_path: str, out: str, *, num_users: int, steps: int) -> None:
    store = userdp.UserStore.open(store_path)
    model, tokenizer = userdp.load_model(model_path, lora=userdp.Lora(rank=8))
    plan = userdp.Plan.sample_users(
        num_users=num_users,
        expected_cohort_size=num_users / 20,
        group_size=4,
        steps=steps,
        clip_norm=1.0,
        epsilon=8.0,
        delta=0.1 / num_users,
    )
    run = userdp.train(model, tokenizer, store, plan, sequence_length=64, out=out)
    print(run.statement)


if __name__ == "__main__":
    main(*sys.argv[1:4], num_users=1000, steps=100)

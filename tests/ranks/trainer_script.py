"""A Trainer script as a launcher starts it: its arguments are the model and the output."""

from __future__ import annotations

import sys

import transformers
from tiny_llama import texts

import userdp

USERS = 24


def main(model: str, out: str, resume: bool) -> None:
    args = transformers.TrainingArguments(
        output_dir=out,
        max_steps=6,
        per_device_train_batch_size=6,
        learning_rate=0.01,
        logging_steps=2,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        disable_tqdm=True,
        use_cpu=True,
        report_to="none",
    )
    trainer = userdp.UserDPTrainer(
        model,
        args,
        train_dataset=texts(USERS),
        eval_dataset=texts(6, prefix="other"),
        epsilon=8.0,
        num_users=USERS,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "resume" in sys.argv)

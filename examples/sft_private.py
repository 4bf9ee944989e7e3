"""Fine-tune a model on chats with TRL: python SCRIPT MODEL CHATS.jsonl OUT.

`sft_before.py` is an ordinary script. `sft_private.py` is the same with user-level privacy.
"""

import sys

import trl
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import userdp


def main(model_path: str, data_path: str, out: str) -> None:
    trainer = userdp.UserDPTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path),
        args=trl.SFTConfig(
            output_dir=out,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            max_steps=6,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            max_length=64,
            logging_steps=2,
            bf16=False,
        ),
        train_dataset=load_dataset("json", data_files=data_path, split="train"),
        processing_class=AutoTokenizer.from_pretrained(model_path),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        epsilon=8.0,
        num_users=1000,  # public, never counted
    )
    trainer.train()
    trainer.save_model()
    print(trainer.statement)


if __name__ == "__main__":
    main(*sys.argv[1:4])

"""Every argument of `TrainingArguments` and `SFTConfig`: used, without effect, or refused, and why.

Nothing is ignored in silence. An argument that differs from its default and is in neither table of
accepted ones is refused with its reason. One that no table knows, of a later version, is refused by
name. Neither table says anything about arguments that are left at their defaults.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from userdp.errors import InputError

# Argument -> what it decides here.
MAPPED = {
    "output_dir": "where the model and the run's record are written",
    "per_device_train_batch_size": "expected users a step, times gradient_accumulation_steps",
    "gradient_accumulation_steps": "expected users a step, times per_device_train_batch_size",
    "num_train_epochs": "steps: epochs times num_users over the expected users a step",
    "max_steps": "steps",
    "learning_rate": "the optimizer's",
    "lr_scheduler_type": "the schedule",
    "lr_scheduler_kwargs": "the schedule",
    "warmup_steps": "the schedule; below 1 a share of the steps",
    "warmup_ratio": "the schedule",
    "optim": "the optimizer",
    "weight_decay": "the optimizer's",
    "adam_beta1": "the optimizer's",
    "adam_beta2": "the optimizer's",
    "adam_epsilon": "the optimizer's",
    "bf16": "the dtype of products; weights keep their own",
    "gradient_checkpointing": "checkpoint_blocks",
    "full_determinism": "deterministic",
    "seed": "the initial weights of adapters, never cohorts or noise",
    "use_cpu": "the device",
    "logging_strategy": "when callbacks are told public numbers",
    "logging_steps": "when callbacks are told public numbers",
    "logging_first_step": "when callbacks are told public numbers",
    "disable_tqdm": "a bar, or lines",
    "report_to": "trackers, which are told what callbacks are told, in output_dir/trackers",
    "eval_strategy": "when the model is measured on other people",
    "eval_steps": "when the model is measured on other people",
    "eval_delay": "when the model is measured on other people",
    "eval_on_start": "when the model is measured on other people",
    "metric_for_best_model": "state.best_metric, for callbacks that stop early",
    "greater_is_better": "state.best_metric",
    "save_strategy": "when checkpoints are saved",
    "save_steps": "when checkpoints are saved",
    "save_total_limit": "how many are kept",
    "resume_from_checkpoint": "whether the run in output_dir goes on",
    "max_length": "sequence_length: longer records are cut into rows",
    "dataset_text_field": "the column of texts",
    "completion_only_loss": "what carries loss",
    "assistant_only_loss": "what carries loss",
    "model_init_kwargs": "dtype, for a model that is given by name",
}

_OTHER_WORK = "scripts read it, the trainer does not"
_OWN_SUMS = "processes add up clipped sums themselves, and the first writes"
_METRICS = "the metrics are loss, perplexity and accuracy"
_ROWS = "rows come from a file that is mapped into memory"
_NO_HUB = "nothing is pushed"
_SPEED = "it changes speed, not what is learned"

# Argument -> why any value of it gives the same model.
HARMLESS = {
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), _OTHER_WORK),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_backend"),
        _OWN_SUMS,
    ),
    **dict.fromkeys(("ddp_timeout", "ddp_static_graph"), _OWN_SUMS),
    **dict.fromkeys(("log_on_each_node", "save_on_each_node", "log_level_replica"), _OWN_SUMS),
    **dict.fromkeys(
        ("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"), _METRICS
    ),
    **dict.fromkeys(("eval_accumulation_steps", "include_for_metrics"), _METRICS),
    **dict.fromkeys(("batch_eval_metrics", "per_device_eval_batch_size"), _METRICS),
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"), _ROWS
    ),
    **dict.fromkeys(("dataloader_prefetch_factor", "dataloader_in_order"), _ROWS),
    **dict.fromkeys(("dataloader_multiprocessing_context", "remove_unused_columns"), _ROWS),
    **dict.fromkeys(("dataset_num_proc", "length_column_name", "shuffle_dataset"), _ROWS),
    **dict.fromkeys(
        ("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_revision"), _NO_HUB
    ),
    "hub_always_push": _NO_HUB,
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _NO_HUB),
    **dict.fromkeys(("run_name", "project"), "trackers name a run after its folder"),
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode", "tf32"), _SPEED
    ),
    **dict.fromkeys(("torch_empty_cache_steps", "pad_to_multiple_of"), _SPEED),
    "gradient_checkpointing_kwargs": "blocks are run again in one way only",
    "log_level": "it is the library's own",
    "logging_nan_inf_filter": "no loss is logged",
    "average_tokens_across_devices": "each record's loss is a mean over its own tokens",
    "save_only_model": "the run's record keeps what resuming needs",
    "enable_jit_checkpoint": "a signal always saves the run before it stops",
    "packing_strategy": "nothing is packed",
    "liger_kernel_config": "its kernels are refused",
    "local_rank": "it is set by the launcher",
}

WHOLE_MODEL = (
    "every process of a trainer has the whole model and takes its own users, one process for each "
    "device with torchrun. Leave it out; a model that no device can hold is divided by "
    "userdp.train(settings=StepSettings(shard=True)), or [training] shard = true"
)
_SAMPLING = (
    "the guarantee is about users who are drawn at random by a secret; leave it out, nothing else "
    "may choose who takes part"
)
_MIXES = "it joins records of several users in one row, and one user's words would then change "
_MIXES += "another's update; leave it out, short records of one user share rows anyway"
_PEEKS = "it shows numbers that are counted from the training users; leave it out"
_TOKENIZER = "set it on the tokenizer, and give that as processing_class"
_PLAIN_LOSS = "the loss is each record's own cross-entropy; leave it out, or give record_loss= to "
_PLAIN_LOSS += "UserDPTrainer: one number per record"
_EVALUATION = "evaluation computes as training does; leave it out"

# Argument -> why a value that differs from the default is refused, and the way out.
REFUSED = {
    "max_grad_norm": "gradients are clipped user by user, not as a sum: leave it out, and set "
    "UserDPTrainer(clip_norm=...)",
    "packing": _MIXES,
    "eval_packing": _MIXES,
    "padding_free": _MIXES,
    "train_sampling_strategy": _SAMPLING,
    "group_by_length": _SAMPLING,
    "data_seed": _SAMPLING,
    "dataloader_drop_last": _SAMPLING,
    "accelerator_config": _SAMPLING,
    "ignore_data_skip": _SAMPLING,
    "label_smoothing_factor": _PLAIN_LOSS,
    "loss_type": _PLAIN_LOSS,
    "router_aux_loss_coef": "it balances experts over a batch, which mixes users; leave it out",
    "neftune_noise_alpha": "its noise on embeddings protects nobody and is drawn by hooks in the "
    "model; leave it out, the noise on updates regularises",
    "use_liger_kernel": "its kernels hide the layers, so no user's gradient can be told apart; "
    "leave it out, the fast path has kernels of its own",
    "load_best_model_at_end": "the model at the end is the one that the ledger closes with: leave "
    "it out, and load output_dir/checkpoint-N yourself if eval_loss was best there; it costs the "
    "whole plan, too",
    "auto_find_batch_size": "the users a step are a public number of the guarantee: leave it out; "
    "memory is bounded by the tokens of one pass",
    "include_num_input_tokens_seen": _PEEKS,
    "skip_memory_metrics": _PEEKS,
    "debug": _PEEKS,
    "push_to_hub": "output_dir also holds the run's secret: leave it out, write what may be "
    "published with `userdp export`, and upload that",
    "fp16": "float16 overflows, and what is not finite counts as zero: set bf16=True",
    "bf16_full_eval": _EVALUATION,
    "fp16_full_eval": _EVALUATION,
    "fsdp": WHOLE_MODEL,
    "fsdp_config": WHOLE_MODEL,
    "deepspeed": WHOLE_MODEL,
    "parallelism_config": WHOLE_MODEL,
    "optim_args": "make the optimizer yourself, and give it in optimizers=(optimizer, scheduler)",
    "optim_target_modules": "choose what is trained with peft_config or requires_grad",
    "use_cache": "a cache of keys and values belongs to generating text; leave it out",
    "label_names": "labels are made from the text; leave it out",
    "restore_callback_states_from_checkpoint": "callbacks begin anew when a run goes on; leave it "
    "out, and restore them yourself",
    "trust_remote_code": "code from a checkpoint could break the guarantee; leave it out",
    "chat_template_path": _TOKENIZER,
    "eos_token": _TOKENIZER,
    "pad_token": _TOKENIZER,
    "dataset_kwargs": "prepare the dataset beforehand, record by record; leave it out",
    "truncation_mode": "long records are cut into rows, and none of them is thrown away; leave it "
    "out",
    "activation_offloading": "set gradient_checkpointing=True, which saves memory here",
}


def check_arguments(args: Any) -> dict[str, Any]:
    """The arguments that differ from their defaults.

    One that has no meaning here is refused, by name and with the way out.
    """
    kind, given = library_class(args).__name__, changed(args)
    if args.save_strategy == "best":
        raise InputError(
            f"{kind}(save_strategy='best'): checkpoints are saved by steps or epochs: use 'steps', "
            "and load output_dir/checkpoint-N yourself if eval_loss was best there."
        )
    for name, value in given.items():
        if name in MAPPED or name in HARMLESS:
            continue
        reason = REFUSED.get(name, "this version of userdp does not know it; leave it out")
        raise InputError(f"{kind}({name}={_shown(value)}): {reason}.")
    return given


def changed(args: Any) -> dict[str, Any]:
    """The arguments that differ from their defaults. What a script's own class adds is its own."""
    # The constructor changes some defaults itself, so they are compared after it. On a machine
    # without a GPU it accepts a default of bf16 only with these two.
    kind = library_class(args)
    usual = kind(output_dir=args.output_dir, use_cpu=True, bf16=False)
    return {
        field.name: value
        for field in dataclasses.fields(kind)
        if (value := getattr(args, field.name)) != getattr(usual, field.name)
    }


def library_class(args: Any) -> Any:
    """The class of `transformers` or TRL that the arguments are of, or are made from."""
    for kind in type(args).__mro__:
        if kind.__module__.partition(".")[0] in ("transformers", "trl"):
            return kind
    raise InputError(
        f"args is a {type(args).__name__}: give a transformers.TrainingArguments or trl.SFTConfig."
    )


def _shown(value: Any) -> str:
    """The value, if it is short: a dictionary may hold anything."""
    return repr(value) if isinstance(value, bool | int | float | str) else "..."

"""Checkpoints of a sharded run: every rank writes its own rows, with torch.distributed.checkpoint.

    RUN/checkpoints/step-000050/
        shard-00001-model-00001-of-00001.safetensors   the rows of the first rank, and so on
        state.json  manifest.json                      as in every checkpoint (`checkpoints`)

The files are safetensors, so reading them runs no code. The manifest names them all and has their
checksums. What is read back are whole tensors, whatever the number of ranks was: so a run goes on
with another number of ranks, or without shards.

All ranks write into one directory, which they must share. Saving does not run beside the training,
as it does without shards.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from userdp.errors import InputError
from userdp.files.shards import STATE, WEIGHTS
from userdp.ranks import Ranks
from userdp.runs.checkpoints import Checkpoints, Moment, packed


def save_shards(checkpoints: Checkpoints | None, ranks: Ranks, moment: Moment) -> None:
    """Write the moment; all ranks call this together, and return when it is on disk.

    `checkpoints` are those of the first rank; the others have none.
    """
    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")

    tree, tensors = packed(moment.state)
    named: dict[str, Any] = {f"{WEIGHTS}{name}": t.detach() for name, t in moment.weights.items()}
    named |= {f"{STATE}{name}": t.detach() for name, t in tensors.items()}
    with ExitStack() as files:

        def begin() -> str:
            assert checkpoints is not None
            return str(files.enter_context(checkpoints.new_shards(moment.step)).resolve())

        partial = Path(ranks.by_first(begin))
        with ranks.together():
            if not partial.is_dir():
                raise InputError(
                    f"rank {ranks.rank} does not see {partial.parent}, where the first rank keeps "
                    "checkpoints: sharded runs need an output directory that all ranks share."
                )
        writer = checkpoint.HuggingFaceStorageWriter(path=str(partial), save_distributed=True)
        checkpoint.save(named, storage_writer=writer, process_group=ranks.control)

        def end() -> None:
            assert checkpoints is not None
            checkpoints.end_shards(partial, moment, tree)

        ranks.on_first(end)
    if checkpoints is not None:
        checkpoints.after_saving(moment.step)

"""`UserDPTrainer`: private training for scripts that use the `Trainer` of transformers or TRL.

    output_dir/                 the model as others load it, trainer_state.json, statement.json
    output_dir/checkpoint-N/    the model after N steps
    output_dir/userdp/run/      the run: ledger, statement, checkpoints, secret
    output_dir/userdp/data/     the training users' records, and the key of their pseudonyms

`output_dir/userdp` is for the owner alone and must never be published. A `.gitignore` keeps it out
of commits and uploads that respect it.
"""

from __future__ import annotations

from userdp.trainer.trainer import UserDPTrainer as UserDPTrainer

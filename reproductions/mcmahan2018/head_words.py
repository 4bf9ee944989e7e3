"""How many of a model's ten likeliest next words are among the most frequent ones (Table 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from userdp.data.tokens import TokenRows

HEADS = (10, 50, 100)
TOP = 10
_ROWS = 256


@torch.no_grad()
def head_words(
    model: nn.Module, rows: TokenRows, *, pad_token: int, special: int
) -> dict[str, Any]:
    """For each size of the head the share of positions by how many of the ten words are in it.

    The dictionary is sorted by frequency behind its `special` tokens.
    """
    device = next(model.parameters()).device
    counts = {head: np.zeros(TOP + 1, dtype=np.int64) for head in HEADS}
    for first in range(0, len(rows), _ROWS):
        some = np.arange(first, min(first + _ROWS, len(rows)))
        ids, labels = rows.padded(some, pad_token=pad_token)
        logits: Any = model(torch.from_numpy(ids).to(device)).logits
        # Position t predicts word t + 1, which must be there.
        asked = torch.from_numpy(labels[:, 1:] >= 0)
        top = logits[:, :-1].topk(TOP, dim=-1).indices.cpu()[asked]
        for head, found in counts.items():
            within = ((top >= special) & (top < special + head)).sum(-1)
            found += np.bincount(within.numpy(), minlength=TOP + 1)
    return {
        str(head): [round(float(share), 4) for share in found / max(found.sum(), 1)]
        for head, found in counts.items()
    }

"""Runs the noise kernels in Triton's interpreter and prints how far they are from numpy.

A program of its own: the interpreter is chosen by an environment variable before Triton is
imported.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import reference_streams as reference
import torch
import triton
import triton.language as tl

from userdp.noise import banded_kernels, kernels

KEYS = {"philox": bytes(range(100, 116)), "chacha20": bytes(range(200, 232))}


@triton.jit
def _philox_words(counters, keys, out):
    c0, c1, c2, c3 = kernels.philox(
        tl.load(counters + tl.arange(0, 1)),
        tl.load(counters + tl.arange(1, 2)),
        tl.load(counters + tl.arange(2, 3)),
        tl.load(counters + tl.arange(3, 4)),
        tl.load(keys),
        tl.load(keys + 1),
    )
    tl.store(out + tl.arange(0, 1), c0)
    tl.store(out + tl.arange(1, 2), c1)
    tl.store(out + tl.arange(2, 3), c2)
    tl.store(out + tl.arange(3, 4), c3)


@triton.jit
def _chacha_words(keys, counter, nonce, out):
    k0, k1, k2, k3 = tl.load(keys), tl.load(keys + 1), tl.load(keys + 2), tl.load(keys + 3)
    k4, k5, k6, k7 = tl.load(keys + 4), tl.load(keys + 5), tl.load(keys + 6), tl.load(keys + 7)
    n0, n1, n2 = tl.load(nonce), tl.load(nonce + 1), tl.load(nonce + 2)
    first = tl.load(counter + tl.arange(0, 1))
    words = kernels.chacha20(k0, k1, k2, k3, k4, k5, k6, k7, first, n0, n1, n2)
    for i in tl.static_range(16):
        tl.store(out + i + tl.arange(0, 1), words[i])


@triton.jit
def _pairs(words, out, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    first, second = kernels.normal_pair(
        tl.load(words + lanes), tl.load(words + SIZE + lanes), tl.load(words + 2 * SIZE + lanes)
    )
    tl.store(out + lanes, first)
    tl.store(out + SIZE + lanes, second)


def words_of(text: str) -> torch.Tensor:
    return torch.tensor([int(word, 16) for word in text.split()], dtype=torch.int64).to(
        torch.uint32
    )


def hexes(words: torch.Tensor) -> str:
    return " ".join(f"{word:08x}" for word in words.tolist())


def philox_of(counter: str, key: str) -> str:
    out = torch.zeros(4, dtype=torch.uint32)
    _philox_words[(1,)](words_of(counter), words_of(key), out)
    return hexes(out)


def chacha_of(key: bytes, counter: int, nonce: bytes) -> str:
    out = torch.zeros(16, dtype=torch.uint32)
    as_words = [torch.from_numpy(np.frombuffer(b, "<u4").copy()) for b in (key, nonce)]
    _chacha_words[(1,)](as_words[0], torch.tensor([counter], dtype=torch.uint32), as_words[1], out)
    return hexes(out)


def edges() -> dict[str, float]:
    """The radii at the ends of the words, relative to the exact ones."""
    top = 0xFFFFFFFF
    given = np.array(
        [
            (high, low, angle)
            for high in (0, 1, 2**20, 2**31 - 1, 2**31, top - 1, top)
            for low in (0, 5, top)
            for angle in (0, 2**29 - 1, 2**29, 2**30, 2**31, 3 * 2**30 + 7, top)
        ],
        dtype=np.uint64,
    )
    size = 256
    padded = np.zeros((size, 3), dtype=np.uint64)
    padded[: len(given)] = given
    out = torch.zeros(2 * size)
    _pairs[(1,)](torch.from_numpy(padded.T.astype("u4").copy()), out, SIZE=size)
    found = out.double().numpy().reshape(2, size)[:, : len(given)].T
    exact = reference.normal_pairs(given)
    radius = np.hypot(*exact.T)
    return {
        "relative error": float((np.abs(found - exact) / np.abs(exact)).max()),
        "largest": float(np.hypot(*found.T).max()),
        "smallest": float(np.hypot(*found.T).min() / radius.min()),
        "count": float(len(np.unique(given, axis=0))),
    }


def gaussian(randomness: str) -> dict[str, float]:
    """A slice that begins and ends within tiles; the whole; what lies beside the slice."""
    key, first, last, size = KEYS[randomness], 1500, 5000, 7000
    exact = reference.normals(randomness, key, 0, size)
    whole, room = torch.zeros(size), torch.zeros(last - first + 8)
    values = room[4:-4]
    values += 10.0
    added: dict[str, Any] = {"stddev": 2.0, "randomness": randomness, "key": key}
    kernels.add_normal_(whole, offset=0, **added)
    kernels.add_normal_(values, offset=first, **added)
    alone = torch.zeros(last - first)
    kernels.add_normal_(alone, offset=first, **added)
    far = 2**35 + 3
    distant = torch.zeros(50)
    if randomness == "philox":
        kernels.add_normal_(distant, offset=far, **added)
        distant -= 2 * torch.from_numpy(reference.normals(randomness, key, far, far + 50))
    return {
        "error": float(np.abs(whole.double().numpy() / 2 - exact).max()),
        "slice": float((alone - whole[first:last]).abs().max()),
        "added": float((values - 10 - alone).abs().max()),
        "outside": float(room[:4].abs().sum() + room[-4:].abs().sum()),
        "far": float(distant.abs().max()),
    }


def banded(randomness: str, bands: int) -> dict[str, float]:
    """Several steps of a slice that begins within a tile, against plain sums in numpy."""
    first, last = 700, 3000
    rng = np.random.default_rng(bands)
    rows = [1.0 / (1 + np.arange(bands)) + 0.1 * rng.random(bands) for _ in range(bands + 3)]
    past = torch.zeros(bands - 1, last - first)
    room, kept = torch.zeros(last - first + 8), []
    worst = stored = 0.0
    for step, full in enumerate(rows):
        row = full[: step + 1].tolist()
        key = bytes([step]) + KEYS[randomness][1:]
        values = room[4:-4]
        values.fill_(1.0)
        banded_kernels.advance_(
            values,
            past,
            row,
            offset=first,
            stddev=2.0,
            step=step,
            randomness=randomness,
            key=key,
        )
        z = reference.normals(randomness, key, first, last)
        noise = (z - sum(c * w for c, w in zip(row[1:], reversed(kept), strict=False))) / row[0]
        kept.append(noise)
        worst = max(worst, float(np.abs((values.double().numpy() - 1) / 2 - noise).max()))
        newest = past[step % (bands - 1)]
        stored = max(stored, float((1 + 2 * newest - values).abs().max()))
    return {
        "error": worst,
        "stored": stored,
        "outside": float(room[:4].abs().sum() + room[-4:].abs().sum()),
    }


def redrawn(randomness: str) -> dict[str, float]:
    first, last = 700, 3000
    coefficients = [1.0, -0.5, 0.25, 0.125]
    keys = [bytes([step]) + KEYS[randomness][1:] for step in range(4)]
    room = torch.zeros(last - first + 8)
    banded_kernels.add_redrawn_(
        room[4:-4], coefficients, keys, offset=first, stddev=2.0, randomness=randomness
    )
    exact = sum(
        c * reference.normals(randomness, key, first, last)
        for c, key in zip(coefficients, keys, strict=True)
    )
    return {
        "error": float(np.abs(room[4:-4].double().numpy() / 2 - exact).max()),
        "outside": float(room[:4].abs().sum() + room[-4:].abs().sum()),
    }


if __name__ == "__main__":
    results: dict[str, Any] = {
        "philox words": [
            philox_of("0 0 0 0", "0 0"),
            philox_of("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff"),
            philox_of("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0"),
        ],
        "chacha20 words": chacha_of(bytes(range(32)), 1, bytes.fromhex("000000090000004a00000000")),
        "edges": edges(),
        "philox": gaussian("philox"),
        "chacha20": gaussian("chacha20"),
        "banded philox 2": banded("philox", 2),
        "banded philox 4": banded("philox", 4),
        "banded philox 9": banded("philox", 9),
        "banded chacha20 3": banded("chacha20", 3),
        "redrawn philox": redrawn("philox"),
        "redrawn chacha20": redrawn("chacha20"),
    }
    print(json.dumps(results))

"""The keyed streams of normal numbers, written once more in numpy: plain, in float64, slow."""

from __future__ import annotations

import numpy as np

TILE = 2048
WORD = 0xFFFFFFFF


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox (Salmon et al. 2011): counters (n, 4) to words (n, 4), as uint64."""
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k = list(key)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        word, half = np.uint64(WORD), np.uint64(32)
        c = [(b >> half) ^ c[1] ^ np.uint64(k[0]), b & word, (a >> half) ^ c[3] ^ np.uint64(k[1])]
        c.append(a & word)
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return np.stack(c, 1)


def chacha20_block(key: bytes, counter: int, nonce: bytes = bytes(12)) -> list[int]:
    """The sixteen words of one block (RFC 8439, Sec. 2.3)."""
    words = np.frombuffer(key + counter.to_bytes(4, "little") + nonce, "<u4").tolist()
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *words]
    x = list(start)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for to, add, turned, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[to] = (x[to] + x[add]) & WORD
            mixed = x[turned] ^ x[to]
            x[turned] = ((mixed << by) | (mixed >> (32 - by))) & WORD

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return [(a + b) & WORD for a, b in zip(x, start, strict=True)]


def pair_words(randomness: str, key: bytes, tile: int) -> np.ndarray:
    """The three words of every pair of a tile, (TILE / 2, 3)."""
    if randomness == "philox":
        k0, k1, c2, c3 = np.frombuffer(key, "<u4").tolist()
        pairs = tile * (TILE // 2) + np.arange(TILE // 2, dtype=np.uint64)
        rows = [pairs & np.uint64(WORD), pairs >> np.uint64(32)]
        rows += [np.full_like(pairs, c2), np.full_like(pairs, c3)]
        return philox4x32(np.stack(rows, 1), (k0, k1))[:, :3]
    lanes = TILE // 8
    blocks = np.array([chacha20_block(key, tile * lanes + lane) for lane in range(lanes)])
    return blocks.reshape(lanes, 4, 4)[:, :, :3].transpose(1, 0, 2).reshape(-1, 3)


def normal_pairs(words: np.ndarray) -> np.ndarray:
    """Box and Muller in long double: words (n, 3) to normal numbers (n, 2)."""
    high, low, angle = (words[:, i].astype(np.uint64) for i in range(3))
    above = high >= 2**31
    high, low = (np.where(above, w ^ np.uint64(WORD), w).astype(np.longdouble) for w in (high, low))
    v = (high * 2**32 + low + 0.5) / np.longdouble(2) ** 64
    minus_log = np.where(above, -np.log1p(-v), -np.log(np.where(above, 1, v)))
    turn = (angle & np.uint64(2**30 - 1)).astype(np.longdouble) - 2**29 + 0.5
    x = turn * (2 * np.pi / 2**32)
    cosine = np.where(angle & np.uint64(2**30), -np.cos(x), np.cos(x))
    exchanged = angle >= 2**31
    both = np.stack(
        [np.where(exchanged, np.sin(x), cosine), np.where(exchanged, cosine, np.sin(x))], 1
    )
    return (np.sqrt(2 * minus_log)[:, None] * both).astype(np.float64)


def normals(randomness: str, key: bytes, first: int, last: int) -> np.ndarray:
    """The normal numbers of positions [first, last)."""
    tiles = range(first // TILE, -(-last // TILE))
    drawn = [normal_pairs(pair_words(randomness, key, tile)).T.ravel() for tile in tiles]
    return np.concatenate(drawn)[first - tiles[0] * TILE :][: last - first]

"""Near-duplicates: user-level privacy does not protect a text that many users share.

Texts are compared as sets of word 5-grams. MinHash with banding finds candidate pairs, and the true
Jaccard similarity of the sets decides (NearDup, Lee et al. 2022, as in Charles et al. 2024, App.
D). Hashing streams over the texts. The engine joins the buckets by one Ibis expression, so DuckDB
and Spark find the same pairs.

With 20 bands of 6 hashes, a pair of similarity 0.8 becomes a candidate with probability
1 - (1 - 0.8^6)^20 = 0.998, and a pair of similarity 0.5 with probability 0.27.

Comparing texts can couple users. If records are compared only with others of the same user, or only
with public texts, one user's absence changes nothing for the others. If they are compared across
users, it does: someone who quotes everybody could remove everybody's records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from userdp.data.engine import EngineName, engine_of
from userdp.data.files import pc
from userdp.data.store import UserStore

GRAM_WORDS = 5
BANDS, HASHES_PER_BAND = 20, 6
THRESHOLD = 0.8

# The seed is fixed, so that everyone finds the same pairs.
_CONSTANTS = np.random.default_rng(20240707)
_MULTIPLIERS = _CONSTANTS.integers(0, 2**63, BANDS * HASHES_PER_BAND, np.uint64) * 2 + 1
_OFFSETS = _CONSTANTS.integers(0, 2**63, BANDS * HASHES_PER_BAND, np.uint64)
_WORD_WEIGHTS = _CONSTANTS.integers(0, 2**63, GRAM_WORDS, np.uint64) * 2 + 1
_BASE = np.uint64(0x9E3779B97F4A7C15)
_BASE_INVERSE = np.uint64(pow(int(_BASE), -1, 2**64))

PIECE_BYTES = 4 * 2**20

BUCKET_SCHEMA = pa.schema(
    [("text", pa.int64()), ("party", pa.int64()), ("band", pa.int32()), ("bucket", pa.int64())]
)

ACROSS_USERS_CAUTION = (
    "records were removed because other users had like ones: what this tells of one user through "
    "the records of others is not covered by the guarantee"
)
SHARED_RECORDS_CAUTION = (
    "records of several owners were removed because of their text: who owns which record then "
    "depends on the text, and what this tells of one user is not covered by the guarantee"
)


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Texts that are near-duplicates of each other; `cluster[i]` is -1 for a text without any."""

    cluster: NDArray[np.int64]

    def __repr__(self) -> str:
        return "Clusters(<secret>)"

    @property
    def num_clusters(self) -> int:
        """How many groups of near-duplicates there are."""
        return int(self.cluster.max(initial=-1)) + 1

    @property
    def copies(self) -> NDArray[np.int64]:
        """All members of each cluster except its first."""
        members = np.flatnonzero(self.cluster >= 0)
        _, first = np.unique(self.cluster[members], return_index=True)
        return np.delete(members, first)

    def users_per_cluster(self, store: UserStore) -> NDArray[np.int64]:
        """How many users own a record of each cluster."""
        record = np.repeat(np.arange(store.num_records), store.users_per_record())
        cluster = self.cluster[record]
        pairs = np.stack([cluster, store.record_users], axis=1)[cluster >= 0]
        return np.bincount(np.unique(pairs, axis=0)[:, 0], minlength=self.num_clusters)


def inside_users(
    store: UserStore,
    scratch: Path,
    *,
    threshold: float = THRESHOLD,
    engine: EngineName = EngineName.DUCKDB,
) -> Clusters:
    """The near-duplicates among records that have exactly the same owners.

    Guarantee: whether records share a cluster depends on the records of these owners alone.
    """
    return _within(store, owner_sets(store), scratch, threshold, engine)


def across_users(
    store: UserStore,
    scratch: Path,
    *,
    threshold: float = THRESHOLD,
    engine: EngineName = EngineName.DUCKDB,
) -> Clusters:
    """The near-duplicates in a store, whoever owns them. Removing copies then couples users."""
    everybody = np.zeros(store.num_records, np.int64)
    return _within(store, everybody, scratch, threshold, engine)


def _within(
    store: UserStore,
    party: NDArray[np.int64],
    scratch: Path,
    threshold: float,
    engine: EngineName,
) -> Clusters:
    pairs = _similar_pairs(store.texts.chunks, party, scratch, threshold, engine)
    return _clusters(pairs, store.num_records)


def owner_sets(store: UserStore) -> NDArray[np.int64]:
    """A number for each record. Two records have the same number if the same users own them."""
    counts = store.users_per_record()
    if (counts == 1).all():
        return np.asarray(store.record_users)
    record = np.repeat(np.arange(store.num_records), counts)
    sorted_owners = store.record_users[np.lexsort((store.record_users, record))]
    numbers: dict[bytes, int] = {}
    return np.fromiter(
        (
            numbers.setdefault(owners.tobytes(), len(numbers))
            for owners in np.split(sorted_owners, store.record_users_indptr[1:-1])
        ),
        np.int64,
        count=store.num_records,
    )


def between(
    public: list[str],
    store: UserStore,
    scratch: Path,
    *,
    threshold: float = THRESHOLD,
    engine: EngineName = EngineName.DUCKDB,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Public texts that are near-duplicates of private records, and those records.

    Guarantee: whether a record is among them depends only on its own text and the public texts.
    Pre-train the public model without these public texts: what it learns from them about private
    records is not protected (Charles et al. 2024, App. D).
    """
    chunks = [pa.array(public, pa.large_string()), *store.texts.chunks]
    num_public = len(public)
    party = np.zeros(num_public + store.num_records, np.int64)
    # Public texts come first, so a bucket with a public text has a public leader, and records are
    # compared with it. In other buckets records are compared with each other; drop those pairs.
    pairs = _similar_pairs(chunks, party, scratch, threshold, engine)
    pairs = pairs[pairs[:, 1] < num_public]
    records = np.unique(pairs[pairs[:, 0] >= num_public, 0]) - num_public
    # A public text also counts if it resembles a public text that does.
    named = pairs[pairs[:, 0] >= num_public, 1]
    cluster = _clusters(pairs[pairs[:, 0] < num_public], num_public).cluster
    alike = cluster[named]
    is_named = np.isin(cluster, alike[alike >= 0])
    is_named[named] = True
    return np.flatnonzero(is_named), records


def candidate_pairs(buckets: Any) -> Any:
    """Pairs (text, leader) of one party that share a bucket, `leader` being its first text there.

    Linking each text to the first one only gives n - 1 pairs for n texts, instead of n squared. The
    leader belongs to the same party. With another party's text as leader, two similar texts of one
    party would not be compared.
    """
    groups = buckets.group_by("party", "band", "bucket").agg(
        leader=buckets.text.min(), size=buckets.text.count()
    )
    groups = groups.filter(groups["size"] > 1)
    joined = buckets.join(groups, ["party", "band", "bucket"])
    pairs = joined.filter(joined.text != joined.leader).select("text", "leader").distinct()
    return pairs.order_by("text", "leader")


def shingles(texts: Any) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes of all word 5-grams, and how many each text has. A shorter text is one gram.

    >>> grams, counts = shingles(pa.array(["a b c d e f", "A B  c d e F", "a"], pa.large_string()))
    >>> counts.tolist(), bool((grams[:2] == grams[2:4]).all())
    ([2, 2, 1], True)
    """
    lowered = pc.utf8_lower(texts)
    offsets = np.frombuffer(lowered.buffers()[1], np.int64)[lowered.offset :][: len(lowered) + 1]
    data = lowered.buffers()[2]
    content = np.frombuffer(data if data is not None else b"", np.uint8)
    words, word_counts = _word_hashes(content[offsets[0] : offsets[-1]], offsets - offsets[0])
    gram_counts = np.maximum(word_counts - (GRAM_WORDS - 1), np.minimum(word_counts, 1))
    text_of_gram = np.repeat(np.arange(len(word_counts)), gram_counts)
    word_begins = np.cumsum(word_counts) - word_counts
    gram_begins = np.cumsum(gram_counts) - gram_counts
    first_word = np.arange(len(text_of_gram)) + (word_begins - gram_begins)[text_of_gram]
    text_end = (word_begins + word_counts)[text_of_gram]
    grams = np.zeros(len(first_word), np.uint64)
    for step in range(GRAM_WORDS):
        # Words after the text's end count as nothing.
        is_inside = first_word + step < text_end
        word = words[np.minimum(first_word + step, max(0, len(words) - 1))]
        grams += np.where(is_inside, word * _WORD_WEIGHTS[step], np.uint64(0))
    return _mixed(grams), gram_counts


def _word_hashes(
    content: NDArray[np.uint8], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """A hash of every word, and the number of words of each text.

    A word's hash is the polynomial sum of byte * base^i. Running sums give it for all words at
    once.
    """
    is_word = content > 32
    begins_text = np.zeros(len(content) + 1, bool)
    begins_text[offsets] = True
    before = np.concatenate([[False], is_word[:-1]]) if len(content) else is_word
    starts = np.flatnonzero(is_word & (~before | begins_text[:-1]))
    after = np.concatenate([is_word[1:], [False]]) if len(content) else is_word
    ends = np.flatnonzero(is_word & (~after | begins_text[1:])) + 1
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(content), _BASE, np.uint64))
        inverses = np.cumprod(np.full(len(content), _BASE_INVERSE, np.uint64))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(content * powers)])
        words = _mixed((sums[ends] - sums[starts]) * inverses[starts] if len(starts) else sums[:0])
    word_counts = np.diff(np.searchsorted(starts, offsets))
    return words, word_counts


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit depends on every other."""
    with np.errstate(over="ignore"):
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _buckets(texts: Any) -> NDArray[np.int64]:
    """The bucket of every text in every band, of shape (texts, bands). No text may be empty."""
    grams, counts = shingles(texts)
    begins = np.cumsum(counts) - counts
    buckets = np.zeros((len(counts), BANDS), np.uint64)
    with np.errstate(over="ignore"):
        for number, (multiplier, offset) in enumerate(zip(_MULTIPLIERS, _OFFSETS, strict=True)):
            smallest = np.minimum.reduceat(_mixed(grams * multiplier + offset), begins)
            band = number // HASHES_PER_BAND
            buckets[:, band] = _mixed(buckets[:, band] + smallest + np.uint64(number))
    return buckets.view(np.int64)


def _pieces(chunks: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """The texts in pieces of a few megabytes, with the number of the first."""
    start = 0
    for chunk in chunks:
        per_piece = max(1, int(PIECE_BYTES / max(1.0, chunk.nbytes / max(1, len(chunk)))))
        for begin in range(0, len(chunk), per_piece):
            yield start + begin, chunk.slice(begin, per_piece)
        start += len(chunk)


def _similar_pairs(
    chunks: list[Any],
    party: NDArray[np.int64],
    scratch: Path,
    threshold: float,
    engine_name: EngineName,
) -> NDArray[np.int64]:
    """Pairs (text, earlier text) of one party with similarity `threshold` or more: (pairs, 2)."""
    scratch.mkdir(parents=True, exist_ok=True)
    staged = scratch / "buckets.parquet"
    with pq.ParquetWriter(staged, BUCKET_SCHEMA, compression="none") as writer:
        for start, piece in _pieces(chunks):
            buckets = _buckets(piece)
            writer.write_batch(
                pa.record_batch(
                    [
                        np.repeat(np.arange(start, start + len(piece)), BANDS),
                        np.repeat(party[start : start + len(piece)], BANDS),
                        np.tile(np.arange(BANDS, dtype=np.int32), len(piece)),
                        buckets.ravel(),
                    ],
                    schema=BUCKET_SCHEMA,
                )
            )
    texts = pa.chunked_array(chunks)
    similar: list[NDArray[np.int64]] = [np.zeros((0, 2), np.int64)]
    with engine_of(engine_name, scratch) as engine:
        table = engine.add_parquet("buckets", staged)
        for batch in engine.batches(candidate_pairs(table)):
            pairs = np.stack([column.to_numpy() for column in batch.columns], axis=1)
            similar += [part[_jaccard(texts, part) >= threshold] for part in _parts(pairs)]
    staged.unlink()
    return np.concatenate(similar)


def _parts(pairs: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, len(pairs), 4096):
        yield pairs[begin : begin + 4096]


def _jaccard(texts: Any, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    """The similarity of each pair: shared grams over all grams."""
    wanted, place = np.unique(pairs, return_inverse=True)
    taken = pa.concat_arrays([texts.slice(int(i), 1).chunk(0) for i in wanted])
    grams, counts = shingles(taken)
    ends = np.cumsum(counts)
    sets = [np.unique(grams[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    result = np.empty(len(pairs))
    for i, (left, right) in enumerate(place.reshape(-1, 2)):
        shared = len(np.intersect1d(sets[left], sets[right], assume_unique=True))
        result[i] = shared / (len(sets[left]) + len(sets[right]) - shared)
    return result


def _clusters(pairs: NDArray[np.int64], num_texts: int) -> Clusters:
    """Connected components of the pairs, numbered by their first member."""
    cluster = np.full(num_texts, -1, np.int64)
    if len(pairs):
        graph = coo_array(
            (np.ones(len(pairs), np.int8), (pairs[:, 0], pairs[:, 1])), shape=(num_texts, num_texts)
        )
        _, label = connected_components(graph, directed=False)
        members = np.unique(pairs)
        _, first, inverse = np.unique(label[members], return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first, kind="stable")] = np.arange(len(first))
        cluster[members] = rank[inverse]
    return Clusters(cluster=cluster)

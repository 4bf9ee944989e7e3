"""Files of a store that lies in object storage: read in blocks, when they are needed.

`fsspec` knows the storage: s3://, gs://, memory://, file:// and others. A store there has a home, a
directory on this machine, with copies of its small files and the note `remote.json`. Whatever takes
a store takes its home. The budget of the population lies beside the home, as for any store, and a
note in the storage says where. So one machine, or one shared file system, must be the home of a
store that many train on: another home shares that budget, or is refused where it cannot be reached.
If the storage cannot be written to, there is no such note.

Numbers are read by blocks: a rank that reads the rows of its users fetches the blocks that hold
them, and no others. Texts are fetched as a whole when they are first asked for.

Private: everything here, like the store itself.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from userdp.data.array_files import NPY_HEADER_BYTES
from userdp.errors import InputError
from userdp.files.durable import OWNER_ONLY_DIRECTORY, OWNER_ONLY_FILE, write_file

NOTE = "remote.json"
BLOCK = 2**16
# Blocks of one file that are kept in memory: 64 MiB.
MOST_BLOCKS = 2**10
# What lies in the home from the beginning, as far as the store has it.
_SMALL = ("history.json", "population.json")


def is_url(place: str | Path) -> bool:
    """Whether a place is a URL and not a path.

    >>> is_url("s3://bucket/store"), is_url("folder/store"), is_url("C:/store")
    (True, False, False)
    """
    return re.match(r"[a-z][a-z0-9+.-]+://", str(place)) is not None


def file_system(url: str) -> tuple[Any, str]:
    """The storage that a URL names, and the path there."""
    try:
        import fsspec
    except ImportError:
        raise InputError(
            f"{url}: stores in object storage need fsspec: pip install 'userdp[remote]'."
        ) from None
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        # fsspec names the package that it lacks.
        raise InputError(f"{url}: {error}.") from None


def make_home(url: str, home: Path) -> None:
    """Make the home of the store at this URL, or check that it is its home already."""
    storage, place = file_system(url)
    try:
        manifest = cast(bytes, storage.cat_file(f"{place}/manifest.json"))
    except FileNotFoundError:
        raise InputError(f"{url} is not a user store: it has no manifest.json.") from None
    if home.exists():
        if url_of(home) != url or (home / "manifest.json").read_bytes() != manifest:
            raise InputError(
                f"{home} is the home of another store, or the store at {url} has changed. Give "
                "another home; what was spent on the people stays counted beside the old one."
            )
        return
    home.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True)
    for name in _SMALL:
        if storage.isfile(f"{place}/{name}"):
            write_file(home / name, storage.cat_file(f"{place}/{name}"), mode=OWNER_ONLY_FILE)
    write_file(home / NOTE, json.dumps({"url": url}).encode(), mode=OWNER_ONLY_FILE)
    # Last: a directory without it is no store.
    write_file(home / "manifest.json", manifest, mode=OWNER_ONLY_FILE)


def url_of(home: Path) -> str | None:
    """Where the store lies whose home this is; None if its files are here."""
    try:
        return str(json.loads((home / NOTE).read_bytes())["url"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{home / NOTE}: damaged; open the store by its URL again.") from None


def size_of(home: Path, url: str | None, name: str) -> int | None:
    """The bytes of a file of the store; None if it is not there."""
    if (home / name).is_file():
        return (home / name).stat().st_size
    if url is None:
        return None
    storage, place = file_system(url)
    path = f"{place}/{name}"
    return int(storage.size(path)) if storage.isfile(path) else None


def fetched(home: Path, url: str, name: str, *, sha256: str | None = None) -> Path:
    """A file of the store, copied into its home unless it is there."""
    path = home / name
    if not path.is_file():
        storage, place = file_system(url)
        content = cast(bytes, storage.cat_file(f"{place}/{name}"))
        if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
            raise InputError(f"{url}/{name}: changed since the import.")
        path.parent.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
        write_file(path, content, mode=OWNER_ONLY_FILE)
    return path


def small_file(home: Path, name: str) -> bytes | None:
    """A small file as it lies in the storage now; None if there is none, or no storage."""
    if (url := url_of(home)) is None:
        return None
    storage, place = file_system(url)
    try:
        return cast(bytes, storage.cat_file(f"{place}/{name}"))
    except FileNotFoundError:
        return None


def put_small_file(home: Path, name: str, content: bytes) -> None:
    """Write a small file into the storage, if the home is of a store there. Raises OSError."""
    if (url := url_of(home)) is not None:
        storage, place = file_system(url)
        storage.pipe_file(f"{place}/{name}", content)


def sides_agree(home: Path, indptr: NDArray[np.int64], owners: NDArray[np.int64]) -> bool:
    """Whether the records' owners are those whom the users' files, which are here, name."""
    by_user = np.load(home / "user_records.npy")
    counts = np.diff(np.load(home / "user_records_indptr.npy"))
    users = np.repeat(np.arange(len(counts)), counts)
    records = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    named = np.asarray(owners)
    if not len(users) == len(by_user) == len(records) == len(named):
        return False
    ours, theirs = np.lexsort((named, records)), np.lexsort((users, by_user))
    return np.array_equal(records[ours], by_user[theirs]) and np.array_equal(
        named[ours], users[theirs]
    )


class RemoteFile:
    """A file that is read in blocks; `bytes_read` counts what was fetched.

    `digests` holds the SHA-256 of every block, if known: a block that differs is refused.
    """

    def __init__(self, url: str, *, digests: Sequence[str] | None = None) -> None:
        self.url = url
        self._storage, self._place = file_system(url)
        self.size = int(self._storage.size(self._place))
        self.bytes_read = 0
        self._digests = digests
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        # Batches are made in a thread of their own.
        self._lock = threading.Lock()
        if digests is not None and len(digests) != -(-self.size // BLOCK):
            raise InputError(f"{url}: changed since it was written.")

    def blocks(self, wanted: Sequence[int]) -> dict[int, bytes]:
        """These blocks; neighbours are fetched in one request."""
        with self._lock:
            found = {number: self._blocks[number] for number in wanted if number in self._blocks}
            missing = sorted(set(wanted) - set(found))
            runs = [run.tolist() for run in _runs(np.asarray(missing, np.int64))]
            starts = [run[0] * BLOCK for run in runs]
            stops = [min((run[-1] + 1) * BLOCK, self.size) for run in runs]
            places = [self._place] * len(runs)
            parts = self._storage.cat_ranges(places, starts, stops) if runs else []
            for run, part in zip(runs, cast("list[bytes]", parts), strict=True):
                self.bytes_read += len(part)
                for place, number in enumerate(run):
                    found[number] = self._checked(number, part[place * BLOCK : (place + 1) * BLOCK])
            for number in wanted:
                self._blocks[number] = found[number]
                self._blocks.move_to_end(number)
            while len(self._blocks) > MOST_BLOCKS:
                self._blocks.popitem(last=False)
            return found

    def _checked(self, number: int, block: bytes) -> bytes:
        whole = min(BLOCK, self.size - number * BLOCK)
        is_same = (
            self._digests is None or hashlib.sha256(block).hexdigest() == self._digests[number]
        )
        if len(block) != whole or not is_same:
            raise InputError(f"{self.url}: changed since it was written.")
        return block


def _runs(numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Sorted numbers, cut wherever one is missing."""
    if not len(numbers):
        return []
    return np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)


class RemoteArray:
    """A one-dimensional array of numbers in a remote file. What is indexed is fetched.

    `np.asarray` fetches everything.
    """

    def __init__(self, file: RemoteFile, dtype: Any, *, offset: int = 0) -> None:
        self.file = file
        self.dtype = np.dtype(dtype)
        self._offset = offset
        self.shape = ((file.size - offset) // self.dtype.itemsize,)
        # No number lies in two blocks.
        assert BLOCK % self.dtype.itemsize == 0
        assert offset % self.dtype.itemsize == 0

    @staticmethod
    def of_npy(file: RemoteFile) -> RemoteArray:
        """The array that `ArrayWriter` wrote."""
        return RemoteArray(file, np.dtype("<i8"), offset=NPY_HEADER_BYTES)

    ndim = 1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._gathered(np.arange(*index.indices(len(self))))
        if isinstance(index, int | np.integer):
            return self._gathered(np.asarray([index]))[0]
        positions = np.asarray(index)
        if positions.dtype == np.bool_:
            positions = np.flatnonzero(positions)
        return self._gathered(positions)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        del copy
        return self[:] if dtype is None else self[:].astype(dtype)

    def _gathered(self, positions: NDArray[Any]) -> NDArray[Any]:
        count = len(self)
        flat = np.where(positions < 0, positions + count, positions).ravel().astype(np.int64)
        if len(flat) and (flat.min() < 0 or flat.max() >= count):
            raise IndexError(f"a position is not in 0..{count - 1}.")
        places = self._offset + flat * self.dtype.itemsize
        numbers, of_block = np.unique(places // BLOCK, return_inverse=True)
        found = self.file.blocks(numbers.tolist())
        data = np.zeros((len(numbers), BLOCK), np.uint8)
        for row, number in zip(data, numbers.tolist(), strict=True):
            row[: len(found[number])] = np.frombuffer(found[number], np.uint8)
        in_block = BLOCK // self.dtype.itemsize
        picked = of_block * in_block + places % BLOCK // self.dtype.itemsize
        return data.reshape(-1).view(self.dtype)[picked].reshape(positions.shape)


class LazyColumn:
    """A column of an Arrow file of the store, fetched when something is asked of it."""

    def __init__(self, home: Path, url: str, name: str, read: Any) -> None:
        self._load = functools.cache(lambda: read(fetched(home, url, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)

    def __getitem__(self, index: Any) -> Any:
        return self._load()[index]

    def __len__(self) -> int:
        return len(self._load())

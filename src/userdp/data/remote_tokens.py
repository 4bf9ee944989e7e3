"""The cache of tokens of a store in object storage: whose rows are whose is here, tokens are there.

A cache holds `blocks.json`, the SHA-256 of every block of its large files, and `digests.json`,
that of every file. The home of a store fetches all but the large files, and checks them. Of the
large files it fetches the blocks that hold the rows it reads, and checks each.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from userdp.data.remote import BLOCK, RemoteArray, RemoteFile, fetched, file_system
from userdp.errors import InputError
from userdp.files.durable import OWNER_ONLY_DIRECTORY

BLOCKS = "blocks.json"
DIGESTS = "digests.json"
# The files that may be large: numbers of one kind, without a header.
LARGE = {"tokens.i32": np.int32, "labelled.u8": np.bool_}


def write_blocks(cache: Path) -> None:
    """Write down the digest of every block of the large files."""
    found: dict[str, list[str]] = {}
    for name in LARGE:
        if (cache / name).is_file():
            with (cache / name).open("rb") as file:
                blocks = iter(lambda file=file: file.read(BLOCK), b"")
                found[name] = [hashlib.sha256(block).hexdigest() for block in blocks]
    (cache / BLOCKS).write_text(json.dumps({"block": BLOCK, "sha256": found}))


def adopt(cache: Path, home: Path, url: str) -> bool:
    """Fetch a cache's small files from the store; False if the store has no such cache."""
    storage, place = file_system(url)
    where = cache.relative_to(home).as_posix()
    if not storage.isfile(f"{place}/{where}/{DIGESTS}"):
        return False
    partial = cache.with_name(f".{cache.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True)
    written = json.loads(fetched(partial, f"{url}/{where}", DIGESTS).read_text())
    if BLOCKS not in written:
        raise InputError(
            f"{url}/{where}: an older version wrote this cache of tokens, without digests of its "
            "blocks. Delete it there; it is made again."
        )
    for name, digest in written.items():
        if name not in LARGE:
            fetched(partial, f"{url}/{where}", name, sha256=digest)
    os.replace(partial, cache)
    return True


def numbers(cache: Path, name: str, home: Path, url: str | None) -> Any:
    """One of the large files as an array: of the cache itself, or of the store's in storage."""
    if url is None or (cache / name).is_file():
        return np.memmap(cache / name, LARGE[name], mode="r")
    told = json.loads((cache / BLOCKS).read_text())
    if told["block"] != BLOCK:
        raise InputError(f"{cache / BLOCKS}: blocks of {told['block']} bytes, not {BLOCK}.")
    where = cache.relative_to(home).as_posix()
    file = RemoteFile(f"{url}/{where}/{name}", digests=told["sha256"][name])
    return RemoteArray(file, LARGE[name])

"""Which code is followed to say what a run is bound to, and what the other code counts by.

Code of one's own is followed. The standard library and the packages whose versions a run is bound
to count by their names, and large installed packages by all of their source.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

# Other packages whose code decides what a model computes.
COMPARED = ("torch", "transformers", "peft", "tokenizers")
# Following the code of an installed package with more files would take seconds.
FEW_FILES = 100


@functools.cache
def is_known(name: str) -> bool:
    """Whether a module's code is in the version that a run is bound to, or is Python's own."""
    top = name.partition(".")[0]
    return top in (*COMPARED, __name__.partition(".")[0]) or _is_of_python(top)


@functools.cache
def _is_of_python(top: str) -> bool:
    """Whether a module is of the standard library."""
    if top not in sys.stdlib_module_names:
        return False
    # A caller's file may have the name of a module of Python.
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or Path(file).is_relative_to(Path(os.__file__).parent)


@functools.cache
def is_installed(name: str) -> bool:
    """Whether a module is Python's, this package's, or lies where packages are installed."""
    file = str(getattr(sys.modules.get(name.partition(".")[0]), "__file__", None))
    return is_known(name) or bool({"site-packages", "dist-packages"} & {*Path(file).parts})


def bound_by(name: str) -> str | None:
    """What a module's code counts by, if it is not followed: nothing more than its name, or source.

    None if it is followed.
    """
    if is_known(name):
        return ""
    return _large_package(name.partition(".")[0]) if is_installed(name) else None


@functools.cache
def _large_package(top: str) -> str | None:
    """A digest of an installed package's source; None if it has few files."""
    files = files_of(top)
    return source_of(files) if len(files) > FEW_FILES else None


def files_of(top: str) -> list[tuple[Path, Path]]:
    """The source of a package or a module: folders, and the files in them."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return []
    roots = [Path(root) for root in sorted(spec.submodule_search_locations or ())]
    if not roots and spec.origin and Path(spec.origin).is_file():
        return [(Path(spec.origin).parent, Path(spec.origin))]
    return [(root, path) for root in roots for path in sorted(root.rglob("*.py"))]


def source_of(files: Iterable[tuple[Path, Path]]) -> str:
    """A digest of files and of their places in their folders."""
    hashed = hashlib.sha256()
    for root, path in files:
        content = path.read_bytes()
        hashed.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return hashed.hexdigest()

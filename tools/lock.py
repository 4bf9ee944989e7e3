"""Write constraints-hashes.txt: every pinned version with the hashes of the files it may come from.

    python tools/lock.py --index URL

URL is a package index that lists files with their SHA-256 (PEP 503). Nothing of it is written. Only
wheels for the Pythons and machines that we support are listed, since building from source runs code
of the package; where a version has no such wheel, its source archive is.
"""

from __future__ import annotations

import argparse
import re
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINNED = ROOT / "constraints.txt"
LOCKED = ROOT / "constraints-hashes.txt"

HEADER = """\
# Made by tools/lock.py from constraints.txt. Install what is pinned, and nothing that differs:
#   pip install --require-hashes --no-deps -r constraints-hashes.txt
"""

LINK = re.compile(r'<a\s[^>]*href="[^"#]*#sha256=([0-9a-f]{64})"[^>]*>\s*([^<\s]+)\s*</a>')
# name-version(-build)?-python-abi-platform.whl
WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-(?P<tag>[^-]+-[^-]+-[^-]+)\.whl")
PYTHON = re.compile(r"(py3|py2\.py3|cp311-cp311|cp312-cp312|cp313-cp313|cp3\d+-abi3|cp3\d+-none)-")
MACHINE = re.compile(r"-any$|manylinux.*_(x86_64|aarch64)|macosx.*_(arm64|universal2)|win_amd64")


def pinned() -> dict[str, str]:
    """Name and version of every line of constraints.txt."""
    lines = (line.partition("#")[0].strip() for line in PINNED.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def normalised(name: str) -> str:
    """The name as indexes spell it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def hashes(page: str, name: str, version: str) -> list[str]:
    """The hashes of the files that `name==version` may be installed from, in order."""
    wheels, sources = set[str](), set[str]()
    for digest, file in LINK.findall(page):
        wheel = WHEEL.fullmatch(file)
        if wheel is not None:
            fits = PYTHON.match(wheel["tag"]) and MACHINE.search(wheel["tag"])
            if fits and (normalised(wheel["name"]), wheel["version"]) == (name, version):
                wheels.add(digest)
        elif file.endswith(".tar.gz"):
            stem, _, found = file.removesuffix(".tar.gz").rpartition("-")
            if (normalised(stem), found) == (name, version):
                sources.add(digest)
    return sorted(wheels or sources)


def main() -> None:
    """Ask the index for every pinned package, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", required=True, help="Address of a package index (PEP 503).")
    index = parser.parse_args().index.rstrip("/")
    text = HEADER
    for name, version in pinned().items():
        with urllib.request.urlopen(f"{index}/{normalised(name)}/", timeout=60) as answer:
            found = hashes(answer.read().decode(), normalised(name), version)
        if not found:
            sys.exit(f"error: the index has no file for {name}=={version}.")
        text += " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{h}" for h in found)])
        text += "\n"
    LOCKED.write_text(text)


if __name__ == "__main__":
    main()

"""Write sbom.json: what userdp is made of, as CycloneDX 1.6, from the pinned versions.

    python tools/sbom.py

It holds no time and no number of its own, so the same pins give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "sbom.json"


def normalised(name: str) -> str:
    """The name as package URLs spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Every pinned version: torch, which the Makefile pins, and the lines of constraints.txt."""
    torch = re.search(r"^TORCH\s*\?=\s*(torch==\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch is not None
    lines = [torch[1], *(ROOT / "constraints.txt").read_text().splitlines()]
    found = (line.partition("#")[0].strip() for line in lines)
    return {normalised(name): version for name, version in (e.split("==") for e in found if e)}


def component(name: str, version: str, kind: str = "library") -> dict[str, Any]:
    """One entry of the list."""
    address = f"pkg:pypi/{name}@{version}"
    return {"type": kind, "bom-ref": address, "name": name, "version": version, "purl": address}


def sbom() -> dict[str, Any]:
    """The whole list, sorted by name, and what userdp itself asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = component(project["name"], project["version"], "application")
    parts = {name: component(name, version) for name, version in sorted(pins().items())}
    asked = [normalised(re.split(r"[\[<>=;, ]", need)[0]) for need in project["dependencies"]]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": ours | {"licenses": [{"license": {"id": project["license"]}}]}},
        "components": list(parts.values()),
        "dependencies": [
            {
                "ref": ours["bom-ref"],
                "dependsOn": sorted(parts[name]["bom-ref"] for name in asked),
            }
        ],
    }


def text() -> str:
    """The file's content."""
    return json.dumps(sbom(), indent=1) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PLACE.write_text(text())

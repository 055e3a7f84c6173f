"""Tests of other modules, taken as they are, to be run once more where something else differs."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from types import ModuleType
from typing import Any


def taken(module: ModuleType, left_out: Collection[str] = ()) -> dict[str, Any]:
    """A module's own tests, under names that tell where they are from, and its fixtures; ``left_out`` by name."""
    mark = module.__name__.rpartition(".")[2].removeprefix("test_")
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in left_out or (getattr(value, "__module__", None) != module.__name__ and not _is_fixture(value)):
            continue
        if _is_fixture(value):
            found[name] = value
        elif name.startswith("test_") and inspect.isfunction(value):
            found[f"{name}_in_{mark}"] = value
        elif name.startswith("Test") and inspect.isclass(value):
            unwanted = {one.partition(".")[2]: None for one in left_out if one.startswith(f"{name}.")}
            found[f"{name}In{mark.title()}"] = type(name, (value,), unwanted)
    return found


def _is_fixture(value: Any) -> bool:
    return type(value).__name__ == "FixtureFunctionDefinition" or hasattr(value, "_pytestfixturefunction")

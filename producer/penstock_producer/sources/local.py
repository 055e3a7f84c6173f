"""Objects of this process that have no import name, for workers forked from it: a notebook's dataset and transform.

A token is JSON; the object reaches a worker because the fork copied this module with it.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

from penstock_common.errors import SourceError
from penstock_producer.sources.keras import is_keras

_PREFIX = "local-"
_OBJECTS: dict[str, Any] = {}
"""Token -> object. Entries live until forgotten; workers forked later have all of them."""


def register(value: Any) -> str:
    """Keep an object under a new token. Register before the workers are forked."""
    token = _PREFIX + secrets.token_hex(6)
    _OBJECTS[token] = value
    return token


def lookup(token: str) -> Any:
    """The object of a token; raises SourceError in a process that was not forked from its owner."""
    if token not in _OBJECTS:
        raise SourceError(
            f"object {token!r} is not in this process: only workers forked after it was registered have it; "
            "put it into a module and use its import name for other workers"
        )
    return _OBJECTS[token]


def forget(token: str) -> None:
    """Drop an object; an unknown token is no error."""
    _OBJECTS.pop(token, None)


def is_token(name: str) -> bool:
    """Whether a name is a token rather than an import name."""
    return name.startswith(_PREFIX)


def is_torch(value: Any) -> bool:
    """Whether an object is torch's Dataset or DataLoader, told by its classes' names."""
    kinds = type(value).__mro__
    return any(k.__module__.startswith("torch.utils.data.") and k.__name__ in ("Dataset", "DataLoader") for k in kinds)


def reads_as(value: Any) -> Literal["dataset", "keras", "generator"]:
    """How an object is read when its owner does not say: Keras by its classes, items by index, or else by iterating."""
    if is_keras(value):
        return "keras"
    if hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__"):
        return "dataset"
    if hasattr(type(value), "__iter__") or callable(value):
        return "generator"
    raise SourceError(
        f"a {type(value).__name__} cannot be read; expected items by index (len and []), a Keras PyDataset, "
        "an iterable, or a function giving one"
    )

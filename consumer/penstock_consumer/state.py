"""What `Loader.state_dict` returns, and whether a state belongs to a loader. Values only: no Redis, no clock.

A state is JSON: it is saved in other people's checkpoints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from penstock_common.errors import StateMismatch
from penstock_common.wire.spec import Spec

VERSION = 1

State = dict[str, Any]


def spec_digest(spec: Spec) -> str:
    """A name for a spec: equal specs have equal ones."""
    return hashlib.sha256(json.dumps(spec.as_json()).encode()).hexdigest()[:16]


def check_state(state: object, own: Mapping[str, Any]) -> None:
    """Raises StateMismatch unless ``state`` is of the same stream, spec, group, way of reading and batch size.

    ``own`` is what the loader itself would return.
    """
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        found = state.get("version") if isinstance(state, Mapping) else None
        raise StateMismatch("version", found, VERSION, _HINTS["version"])
    for what, hint in _HINTS.items():
        if what in own and state.get(what) != own[what]:
            raise StateMismatch(what, state.get(what), own[what], hint)
    if own["kind"] == "ordered":
        _check_position(state, own["batch_size"])


def _check_position(state: Mapping[str, Any], batch_size: int) -> None:
    for what, unit in {"epoch": 1, "position": batch_size}.items():
        found = state.get(what)
        if type(found) is not int or found < 0 or found % unit:
            raise StateMismatch(what, found, "an epoch" if unit == 1 else f"batches of {unit}", _HINTS["version"])


_HINTS = {
    "version": "pass what state_dict() returned, as it was",
    "stream": "load it into a Loader of that stream",
    "stream_id": "the stream was deleted and made again since: begin without this state",
    "spec": "the stream's tensors differ from those the state was taken with",
    "group": "a group's place is its own: use the same group, or begin without this state",
    "kind": "give the Loader the order= it had",
    "loader": "numbers of batches are of one process: take a state of this loader before its checkpoint is saved",
    "batch_size": "positions are counted in batches: give the Loader the batch_size it had",
}
"""In the order in which they are compared: the first that differs explains the others."""

"""Arguments of the previous version: each still works, says what to write now, and means the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock_common.tuning import FIELDS

SPEC = {"x": ("uint8", (4,))}


def test_old_arguments_of_a_loader_mean_what_they_meant(url: str) -> None:
    """A training that was written for the last version still runs, and its author reads what to change."""
    loader: Any = penstock.Loader
    with penstock.Writer("train", url=url, spec=SPEC) as writer, writer.epoch() as epoch:
        for _ in range(20):
            epoch.write({"x": [1, 2, 3, 4]})
    with (
        pytest.warns(DeprecationWarning, match=r"Loader\(lease_s=..., timeout_s=...\)|tuning=penstock.Tuning\("),
        loader("train", group="a", batch_size=8, url=url, timeout_s=7, lease_s=3) as old,
    ):
        assert (old._options.timeout_s, old._options.lease_s) == (7, 3)
    with (
        pytest.warns(
            DeprecationWarning, match=r"is now Loader\(order=penstock.Canonical\(rank=..., world_size=...\)\)"
        ),
        loader("train", group="b", batch_size=8, url=url, order="canonical", rank=1, world_size=2) as ranked,
    ):
        assert (ranked.member, len(ranked)) == ("rank-1", 2)
    with (
        pytest.warns(DeprecationWarning, match="remainder"),
        loader("train", group="c", batch_size=8, url=url, order="canonical", remainder="drop") as dropping,
    ):
        assert sum(batch.size for batch in dropping) == 16
    with penstock.Loader("train", group="d", batch_size=8, url=url, order=penstock.Canonical(drop_last=True)) as now:
        assert sum(batch.size for batch in now) == 16


CALLS: dict[str, Callable[..., Any]] = {
    "Loader": lambda **how: penstock.Loader("train", group="g", batch_size=8, url="redis://127.0.0.1:1", **how),
    "Replay": lambda **how: penstock.Replay("train", epoch=0, batch_size=8, url="redis://127.0.0.1:1", **how),
    "Files": lambda **how: penstock.Files("nowhere", batch_size=8, **how),
    "Writer": lambda **how: penstock.Writer("train", url="redis://127.0.0.1:1", **how),
    "produce": lambda **how: penstock.produce([1], url="redis://127.0.0.1:1", **how),
}


@pytest.mark.parametrize(("call", "field"), [(call, field) for call, taken in FIELDS.items() for field in taken])
def test_each_old_argument_is_warned_of(call: str, field: str) -> None:
    """The warning comes before any request to a server."""
    with (
        pytest.warns(DeprecationWarning, match=rf"{call}\({field}=...\) is now"),
        pytest.raises(Exception, match=r"\w"),
    ):
        CALLS[call](**{field: object()})


@pytest.mark.parametrize("call", FIELDS)
def test_a_call_has_nine_arguments_at_most(call: str) -> None:
    """A user reads the whole signature in an editor's tooltip. What most leave as it is belongs to the tuning."""
    assert len(inspect.signature(getattr(penstock, call)).parameters) <= 9


@pytest.mark.parametrize("call", FIELDS)
def test_a_tuning_that_a_call_does_not_take_is_refused(call: str) -> None:
    """A block size that a Loader silently accepted would change nothing."""
    tuning: Any = penstock.Tuning
    foreign = next(field for taken in FIELDS.values() for field in taken if field not in FIELDS[call])
    with pytest.raises(TypeError, match=rf"{call}\(\) takes no tuning '{foreign}'; it takes {FIELDS[call][0]}, "):
        CALLS[call](tuning=tuning(**{foreign: 1}))
    with pytest.raises(TypeError, match=r"expected penstock\.Tuning\("):
        CALLS[call](tuning={"notify": print})


def test_a_misspelt_tuning_is_meant() -> None:
    """A user who half remembers the old form learns the new one."""
    with pytest.raises(TypeError, match=r"did you mean tuning=penstock\.Tuning\(prefetch_bytes=\.\.\.\)"):
        CALLS["Loader"](prefetch_byte=1)

"""Ctrl-C at any moment of a request for a batch, as in a notebook: the next loop gets what the first did not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock_consumer.read.loader import Loader
from tests.contracts.feed import loader_of, produce
from tests.interruption import Interruption

COUNT, BLOCK, BATCH = 40, 4, 5
TRIED = 24
"""The moments that are tried, of the some hundreds that a request has."""
BEFORE = 2
"""The batches before the request that is interrupted."""


def read(source: Any, found: list[int], interruption: Interruption, train: Callable[[Any], object]) -> None:
    """Read an epoch. The request after the first batches is interrupted."""
    batches = iter(source)
    for _ in range(BEFORE):
        train(batch := next(batches))
        found += batch["y"].tolist()
    batch = interruption.of(next, batches, None)
    while batch is not None:
        train(batch)
        found += batch["y"].tolist()
        batch = next(batches, None)


SOURCES: dict[str, tuple[dict[str, Any], Callable[[Loader], Any]]] = {
    "shared": ({}, lambda loader: loader),
    "ranks": ({"order": penstock.Canonical()}, lambda loader: loader),
    "checkpoints": ({"acknowledge": "on_checkpoint"}, lambda loader: loader),
    "manual": ({"acknowledge": "manual"}, lambda loader: loader),
    "filter": ({}, lambda loader: loader.filter(lambda batch: batch["y"] >= 0)),
    "mixture": ({}, lambda loader: penstock.mix({"a": (loader, 1)})),
    "mixture by hand": ({"acknowledge": "manual"}, lambda loader: penstock.mix({"a": (loader, 1)})),
    "mixed view": (
        {},
        lambda loader: penstock.mix({"a": (loader, 1)}).view().map(lambda batch: {**batch, "z": batch["y"] * 2}),
    ),
    "view": ({}, lambda loader: loader.view().map(lambda batch: {**batch, "z": batch["y"] * 2})),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_an_interrupted_request_loses_no_batch(any_url: str, kind: str) -> None:
    """The batch was taken out of the queue, and perhaps counted as delivered, but the loop never had it."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    options, of = SOURCES[kind]

    def tried(interruption: Interruption, group: str) -> list[int]:
        found: list[int] = []
        with loader_of(any_url, group=group, batch_size=BATCH, **options) as loader:
            source = of(loader)
            train = loader.acknowledge if "acknowledge" in options and kind != "checkpoints" else (lambda batch: None)
            try:
                read(source, found, interruption, train)
            except KeyboardInterrupt:
                for batch in source:
                    train(batch)
                    found += batch["y"].tolist()
            if kind == "checkpoints":
                loader.checkpointed()
        return found

    whole = Interruption()
    assert sorted(tried(whole, "whole")) == list(range(COUNT))
    assert whole.calls > TRIED
    for number in range(TRIED):
        after = 1 + number * whole.calls // TRIED
        found = tried(Interruption(after), f"g{number}")
        assert set(found) == {*range(COUNT)}, after
        assert len(found) <= COUNT + BATCH, after  # at most the batch in hand comes again

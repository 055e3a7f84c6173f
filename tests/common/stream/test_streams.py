"""Streams and epochs are made by the first producer that comes, and are the same for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock_common.errors import BadOption, BadSpec, StreamConflict
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import load_manifest, open_epoch, retained_epochs
from penstock_common.stream.streams import DEFAULT_BUDGET_BYTES, create_stream, find_stream, load_stream
from penstock_common.wire.compression import Compression
from penstock_common.wire.spec import Spec

AT_ONCE = 8


@pytest.fixture
def clients(any_url: str) -> Iterator[list[Client]]:
    """Yield one client for each producer."""
    made = [connect(any_url) for _ in range(AT_ONCE)]
    yield made
    for client in made:
        client.close()


def test_producers_that_start_at_the_same_moment_make_one_stream_and_one_epoch(clients: list[Client]) -> None:
    """Eight workers of one job all open what they write to, and none may see a half-made stream or manifest."""
    spec = Spec.of({"x": ("uint8", (4,))})
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for turn in range(10):
            name = f"train-{turn}"
            streams = list(pool.map(lambda client, name=name: create_stream(client, name, spec=spec), clients))
            assert len({(stream.id, stream.partitions) for stream in streams}) == 1
            opened = list(pool.map(lambda client, s=streams[0]: open_epoch(client, s, 0, sizes=(3, 4)), clients))
            assert len({manifest.id for manifest in opened}) == 1
            assert retained_epochs(clients[0], streams[0]) == {0: "sized"}
            assert load_manifest(clients[0], streams[0], 0).sizes == (3, 4)


@pytest.mark.parametrize(
    ("payload", "budget_bytes", "block_bytes"),
    [
        ("inline", 1 << 30, 1_000_000),
        ("segments:/tmp/s", 1 << 30, 8_000_000),
        ("segments:/tmp/s", 256 << 20, 8_000_000),
        ("segments:/tmp/s", 64 << 20, (64 << 20) // 32),
        ("segments:/tmp/s", 16 << 20, 1_000_000),
    ],
)
def test_blocks_are_larger_where_no_server_has_to_hold_them(
    any_client: Client, payload: str, budget_bytes: int, block_bytes: int
) -> None:
    """A commit costs the same for any block, but a budget must hold many blocks, or the end of each segment is lost."""
    stream = create_stream(any_client, "t", payload=payload, budget_bytes=budget_bytes)
    assert stream.block_bytes == block_bytes


def test_a_changed_budget_is_told_once(any_client: Client) -> None:
    """A script that tries a small budget changes it for every later writer of the stream."""
    told: list[str] = []
    for budget_bytes in (5_000_000, None, 1 << 20, 1 << 20):
        create_stream(any_client, "bud", budget_bytes=budget_bytes, notify=told.append)
    assert told == ["the budget of stream 'bud' is 1.0 MiB from now on; it was 4.8 MiB"]


def test_a_refusal_changes_nothing_of_an_existing_stream(any_client: Client) -> None:
    """A stream that was tried with a wrong spec had another budget from then on."""
    spec, told = Spec.of({"x": ("uint8", ())}), list[str]()
    create_stream(any_client, "kept", spec=spec, budget_bytes=5_000_000)
    before = find_stream(any_client, "kept")
    change: dict[str, Any] = {"budget_bytes": 1 << 20, "retention": "epochs:3", "notify": told.append}
    with pytest.raises(StreamConflict, match="holds samples of another spec"):
        create_stream(any_client, "kept", spec=Spec.of({"z": ("uint8", ())}), **change)
    with pytest.raises(BadSpec, match="compression names the tensor 'q'; the spec has x"):
        create_stream(any_client, "kept", compression=Compression.parse("q=zstd"), **change)
    assert (find_stream(any_client, "kept"), told) == (before, [])


def test_a_budget_that_holds_no_sample_is_refused_and_changes_nothing(any_client: Client) -> None:
    """Such a budget let every later writer of the stream fail at its first sample."""
    with pytest.raises(BadOption, match=r"budget_bytes \(--budget\) is 10 bytes.*give 512 or more"):
        create_stream(any_client, "new", budget_bytes=10, partitions=2)
    assert find_stream(any_client, "new") is None
    create_stream(any_client, "bud", spec=Spec.of({"x": ("uint8", (1000,))}))
    with pytest.raises(BadOption, match="give 4,000 or more"):
        create_stream(any_client, "bud", budget_bytes=3999)
    assert load_stream(any_client, "bud").budget_bytes == DEFAULT_BUDGET_BYTES

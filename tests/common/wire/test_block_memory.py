"""Memory of blocks: later blocks use it again, and two never use it at once."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from penstock_common.wire import block as blocks
from penstock_common.wire.block import BlockBuilder, MapPool
from penstock_common.wire.spec import Spec

PAGE = 4096


def array(of: MapPool, nbytes: int) -> NDArray[np.uint8]:
    """Return an array over all of a map."""
    return np.frombuffer(of.take(nbytes), dtype=np.uint8)


def address(values: NDArray[np.uint8]) -> int:
    """Return the address of the first byte."""
    return values.ctypes.data


def test_what_nobody_refers_to_any_more_is_used_again() -> None:
    """The first use of a page costs as much as copying it twice."""
    maps = MapPool()
    first = array(maps, PAGE)
    place = address(first)
    del first
    assert address(array(maps, PAGE)) == place


def test_memory_of_which_a_single_view_is_left_is_nobody_elses() -> None:
    """A block on its way to the server is a few views of it."""
    maps = MapPool()
    view = array(maps, PAGE)[100:200]
    place = address(view) - 100
    assert address(array(maps, PAGE)) != place
    del view
    assert address(array(maps, PAGE)) == place


def test_no_more_is_kept_than_is_allowed() -> None:
    """Streams of other specs come and go in a worker's life."""
    maps = MapPool(kept_bytes=8 * PAGE)
    for size in range(1, 30):
        array(maps, size * PAGE)
        assert maps.kept_bytes <= max(8, 2 * size) * PAGE
    array(maps, PAGE)
    assert maps.kept_bytes <= 8 * PAGE


def test_large_blocks_are_gathered_in_two_places_by_turns() -> None:
    """One is sent while the next is gathered. In fresh memory a block of 10 MB cost twice as much."""
    maps = MapPool(kept_bytes=PAGE)
    sent, gathered = array(maps, 4 * PAGE), array(maps, 4 * PAGE)
    sent[0], gathered[0] = 1, 2
    for number in range(4):
        sent, gathered = gathered, sent[:0].copy()
        gathered = array(maps, 4 * PAGE)
        assert gathered[0] == 1 + number % 2, "fresh memory is zero"


def test_two_threads_never_gather_in_the_same_memory() -> None:
    """Several threads write shards at once."""
    maps, wrong = MapPool(), []
    start = threading.Barrier(4)

    def gather(number: int) -> None:
        start.wait()
        for _ in range(5000):
            mine = array(maps, PAGE)
            mine[:] = number
            if mine.min() != number or mine.max() != number:
                wrong.append(number)

    threads = [threading.Thread(target=gather, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_small_shards_one_after_the_other_are_gathered_in_the_same_memory() -> None:
    """Otherwise a thousand shards of a few samples each would cost a thousand times the same page faults."""
    spec = Spec.of({"x": ("uint8", (1000,))})

    def shard() -> None:
        builder = BlockBuilder(spec, 1_000_000, 65536)
        for number in range(300):
            builder.add({"x": np.full(1000, number % 200, np.uint8)})
        block = builder.finish(0)
        assert block.columns[0].values[:, 0].tolist() == [number % 200 for number in range(300)]

    shard()
    kept = blocks.BLOCKS.kept_bytes
    for _ in range(100):
        shard()
    assert blocks.BLOCKS.kept_bytes == kept

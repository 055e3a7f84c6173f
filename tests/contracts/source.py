"""The promises of any indexed source of samples or batches. A subclass provides `source`, opened over real input."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from penstock_common.wire.spec import Spec
from penstock_producer.sources.config import SourceConfig, parse_config
from penstock_producer.sources.open import open_source
from penstock_producer.sources.protocol import BatchSource, Source
from penstock_producer.sources.seeding import sample_rng
from tests.contracts.processes import within

Sample = dict[str, Any]
FORK_S = 30
"""The time limit of a forked process."""


def read(source: Source | BatchSource, index: int) -> Sample:
    """Read one item with the generator of a job."""
    return dict(source.read(index, sample_rng(1, 0, 0, index)))


def digest(sample: Sample) -> str:
    """Return a digest of the names, dtypes, shapes and bytes of a sample."""
    parts = []
    for name, value in sample.items():
        array = np.frombuffer(value, "u1") if isinstance(value, (bytes, bytearray)) else np.asarray(value)
        parts.append(f"{name} {array.dtype} {array.shape} {array.tobytes().hex()}")
    return "|".join(parts)


def in_fork(work: Callable[[], str]) -> str:
    """Return the result of ``work`` in a forked process, or its exception's text if it fails."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        with os.fdopen(writer, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(writer)
    try:
        with within(FORK_S), os.fdopen(reader) as pipe:
            return pipe.read()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class SourceContract:
    """The promises of every `Source` and `BatchSource`."""

    def test_an_index_gives_the_same_item_in_any_order(self, source: Source | BatchSource) -> None:
        """Retried and repaired shards must hold the same samples as the first try."""
        forward = [digest(read(source, index)) for index in range(len(source))]
        backward = [digest(read(source, index)) for index in reversed(range(len(source)))]
        assert source.repeatable
        assert forward == backward[::-1]

    def test_what_it_gives_may_be_changed_in_place(self, source: Source | BatchSource) -> None:
        """Augmentations work in place, and the next epoch must not see their changes."""
        first = read(source, 0)
        before = digest(first)
        for value in first.values():
            if isinstance(value, np.ndarray) and value.ndim:
                value[...] = 1 - value
        assert digest(read(source, 0)) == before

    def test_every_item_fits_the_spec(self, source: Source | BatchSource) -> None:
        """A declared spec that its own samples break would stop the epoch at the first of them."""
        items = [read(source, index) for index in range(len(source))]
        if source.unit == "batch":
            sizes = [source.size(index) for index in range(len(source))]
            assert [{len(tensor) for tensor in item.values()} for item in items] == [{size} for size in sizes]
            items = [{name: tensor[row] for name, tensor in item.items()} for item in items for row in (0, -1)]
        spec = Spec.of(source.spec) if source.spec else Spec.infer(items[0])
        for item in items:
            spec.check_names(item)
            for tensor in spec:
                tensor.canonical(item[tensor.name])

    def test_opening_it_again_changes_nothing(self, source: Source | BatchSource, config: SourceConfig) -> None:
        """Jobs carry the config as JSON, and refuse to continue with another source."""
        carried = parse_config(json.loads(config.model_dump_json()))
        again = open_source(carried)
        assert again.unit != "item"
        assert again.fingerprint == source.fingerprint
        assert re.fullmatch("[0-9a-f]{16}", again.fingerprint)
        assert (len(again), again.info, again.spec) == (len(source), source.info, source.spec)
        assert digest(read(again, 0)) == digest(read(source, 0))
        again.close()

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_parent_and_forked_processes_read_at_once(self, source: Source | BatchSource) -> None:
        """Workers are forked from a process that has the source open; a shared file position would mix their reads."""
        expected = [digest(read(source, index)) for index in range(len(source))]

        def work() -> str:
            return "\n".join(digest(read(source, index)) for index in list(range(len(source))) * 5)

        with ThreadPoolExecutor(1) as mine:
            going = mine.submit(work)
            forked = in_fork(work)
            assert forked.split("\n") == going.result().split("\n") == expected * 5

    def test_threads_read_at_once(self, source: Source | BatchSource) -> None:
        """A worker may decode in threads."""
        indices = list(range(len(source))) * 5
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda index: digest(read(source, index)), indices))
        assert found == [digest(read(source, index)) for index in indices]

    def test_its_words_can_be_stored(self, source: Source | BatchSource) -> None:
        """Info goes into the stream's meta as JSON, and keys into reports of bad samples."""
        assert json.loads(json.dumps(source.info)) == source.info
        keys = [source.key(index) for index in range(len(source))]
        assert len(set(keys)) == len(keys)
        assert all(key.encode() for key in keys)

"""The contracts of writers, readers and adapters once more, on streams with payloads in segments: the same promises.

Tests are taken from their modules as they are; only where a new stream keeps its payloads differs.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock_common.stream import streams
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_producer.write import writer as writing
from tests.consumer import test_committed, test_ordered, test_replay, test_restart, test_state
from tests.consumer.adapters import test_jax, test_keras_checkpoint, test_tensorflow, test_torch
from tests.planes.taking import taken
from tests.producer import test_commit, test_retention

CONTRACTS: tuple[ModuleType, ...] = (
    test_commit, test_committed, test_ordered, test_replay, test_restart, test_state, test_retention, test_torch,
    test_jax, test_tensorflow, test_keras_checkpoint,
)  # fmt: skip
LEFT_OUT = {
    "TestSteps.test_a_bad_entry_is_filled_alike_for_every_rank",  # damages a payload in the entry
    "TestDataLoader",  # worker processes: slow, and nothing of them knows of payloads
    "test_a_replay_goes_on_beside_production", "test_a_replay_keeps_its_epoch",  # slow
    "TestTorch.test_what_a_killed_trainer_had_not_trained_on_is_handed_out_again",  # slow; the chaos suite kills
    "test_a_killed_fit_is_given_again_exactly_what_it_trained_on_since_its_last_checkpoint",
    "TestJax.test_what_a_killed_trainer_had_not_trained_on_is_handed_out_again",
    "TestTensorFlow.test_what_a_killed_trainer_had_not_trained_on_is_handed_out_again",
    "test_several_devices_are_fed_by_the_loop_of_the_page_and_refused_elsewhere",  # slow, and of devices alone
    "test_batches_are_cut_for_several_devices_and_the_last_is_made_whole",
    "test_processes_give_their_parts_of_one_global_array",  # slow
    "test_a_step_that_still_computes_reads_its_own_batch",  # slow
    "TestWaits.test_a_step_is_handed_out_as_soon_as_it_is_committed",  # slow, and of waiting alone
    "test_a_connection_that_was_closed_while_it_was_idle_is_no_outage",  # nothing of it knows of payloads
    "test_only_a_server_that_gives_memory_back_is_freed_entry_by_entry",  # of payloads in a server's memory
    "test_a_stock_server_uses_freed_memory_again",
    "test_a_writer_killed_in_its_shard_is_gone_on_from",  # slow; test_segments_crashes kills writers
}  # fmt: skip


@pytest.fixture
def server(any_server: EmbeddedServer) -> EmbeddedServer:
    """One version is enough: what differs between planes is not the server's."""
    return any_server


@pytest.fixture(autouse=True)
def on_segments(monkeypatch: pytest.MonkeyPatch, memory_path: Path) -> None:
    """Streams that are made without a word about payloads get them in segments."""
    real = streams.create_stream

    def create(*args: Any, payload: str | None = None, **settings: Any) -> Any:
        return real(*args, payload=payload or f"segments:{memory_path / 'segments'}", **settings)

    monkeypatch.setattr(writing, "create_stream", create)


for _module in CONTRACTS:
    _taken = taken(_module, LEFT_OUT)
    assert not _taken.keys() & globals().keys(), "two contracts have a fixture of one name"
    globals().update(_taken)


def test_these_contracts_are_run_on_segments(any_url: str, memory_path: Path) -> None:
    """A rename must not make this file run nothing, or on entries after all."""
    for module in CONTRACTS:
        assert taken(module, LEFT_OUT), module.__name__
    with writing.Writer("t", url=any_url, spec={"x": ("int64", ())}) as writer:
        assert writer.stream.payload == f"segments:{memory_path / 'segments'}"

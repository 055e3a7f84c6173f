"""A production and a server that lost a part of what it had made: the source is there, so the shard is made again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock_common.errors import EpochAbandoned, EpochFailed
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.manifest import load_manifest, open_epoch, retained_epochs, size_epoch
from penstock_common.stream.removal.deletion import release_epoch
from penstock_producer.jobs import production as jobs_production
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.progress import ProductionProgress
from penstock_producer.jobs.task import ShardTask
from penstock_producer.jobs.task_runner import JobReport, ShardLost, TaskRunner
from penstock_producer.sources.config import GeneratorConfig, SourceConfig
from tests.contracts.feed import open_stream, replayed
from tests.contracts.ordered import planned_writer, write_shard
from tests.producer.made import SAMPLES
from tests.producer.test_jobs import dataset, numbers_in, options_of
from tests.torn_slots import SlotState, partition_slot, stream_slot


def plan_of(**settings: Any) -> ProductionPlan:
    """Return a plan of small shards in two partitions."""
    return ProductionPlan(stream="train", source=dataset("slowly"), partitions=2, shard_samples=5, **settings)


def half_made(client: Any, look: ProductionProgress) -> SlotState | None:
    """Return partition 1 as it is while epoch 0 is being made, or None before and after that."""
    states = {seen.epoch: (seen.state, seen.done) for seen in look.epochs}
    if states.get(0, ("", 0))[0] != "sized" or not states[0][1]:
        return None
    stream = open_stream(client, "train")
    state = partition_slot(client, stream, 1)
    return state if load_manifest(client, stream, 0).state == "sized" else None


def test_the_same_production_started_again_makes_what_a_server_lost(any_url: str, any_client: Any) -> None:
    """The epoch counted as produced, so its samples were not made again and no trainer could end it."""
    before: list[SlotState] = []
    said: list[str] = []
    for is_second in (False, True):
        with Production(plan_of(epochs=1), options_of(any_url), workers=1, notify=said.append) as production:
            assert list(production.epochs) == [0], said
            for look in production.run():
                if not before and (state := half_made(any_client, look)) is not None:
                    before = [state]
        if not is_second:
            whole = numbers_in(any_url)
            before[0].restore(any_client)
            assert audit_stream(any_client, "train").lost > 0
    assert any("lost a part of epoch 0" in line for line in said)
    assert numbers_in(any_url) == whole
    assert audit_stream(any_client, "train").is_clean


def test_a_running_production_takes_up_an_epoch_that_it_had_finished(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server fails while a later epoch is made: the run must not end without the earlier one."""
    monkeypatch.setattr(jobs_production, "CARE_S", 0.2)
    before: SlotState | None = None
    is_torn = False
    with Production(plan_of(epochs=2), options_of(any_url), workers=1, notify=lambda _: None) as production:
        for look in production.run():
            before = before or half_made(any_client, look)
            states = {seen.epoch: seen.state for seen in look.epochs}
            if not is_torn and before is not None and states.get(0) == "produced" and states.get(1) == "sized":
                before.restore(any_client)
                any_client.client_kill_filter(_type="normal", skipme=True)
                production._window.open()  # as after a failover
                is_torn = True
    assert is_torn
    report = audit_stream(any_client, "train")
    assert report.is_clean, report.findings
    assert {epoch.epoch: epoch.state for epoch in report.epochs} == {0: "produced", 1: "produced"}


def test_a_running_production_takes_up_an_epoch_whose_end_its_server_forgot(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that lagged takes over with manifest and shards of the same moment, so that nothing disagrees."""
    monkeypatch.setattr(jobs_production, "CARE_S", 0.2)
    before: list[SlotState] = []
    said: list[str] = []
    is_torn = False
    with Production(plan_of(epochs=2), options_of(any_url), workers=1, notify=said.append) as production:
        for look in production.run():
            states = {seen.epoch: seen.state for seen in look.epochs}
            if not before and half_made(any_client, look) is not None:
                stream = open_stream(any_client, "train")
                before = [stream_slot(any_client, stream), *(partition_slot(any_client, stream, n) for n in (0, 1))]
            if not is_torn and before and states.get(0) == "produced" and states.get(1) == "sized":
                for state in before:
                    state.restore(any_client)
                any_client.client_kill_filter(_type="normal", skipme=True)
                production._window.open()  # as after a failover
                is_torn = True
    assert is_torn
    assert any("the server lost the end of epoch 0 of 'train': making it again" in line for line in said), said
    report = audit_stream(any_client, "train")
    assert report.is_clean, report.findings
    assert {epoch.epoch: epoch.state for epoch in report.epochs} == {0: "produced", 1: "produced"}


def test_a_run_does_not_end_without_what_a_server_lost_as_its_last_shard_was_completed(
    any_url: str, any_client: Any
) -> None:
    """A failover between the last look at a shard's index and its end leaves a hole in a complete epoch."""
    before: SlotState | None = None
    is_torn = False
    with Production(plan_of(epochs=1), options_of(any_url), workers=1, notify=lambda _: None) as production:
        for look in production.run():
            before = before or half_made(any_client, look)
            if not is_torn and before is not None and look.epochs[0].state == "produced":
                before.restore(any_client)
                production._window.open()  # as after a failover
                is_torn = True
    assert is_torn
    assert audit_stream(any_client, "train").is_clean


def produce_torn(url: str, client: Any, source: SourceConfig) -> None:
    """Produce one shard, whose partition goes back to an earlier state while a worker writes it."""
    plan = ProductionPlan(stream="train", source=source, shard_samples=SAMPLES)
    before: SlotState | None = None
    kept = -1
    is_torn = False
    with Production(plan, options_of(url), workers=1, notify=lambda _: None) as production:
        for look in production.run():
            committed = look.epochs[0].done
            if before is None:
                before = partition_slot(client, open_stream(client, "train"), 0) if committed else None
            elif kept < 0:
                kept = committed
            elif committed > kept and not is_torn:
                before.restore(client)
                client.client_kill_filter(_type="normal", skipme=True)
                is_torn = True
    assert is_torn


def test_an_epoch_that_a_server_lost_as_a_whole_is_opened_and_made_again(any_url: str, any_client: Any) -> None:
    """The message said that the epoch was abandoned or removed."""
    plan = ProductionPlan(stream="train", source=dataset("very_slowly"), shard_samples=SAMPLES // 2, partitions=1)
    said: list[str] = []
    is_torn = False
    with Production(plan, options_of(any_url), workers=1, notify=said.append) as production:
        stream = open_stream(any_client, "train")
        before = stream_slot(any_client, stream), partition_slot(any_client, stream, 0)
        for look in production.run():
            if not is_torn and look.epochs[0].done:
                for state in before:
                    state.restore(any_client)
                any_client.client_kill_filter(_type="normal", skipme=True)
                is_torn = True
    assert is_torn
    assert any("the server lost epoch 0 of 'train' as a whole" in line for line in said), said
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))
    assert audit_stream(any_client, "train").is_clean


def test_a_job_that_comes_while_its_epoch_is_opened_again_is_run_once_more(any_url: str, any_client: Any) -> None:
    """The epoch has its id and no sizes for a moment. The job ended the production: the source had changed, it said."""
    plan = ProductionPlan(stream="train", source=dataset(), shard_samples=SAMPLES, partitions=1)
    with Production(plan, options_of(any_url), workers=0) as production:
        stream, planned = open_stream(any_client, "train"), production._planned
        begun = open_epoch(any_client, stream, 0, fingerprint=planned.fingerprint)
        sized = replace(begun, sizes=(SAMPLES,))
        (task,) = planned.tasks(stream.id, sized)
        assert isinstance(task, ShardTask)
        runner = TaskRunner(any_url, "worker")
        with pytest.raises(ShardLost, match="has no sizes yet"):
            runner.produce(task, JobReport())
        size_epoch(any_client, stream, begun, [SAMPLES])
        runner.produce(task, JobReport())
        runner.close()
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))


def test_a_job_makes_again_what_a_server_lost_of_its_shard(any_url: str, any_client: Any) -> None:
    """The loss ended the whole production, though its source still has every sample."""
    produce_torn(any_url, any_client, dataset("very_slowly"))
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))
    assert audit_stream(any_client, "train").is_clean


def test_a_job_of_a_generator_names_what_a_server_lost(any_url: str, any_client: Any) -> None:
    """An iterator may give other samples the second time, so a user must learn which ones are gone."""
    source = GeneratorConfig(name="tests.producer.made:numbers", transform="tests.producer.made:very_slowly")
    loss = r"lost data, and with it \d+ samples .* \(offsets \d+-\d+, noticed at .* UTC, at redis"
    with pytest.raises(EpochFailed, match=loss):
        produce_torn(any_url, any_client, source)


def test_an_iterators_epoch_that_a_server_lost_as_a_whole_is_named_with_server_time_and_ranges(
    any_url: str, any_client: Any
) -> None:
    """The message said that the epoch was abandoned or removed, and the audit found nothing wrong."""
    source = GeneratorConfig(name="tests.producer.made:numbers", transform="tests.producer.made:very_slowly")
    plan = ProductionPlan(stream="train", source=source, shard_samples=SAMPLES, partitions=1)
    with Production(plan, options_of(any_url), workers=1, notify=lambda _: None) as production:
        stream, looks = open_stream(any_client, "train"), production.run()
        before = stream_slot(any_client, stream), partition_slot(any_client, stream, 0)
        loss = r"the server redis.* lost epoch 0 of 'train' as a whole.* \(shard 0 offsets 0-\d+\), noticed at .* UTC"
        done = next(look.epochs[0].done for look in looks if look.epochs[0].done)
        for state in before:
            state.restore(any_client)
        with pytest.raises(EpochFailed, match=loss):
            for _ in looks:
                pass
    report = audit_stream(any_client, "train")
    assert not report.is_clean
    assert any(loss.end >= done and loss.by.startswith("producer ") for loss in report.epochs[0].server_losses)


def test_a_writer_opens_an_epoch_again_that_its_partition_lost(any_url: str, any_client: Any) -> None:
    """It said that the epoch was abandoned or released, though every other part of the stream has it."""
    with planned_writer(any_url, 2) as writer:
        before = partition_slot(any_client, writer.stream, 1)
        epoch = writer.epoch(sizes=[20, 20])
        write_shard(epoch, 0, [20, 20], frozenset())
        before.restore(any_client)
        write_shard(epoch, 1, [20, 20], frozenset())
    assert audit_stream(any_client, "t").is_clean
    assert sorted(replayed(any_url)) == list(range(40))


def test_a_writer_opens_no_epoch_again_that_was_released(any_url: str, any_client: Any) -> None:
    """It would bring back an epoch that groups have read."""
    with planned_writer(any_url, 2) as writer:
        epoch = writer.epoch(sizes=[20, 20])
        release_epoch(any_client, writer.stream, 0)
        with pytest.raises(EpochAbandoned):
            write_shard(epoch, 1, [20, 20], frozenset())
        assert not retained_epochs(any_client, writer.stream)
        assert not any_client.exists(writer.stream.partitions[1].state(0))

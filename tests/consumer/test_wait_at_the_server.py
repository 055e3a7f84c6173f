"""Members that wait at the server, where the end of an epoch wakes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis.exceptions import ResponseError

from penstock_common.server.channel import ReplyError
from penstock_common.server.connection import open_channel
from penstock_common.stream.commands import Client
from penstock_common.stream.events import event_command
from penstock_common.stream.keys import StreamKeys
from penstock_common.stream.manifest import renewed
from penstock_consumer.read.fetch_plan import FetchPause, FetchPlanner
from tests.contracts.feed import SPEC, loader_of, sample, writer_of

KEYS = StreamKeys("t")
BATCH = 4
RESTS = 10
NEVER = (1 << 62, 0)
"""No hint has a later id."""


def rests(client: Client) -> int:
    """Return the number of waits for a hint so far."""
    return int(client.info("commandstats").get("cmdstat_xread", {}).get("calls", 0))


def until(is_so: Callable[[], bool]) -> None:
    """Wait for such a wait."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_pause_is_spent_at_the_server_to_its_last_millisecond(any_client: Client) -> None:
    """A request that came earlier would find less. A hint from before the newest entry wakes no member."""
    now_s = [10.0]
    pause = FetchPause(any_client, KEYS, lambda: now_s[0])
    assert not pause.is_under_way
    assert not pause.is_told
    assert (pause.commands(), pause.is_under_way) == ([], False)
    pause.received(b"1-0")
    pause.begin(0.05)
    for now_s[0], left_ms in ((10.0, 50), (10.02, 30), (10.049, 1)):
        assert (pause.commands(), pause.is_under_way) == ([event_command(KEYS, (0, 0), left_ms)], True)
    for now_s[0] in (10.05, 11.0):
        assert (pause.commands(), pause.is_under_way) == ([], False)
    for entry_id in (b"100-3", b"50-0", b"0-1"):
        pause.received(entry_id)
        pause.begin(1)
        assert pause.commands() == [event_command(KEYS, (99, 0), 1000)]
    pause.forget()
    assert (pause.commands(), pause.is_under_way) == ([], False)


@contextmanager
def an_epoch_read(url: str, found: list[int]) -> Iterator[Any]:
    """Yield a function that writes one more batch. At the end the epoch ends, and then has been read to its end."""
    done = threading.Event()

    def train() -> None:
        with loader_of(url, batch_size=BATCH, timeout_s=60) as loader:
            for batch in loader:
                found.extend(batch["y"].tolist())
        done.set()

    thread = threading.Thread(target=train, daemon=True)
    with writer_of(url, spec=SPEC) as writer:
        with writer.epoch() as epoch, epoch.shard(0) as shard:
            thread.start()
            written: list[int] = []

            def write() -> None:
                for _ in range(BATCH):
                    shard.write(sample(len(written)))
                    written.append(len(written))
                shard.flush()

            yield write
        assert done.wait(60), "nobody told the member that rests that the epoch has ended"
    assert sorted(found) == written


def test_a_member_that_rests_hears_of_the_epochs_end_without_asking(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among thirty members, each request wakes a process with cold caches, and an end must be seen at once."""
    asked: list[int] = []

    def always(asking: FetchPlanner, members: int) -> float:
        asking._has_paused = True
        return 0.02

    def counted(*of: Any) -> Any:
        asked.append(1)
        return renewed(*of)

    monkeypatch.setattr(FetchPlanner, "pause_s", always)
    monkeypatch.setattr("penstock_consumer.read.shared.renewed", counted)
    found: list[int] = []
    with an_epoch_read(any_url, found) as write:
        write()
        until(lambda: len(found) == BATCH)
        before, questions = rests(any_client), len(asked)
        until(lambda: rests(any_client) >= before + RESTS)
        assert len(asked) == questions
    assert len(asked) > questions


def test_the_end_of_an_epoch_is_seen_though_the_hint_of_it_was_lost(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hint proves nothing, and a server may have lost it. The manifest counts, and it is read then."""
    pause_s = FetchPlanner.pause_s
    monkeypatch.setattr(FetchPlanner, "pause_s", lambda asking, members: pause_s(asking, 32))
    monkeypatch.setattr(
        "penstock_consumer.read.fetch_plan.event_command",
        lambda keys, after, block_ms: event_command(keys, NEVER, block_ms),
    )
    found: list[int] = []
    with an_epoch_read(any_url, found) as write:
        write()
        until(lambda: len(found) == BATCH)
        before = rests(any_client)

        def is_resting() -> bool:
            write()
            return rests(any_client) > before

        until(is_resting)


def test_a_member_may_rest_after_it_was_given_entries(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next few come together then. A rest that only follows an answer without entries would be too late."""
    asked: list[bool] = []
    pause_s = FetchPlanner.pause_s

    def noted(asking: FetchPlanner, members: int) -> float:
        asked.append(asking.is_waiting)
        return pause_s(asking, members)

    monkeypatch.setattr(FetchPlanner, "pause_s", noted)
    found: list[int] = []
    with an_epoch_read(any_url, found) as write:
        for number in (1, 2, 3):  # the answer to a request that asks for more than there is leaves none under way
            write()
            until(lambda number=number: len(found) == number * BATCH)  # type: ignore[misc]
    assert False in asked


def test_a_rest_begins_when_the_answer_came_and_not_when_there_is_room_for_the_next() -> None:
    """Entries have already gathered during a trainer's long step."""
    now = 0.0
    resting = FetchPause(None, KEYS, clock=lambda: now)
    assert resting.commands() == []
    resting.received(b"1700000000000-3")
    resting.begin(0.096)
    now = 0.06
    (wait,) = resting.commands()
    assert wait[2] == b"36"
    assert wait[-1] == b"1699999999999-0", "a hint given in the millisecond of the last entry is heard"
    resting.forget()
    assert resting.commands() == []
    resting.begin(0.096)
    now = 0.2
    assert resting.commands() == []
    assert not resting.is_under_way


def test_an_error_at_the_end_of_a_rest_is_not_lost(any_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right may have been taken from the user. A reader that goes on would never hear of an end."""

    def refuse(*_: Any) -> Any:
        raise ReplyError(ResponseError("NOPERM no right"), "the server")

    monkeypatch.setattr("penstock_consumer.read.fetch_plan.read_event", refuse)
    pause: Any = FetchPause(any_client, KEYS)
    with pytest.raises(ReplyError, match="NOPERM"):
        pause.end(None)


def test_a_rest_ends_by_a_hint_or_by_its_time_also_where_the_key_holds_something_else(any_client: Client) -> None:
    """A key that no hint can come from must not end a training, and no rest may become a busy loop."""
    channel = open_channel(any_client)
    try:
        for told, command in (
            (False, ("SET", KEYS.events, "no stream")),
            (False, ("DEL", KEYS.events)),
            (True, ("XADD", KEYS.events, "7-3", "e", "0")),
        ):
            any_client.execute_command(*command)
            resting = FetchPause(any_client, KEYS)
            resting.begin(60.0 if told else 0.05)
            channel.send(resting.commands())
            began = time.monotonic()
            resting.end(channel)
            assert told or time.monotonic() - began >= 0.04
            assert (resting.is_told, resting.is_under_way, resting.commands()) == (told, False, [])
    finally:
        channel.close()

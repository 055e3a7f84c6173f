"""Entries that cannot be read, and entries at which training dies: no good entry becomes a dead letter."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from typing import Any

import pytest

from penstock_common.errors import ServerUnavailable, TooManyDeadLetters
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.mending.bad import list_bad
from penstock_common.stream.mending.drop import drop_bad
from penstock_common.tuning import Tuning
from penstock_consumer.read import dead_letters
from penstock_consumer.read.dead_letters import HOPELESS_ENTRIES
from penstock_consumer.read.heartbeat import MANY_DELIVERIES, LeaseRenewer
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, entries, loader_of, numbers, open_stream, produce, sample
from tests.contracts.processes import child

COUNT = 200


def refuse_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a reader by one that can read nothing, as a wrong build would be."""
    from penstock_common.errors import ChecksumMismatch

    def verify(header: Any, buffers: Any) -> None:
        raise ChecksumMismatch("this reader has a bug")

    monkeypatch.setattr("penstock_consumer.read.receive.verify", verify)


def dead(client: Client) -> int:
    """Return the dead letters of group g."""
    found: int = client.hlen(open_stream(client, "t").partitions[0].dead(0, "g"))
    return found


@pytest.mark.parametrize("count", [3, 2 * HOPELESS_ENTRIES])
def test_a_reader_that_can_read_nothing_buries_nothing(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Its fault must not cost the group an epoch: it ends with the reason, and a working reader gets every sample."""
    produce(url, "t", count, block_samples=1)
    refuse_all(monkeypatch)
    for _ in range(2):
        with (
            loader_of(url) as loader,
            pytest.raises(TooManyDeadLetters, match=r"this reader has a bug.*penstock bad drop"),
        ):
            list(loader)
    assert dead(client) == 0
    monkeypatch.undo()
    with loader_of(url) as loader:
        assert sorted(numbers(loader)) == list(range(count))
    assert audit_stream(client, "t").is_clean


def test_bad_entries_before_the_first_good_one_are_buried_once_that_is_read(any_url: str, any_client: Client) -> None:
    """The entries are held back, not forgotten: after a good one, they are the bad ones."""
    with Writer("t", url=any_url, spec=SPEC, tuning=Tuning(block_bytes=SAMPLE_BYTES, notify=lambda _: None)) as writer:
        epoch = writer.epoch()
        key = open_stream(any_client, "t").partitions[0].entries(0)
        for _ in range(HOPELESS_ENTRIES - 1):
            any_client.xadd(key, {"garbage": "x"})
        with epoch:
            for number in range(5):
                epoch.write(sample(number))
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(5))
    assert dead(any_client) == HOPELESS_ENTRIES - 1
    assert any_client.xpending(key, "g")["pending"] == 0


def test_a_flood_of_forged_entries_is_swept_away_by_one_command(any_url: str, any_client: Client) -> None:
    """A hundred of them end the reading. The operator discards what no producer committed, and training continues."""
    with Writer("t", url=any_url, spec=SPEC, tuning=Tuning(block_bytes=SAMPLE_BYTES, notify=lambda _: None)) as writer:
        epoch = writer.epoch()
        key = open_stream(any_client, "t").partitions[0].entries(0)
        for _ in range(HOPELESS_ENTRIES + 10):
            any_client.xadd(key, {"garbage": "x"})
        with epoch:
            for number in range(5):
                epoch.write(sample(number))
    with loader_of(any_url) as loader, pytest.raises(TooManyDeadLetters, match="no producer committed"):
        list(loader)
    drop_bad(any_client, open_stream(any_client, "t"), 0, group=None, reason="forged")
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(5))
    drop_bad(any_client, open_stream(any_client, "t"), 0, group=None, reason="forged")
    assert audit_stream(any_client, "t").is_clean


# --- entries on which training dies -----------------------------------------------------------------------------------


def tell(*words: object) -> None:
    """Print a line in one piece, because two threads print."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train(url: str, poison: str) -> None:
    """Train until the sample ``poison`` kills the process, like a bug of a kernel.

    It prints its samples and notices.
    """
    with Loader(
        "t",
        group="g",
        batch_size=10,
        url=url,
        tuning=Tuning(
            member="m", lease_s=1.0, timeout_s=20, prefetch_bytes=3000, notify=lambda text: tell("said", text)
        ),
    ) as loader:
        for batch in loader:
            if int(poison) in batch["y"]:
                tell("dies", *batch["y"].tolist())
                os.kill(os.getpid(), signal.SIGKILL)
            tell(*batch["y"].tolist())


def test_an_entry_on_which_training_dies_is_set_aside_named_and_can_be_dropped(
    any_url: str, any_client: Client
) -> None:
    """After five deaths it comes alone and last.

    All else is trained on, and then a notice gives the command to type.
    """
    produce(any_url, "t", COUNT, block_samples=5)
    poison = 57
    trained: Counter[int] = Counter()
    alarm, alone = "", []
    for _ in range(MANY_DELIVERIES + 3):
        with child(train, any_url, poison) as trainer:
            lines = trainer.finish()
        trained.update(int(word) for line in lines if line[0].isdigit() for word in line.split())
        alarms = [line for line in lines if "does training die on it?" in line]
        if alarms:
            last = next(line for line in lines if line.startswith("dies "))
            alarm, alone = alarms[-1], [int(word) for word in last.split()[1:]]
    assert "(shard 0 offsets 55-59)" in alarm
    assert alone == [55, 56, 57, 58, 59]
    assert set(trained) == set(range(COUNT)) - set(alone)
    stream = open_stream(any_client, "t")
    words = alarm[alarm.index("`penstock bad drop") + 1 : -1].split()
    assert words[:5] == ["penstock", "bad", "drop", "t", "0"]
    drop_bad(any_client, stream, 0, group="g", reason="kills", entry=words[5])
    produce(any_url, "t", 10)
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(10))
    report = audit_stream(any_client, "t", epoch=0)
    assert (report.is_clean, report.dead, report.delivered) == (True, 5, {"g": COUNT - 5})
    assert [(d.shard, d.first, d.end) for d in list_bad(any_client, stream).dead] == [(0, 55, 60)]


def test_a_suspect_comes_last_alone_and_after_all_else_was_taken(any_url: str, any_client: Client) -> None:
    """A crash then proves that the entry is to blame, because no member has another one."""
    produce(any_url, "t", COUNT, block_samples=5)
    stream = open_stream(any_client, "t")
    join_group(any_client, Membership(stream, "g", "", ""), declared=True)
    key = stream.partitions[0].entries(0)
    given: Any = any_client.xreadgroup("g", "died", {key: ">"}, count=3)
    for entry_id, _ in given[0][1][:2]:
        any_client.xclaim(key, "g", "~released", 0, [entry_id], retrycount=MANY_DELIVERIES, justid=True)
    any_client.xclaim(key, "g", "~released", 0, [given[0][1][2][0]], retrycount=MANY_DELIVERIES - 1, justid=True)
    said: list[str] = []
    with loader_of(any_url, batch_size=64, notify=said.append) as loader:
        batches = [batch["y"].tolist() for batch in loader]
    assert sorted(number for batch in batches for number in batch) == list(range(COUNT))
    assert sorted(batches[-2:]) == [list(range(5)), list(range(5, 10))]
    assert len([line for line in said if "does training die on it?" in line]) == 2


# --- a connection that is cut while what was taken over is booked -----------------------------------------------------


def lose_one_answer(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Run the next call, but cut its connection before the answer. The returned list shows that it happened."""
    cuts: list[str] = []
    real = getattr(owner, name)

    def once(*args: Any) -> Any:
        outcome = real(*args)
        if not cuts:
            cuts.append(name)
            raise ServerUnavailable("cut under the answer")
        return outcome

    monkeypatch.setattr(owner, name, once)
    return cuts


def left_behind(url: str, client: Client, bad: int, deliveries: int) -> str:
    """Give all of an epoch of COUNT samples, forged entries first, to a member that is gone, and return their key."""
    with Writer("t", url=url, spec=SPEC, tuning=Tuning(block_bytes=5 * SAMPLE_BYTES, notify=lambda _: None)) as writer:
        epoch = writer.epoch()
        key = open_stream(client, "t").partitions[0].entries(0)
        for _ in range(bad):
            client.xadd(key, {"garbage": "x"})
        with epoch:
            for number in range(COUNT):
                epoch.write(sample(number))
    join_group(client, Membership(open_stream(client, "t"), "g", "", ""), declared=True)
    given: Any = client.xreadgroup("g", "died", {key: ">"})
    for entry_id, _ in given[0][1]:
        client.xclaim(key, "g", "~released", 0, [entry_id], retrycount=deliveries, justid=True)
    return key


@pytest.mark.parametrize(
    ("owner", "name", "bad", "deliveries"),
    [(LeaseRenewer, "count_turn", 0, MANY_DELIVERIES), (dead_letters, "add_dead_letter", 2, 1)],
    ids=["a suspect's turn", "a dead letter held back"],
)
def test_a_lost_answer_makes_no_reader_hand_out_twice_what_it_took_over(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bad: int, deliveries: int
) -> None:
    """No member died and no sample was lost, so a duplicated sample would be the reader's own fault."""
    key = left_behind(any_url, any_client, bad, deliveries)
    cuts = lose_one_answer(monkeypatch, owner, name)
    with loader_of(any_url, acknowledge="manual") as loader:  # with 'manual', batches in hand are not acknowledged
        batches = list(loader)
        for batch in batches:
            loader.acknowledge(batch)
    assert sorted(numbers(batches)) == list(range(COUNT))
    assert cuts
    assert dead(any_client) == bad
    assert any_client.xpending(key, "g")["pending"] == 0


# --- entries that span batches ----------------------------------------------------------------------------------------


def step_by_step(url: str, steps: str) -> None:
    """Read batches of 64 from an entry of 1000, print the identities before each acknowledgement, and then sleep."""
    with Loader(
        "t",
        group="g",
        batch_size=64,
        url=url,
        tuning=Tuning(member="dies", lease_s=1.0, timeout_s=20),
    ) as loader:
        for number, batch in enumerate(loader):
            if number == int(steps):
                print("middle", flush=True)
                threading.Event().wait()
            print(*(offset for _, _, offset in batch.identities()), flush=True)


@pytest.mark.parametrize("steps", [1, 7, 15])
def test_of_a_large_entry_read_in_small_batches_exactly_the_rest_is_handed_out_again(
    any_url: str, any_client: Client, steps: int
) -> None:
    """SIGKILL in the middle of an entry: its ledger, not its id, shows the unacknowledged samples."""
    produce(any_url, "t", 1000, block_samples=1000)
    assert len(entries(any_client, "t", 0)) == 1
    with child(step_by_step, any_url, steps) as trainer:
        first: list[int] = []
        while (line := trainer.line()) != "middle":
            first += [int(word) for word in line.split()]
        partition = open_stream(any_client, "t").partitions[0]
        while any_client.bitcount(partition.ledger(0, "g", 0)) < 64 * steps:
            pass
        trainer.kill()
    assert first == list(range(64 * steps))
    rest: list[int] = []
    with loader_of(any_url, batch_size=64, member="other", lease_s=1.0) as loader:
        for batch in loader:
            rest += [offset for _, _, offset in batch.identities()]
    assert sorted(rest) == list(range(64 * steps, 1000))
    assert audit_stream(any_client, "t").is_clean

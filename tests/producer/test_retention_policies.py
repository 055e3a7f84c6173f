"""Retention policies: the plans as pure functions, and on a server what is kept when a pass is made."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.errors import BadOption, GroupFinished, PenstockError, StreamDeleted
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import Membership, Roster, join_group, load_roster
from penstock_common.stream.manifest import abandon_epoch, load_manifest, retained_epochs
from penstock_common.stream.removal.deletion import delete_stream
from penstock_common.stream.streams import load_stream, read_counters, set_plan
from penstock_common.tuning import Tuning
from penstock_producer.write import cleaner
from penstock_producer.write.cleaner import clean_up, shrink_to_budget
from penstock_producer.write.retention import (
    MOST_KEPT,
    EpochFacts,
    RetentionPolicy,
    is_acknowledged,
    parse_policy,
    plan_policy,
)
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, loader_of, numbers, produce, sample, writer_of
from tests.producer.test_retention import group, roster_of

FACTS = tuple(EpochFacts(epoch, "produced", 10, ended_ms=1000 * epoch) for epoch in range(6))
SETTLED = roster_of({"g": group()}, {("g", epoch) for epoch in range(5)})
"""Epochs 0 to 4 are acknowledged, 5 is owed."""


class TestForms:
    """These forms of a policy may be written."""

    @pytest.mark.parametrize(
        ("text", "policy"),
        [
            ("budget", RetentionPolicy("budget")),
            ("epochs:3", RetentionPolicy("epochs:3", epochs=3)),
            ("Epochs:03", RetentionPolicy("epochs:3", epochs=3)),
            ("epochs:0", RetentionPolicy("epochs:0", epochs=0)),
            ("time:45s", RetentionPolicy("time:45s", age_ms=45_000)),
            ("time:90m", RetentionPolicy("time:90m", age_ms=90 * 60_000)),
            ("time:24h", RetentionPolicy("time:24h", age_ms=86_400_000)),
            ("time:7d", RetentionPolicy("time:7d", age_ms=7 * 86_400_000)),
            ("bytes:500MB", RetentionPolicy(f"bytes:{500 << 20}", nbytes=500 << 20)),
            ("bytes:1.5g", RetentionPolicy(f"bytes:{3 << 29}", nbytes=3 << 29)),
            ("bytes:64k", RetentionPolicy(f"bytes:{64 << 10}", nbytes=64 << 10)),
            ("bytes:2TB", RetentionPolicy(f"bytes:{2 << 40}", nbytes=2 << 40)),
            ("bytes:7", RetentionPolicy("bytes:7", nbytes=7)),
        ],
    )
    def test_a_policy_is_what_it_says(self, text: str, policy: RetentionPolicy) -> None:
        """A slip by a factor of 1000 or 60 would throw data away."""
        assert parse_policy(text) == policy
        assert parse_policy(policy.text) == policy

    @pytest.mark.parametrize(
        "text", ["", "budget:3", "epochs", "epochs:", "epochs:-1", "epochs:two", "time:24", "time:h", "bytes:5x", "all"]
    )
    def test_anything_else_is_refused_in_one_line_with_the_forms(self, text: str) -> None:
        """A user who mistypes a policy gets the list of forms, and no guess."""
        with pytest.raises(BadOption, match=r"not one of: budget .*epochs:N.*time:.*bytes:") as refused:
            parse_policy(text)
        assert "\n" not in str(refused.value)


class TestPlans:
    """Values alone decide which epochs a policy removes."""

    def plan(self, text: str, roster: Roster = SETTLED, now_ms: int = 10_000) -> list[int]:
        """Return the epochs of the six that the policy removes."""
        return plan_policy(parse_policy(text), FACTS, roster, now_ms)

    def test_the_newest_acknowledged_epochs_stay(self) -> None:
        """Replay wants the latest ones; what is owed is not counted, and not touched."""
        assert self.plan("epochs:2") == [0, 1, 2]
        assert self.plan("epochs:0") == [0, 1, 2, 3, 4]
        assert self.plan("epochs:5") == []
        assert self.plan("budget") == []

    def test_an_epoch_goes_when_it_is_older_than_that(self) -> None:
        """Its age counts from when it was produced."""
        assert self.plan("time:8s") == [0, 1]
        assert self.plan("time:8s", now_ms=10_001) == [0, 1, 2]
        assert self.plan("time:0s", now_ms=100_000) == [0, 1, 2, 3, 4]

    def test_acknowledged_epochs_stay_up_to_so_many_bytes(self) -> None:
        """Newest first, whole epochs only."""
        assert self.plan("bytes:30") == [0, 1]
        assert self.plan("bytes:29") == [0, 1, 2]
        assert self.plan("bytes:0") == [0, 1, 2, 3, 4]

    def test_pinned_and_replayed_epochs_stay_and_count_as_kept(self) -> None:
        """A pin is an operator's word; it must not make space for more, either."""
        roster = roster_of(
            {"g": group()}, {("g", e) for e in range(5)}, pinned=frozenset({0}), replays={"r": (1, 20_000)}
        )
        assert self.plan("epochs:0", roster) == [2, 3, 4]
        assert self.plan("epochs:0", roster, now_ms=20_000) == [1, 2, 3, 4]
        assert self.plan("epochs:3", roster) == []

    def test_without_a_group_nothing_goes(self) -> None:
        """A producer that was started first must keep samples that no group could read yet."""
        assert self.plan("epochs:0", roster_of({})) == []

    def test_many_tiny_epochs_are_bounded_under_every_policy(self) -> None:
        """Each epoch has keys of its own, which the byte budget does not count."""
        many = [EpochFacts(epoch, "produced", 1) for epoch in range(MOST_KEPT + 7)]
        roster = roster_of({"g": group()}, {("g", fact.epoch) for fact in many})
        assert plan_policy(parse_policy("budget"), many, roster, 0) == list(range(7))

    @given(
        st.sampled_from(["budget", "epochs:0", "epochs:2", "time:3s", "bytes:25"]),
        st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 7))),
        st.lists(st.sampled_from(["open", "sized", "produced", "abandoned"]), min_size=8, max_size=8),
        st.frozensets(st.integers(0, 7)),
    )
    def test_nothing_owed_and_nothing_pinned_ever_goes(
        self, text: str, closed: set[tuple[str, int]], states: list[str], pinned: frozenset[int]
    ) -> None:
        """Whatever the policy: this is the promise that training rests on."""
        roster = roster_of({"a": group(), "b": group(3)}, closed, pinned=pinned)
        facts = [EpochFacts(e, state, 10, 1000 * e) for e, state in enumerate(states)]
        for epoch in plan_policy(parse_policy(text), facts, roster, 9000):
            assert states[epoch] == "abandoned" or (states[epoch] == "produced" and is_acknowledged(roster, epoch))
            assert epoch not in pinned


# --- on a server ------------------------------------------------------------------------------------------------------


def acknowledged_epochs(url: str, count: int, **settings: Any) -> None:
    """Epochs of 't' that the group g has read."""
    produce(url, "t", 20, epochs=count, **settings)
    with loader_of(url) as loader:
        for _ in range(count):
            assert numbers(loader) != []


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_pass_keeps_the_newest_acknowledged_epochs_and_those_owed(url: str, client: Client, partitions: int) -> None:
    """Training goes on over the pass; what is over goes with all its keys."""
    acknowledged_epochs(url, 5, partitions=partitions, retention="epochs:2")
    produce(url, "t", 20)
    stream = load_stream(client, "t")
    join_group(client, Membership(stream, "g", "", ""), declared=True)
    done = clean_up(client, stream, lambda _: None)
    assert (done.released, done.freed_bytes) == ([0, 1, 2], 3 * 20 * SAMPLE_BYTES)
    assert list(retained_epochs(client, stream)) == [3, 4, 5]
    assert not [key for key in client.keys("*") for gone in range(3) if b"}:%d:" % gone in key]
    assert clean_up(client, stream, lambda _: None).released == []
    with loader_of(url) as loader:
        assert sorted(numbers(loader)) == list(range(20))


def test_ages_and_bytes_are_kept_to_on_a_server(any_url: str, any_client: Client) -> None:
    """The server's clock counts, from the end of production; the policy may be changed at any time."""
    acknowledged_epochs(any_url, 4)
    stream = load_stream(any_client, "t")
    assert clean_up(any_client, stream, lambda _: None).released == []
    any_client.hset(stream.keys.meta, "retention", f"bytes:{3 * 20 * SAMPLE_BYTES}")
    assert clean_up(any_client, stream, lambda _: None).released == [0]
    any_client.hset(stream.keys.meta, "retention", "time:1h")
    produced = load_manifest(any_client, stream, 2).produced_ms
    assert produced is not None
    assert abs(produced - time.time() * 1000) < 60_000
    any_client.hset(stream.keys.manifest(1), "produced_ms", produced - 3_700_000)
    assert clean_up(any_client, stream, lambda _: None).released == [1]


def test_a_group_that_read_all_is_told_so_though_all_is_released(any_url: str, any_client: Client) -> None:
    """Started again by mistake it must not wait a minute for epochs that will never come."""
    acknowledged_epochs(any_url, 3, retention="epochs:0")
    stream = load_stream(any_client, "t")
    set_plan(any_client, stream, 3)
    assert clean_up(any_client, stream, lambda _: None).released == [0, 1, 2]
    with loader_of(any_url) as loader, pytest.raises(GroupFinished, match=r"'g' has read epochs 0-2 of 't'"):
        numbers(loader)


def test_an_epoch_whose_last_batch_is_not_acknowledged_yet_counts_as_read(any_url: str, any_client: Client) -> None:
    """A pipeline that reads ahead asks for the next epoch before the last step of this one has ended."""
    produce(any_url, "t", 20, epochs=3)
    set_plan(any_client, load_stream(any_client, "t"), 3)
    told: list[str] = []
    with loader_of(any_url, acknowledge="on_checkpoint", notify=told.append) as loader:
        for _ in range(3):
            assert numbers(loader)
        assert numbers(loader) == []
    assert any("'g' has read epochs 0-2 of 't'; there is no other" in line for line in told), told


def test_an_abandoned_epoch_goes_by_the_policy_too(any_url: str, any_client: Client) -> None:
    """No group needs an epoch that will never be complete, and such epochs must not pile up."""
    with writer_of(any_url, spec=SPEC, retention="epochs:1") as writer:
        for number in range(3):
            epoch = writer.epoch()
            epoch.write(sample(number))
            epoch.flush()
            abandon_epoch(any_client, writer.stream, number)
        assert clean_up(any_client, writer.stream, lambda _: None).released == [0, 1]


def test_a_lowered_budget_is_kept_to_without_a_writer(any_url: str, any_client: Client) -> None:
    """An operator who needs memory now must not have to wait for the next production."""
    acknowledged_epochs(any_url, 4)
    stream = load_stream(any_client, "t")
    any_client.hset(stream.keys.meta, "budget_bytes", 2 * 20 * SAMPLE_BYTES)
    stream = load_stream(any_client, "t")
    assert shrink_to_budget(any_client, stream, lambda _: None) >= 2 * 20 * SAMPLE_BYTES
    assert load_roster(any_client, stream.partitions[0]).bytes <= stream.budget_bytes


def test_retention_works_by_itself_while_a_writer_is_there(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs no command and no full budget."""
    monkeypatch.setattr(cleaner, "CLEAN_UP_EVERY_S", 0.05)
    acknowledged_epochs(any_url, 4)
    with writer_of(any_url, retention="epochs:1") as writer:
        deadline = time.monotonic() + 10
        while list(retained_epochs(any_client, writer.stream)) != [3] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list(retained_epochs(any_client, writer.stream)) == [3]


def test_the_timer_ends_with_its_writer_and_with_the_stream(any_url: str, any_client: Client) -> None:
    """A thread that outlives its writer would hold a connection, and a deleted stream needs no care."""
    with Writer("t", url=any_url, tuning=Tuning(notify=lambda _: None)) as writer:
        timer = cleaner.CleanupTimer(any_client, writer.stream, lambda _: None, every_s=0.01)
        timer.start()
        delete_stream(any_client, "t")
        timer._thread.join(timeout=10)
        assert not timer._thread.is_alive()
        own = writer._cleanup_timer._thread
        assert own.is_alive()
        with pytest.raises(StreamDeleted):
            clean_up(any_client, writer.stream, lambda _: None)
    assert not own.is_alive()


def test_a_bad_policy_is_refused_before_anything_is_made(any_url: str, any_client: Client) -> None:
    """A typo must not leave a stream with the wrong one."""
    with pytest.raises(PenstockError, match="retention 'epoch:3' is not one of"):
        Writer("t", url=any_url, retention="epoch:3")
    assert not any_client.keys("*")


def test_members_that_vanished_leave_no_consumers_behind(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers that come and go under new names would otherwise fill every epoch with names of the dead."""
    monkeypatch.setattr(cleaner, "LOOK_AGAIN_S", 0.2)
    produce(any_url, "t", 100)
    stream = load_stream(any_client, "t")
    entries, roster = stream.partitions[0].entries(0), stream.partitions[0].roster
    for name in ("dead", "holds"):
        join_group(any_client, Membership(stream, "g", name, "1"))
        any_client.xgroup_createconsumer(entries, "g", name)
    any_client.xreadgroup("g", "holds", {entries: ">"}, count=1)
    deadline = time.monotonic() + 10
    while any(field.startswith(b"m:") for field in any_client.hkeys(roster)) and time.monotonic() < deadline:
        clean_up(any_client, stream, lambda _: None, silent_ms=1)  # no member is silent in a server's first second
    assert {consumer["name"] for consumer in any_client.xinfo_consumers(entries, "g")} == {b"holds"}


def test_a_trainer_that_leaves_takes_its_name_along(any_url: str, any_client: Client) -> None:
    """Each run has a name of its own: a thousand runs must not leave a thousand names."""
    produce(any_url, "t", 100)
    stream = load_stream(any_client, "t")
    for number in range(3):
        with loader_of(any_url, batch_size=1, member=f"run-{number}", prefetch_bytes=1) as loader:
            next(iter(loader))
    names = {consumer["name"] for consumer in any_client.xinfo_consumers(stream.partitions[0].entries(0), "g")}
    assert names <= {b"~released"}
    assert not load_roster(any_client, stream.partitions[0]).members


def test_members_that_are_still_ending_an_epoch_bear_its_release(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The member that acknowledges the last batch frees the epoch, while the others still look for more of it."""
    monkeypatch.setattr(cleaner, "CLEAN_UP_EVERY_S", 0.001)
    told: list[str] = []
    got: Counter[int] = Counter()
    with writer_of(any_url, spec=SPEC, retention="epochs:0", block_bytes=2 * SAMPLE_BYTES) as writer:

        def train(member: str) -> None:
            settings: dict[str, Any] = {"member": member, "batch_size": 2, "prefetch_bytes": 500}
            with suppress(GroupFinished), loader_of(any_url, notify=told.append, **settings) as loader:
                while True:
                    for batch in loader:
                        got.update([batch.epoch] * batch.size)

        set_plan(writer.client, writer.stream, 15)
        with ThreadPoolExecutor(3) as pool:
            ends = [pool.submit(train, f"m{number}") for number in range(3)]
            for _ in range(15):
                with writer.epoch() as epoch:
                    for number in range(40):
                        epoch.write(sample(number))
            for end in ends:
                end.result(timeout=60)
        assert got == dict.fromkeys(range(15), 40)
        assert [text for text in told if "abandoned" in text] == []
        deadline = time.monotonic() + 10  # a pass may be looking twice at what it reconciles
        while (released := read_counters(writer.client, writer.stream)[2]) not in ("0-14", "0-13"):
            assert time.monotonic() < deadline, released
            time.sleep(0.02)

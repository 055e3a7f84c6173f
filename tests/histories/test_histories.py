"""Histories with torn losses: random ones and stored ones keep every promise, and a fault that is put back is found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest

from penstock_common.stream import entries
from penstock_common.stream.groups.positions import Positions
from penstock_common.stream.servers.confirmed import Confirmer, Question
from penstock_consumer.read.heartbeat import LeaseRenewer
from penstock_producer.write.commit import Committer
from penstock_producer.write.target import ShardTarget
from tests.histories.interrupts import Hang, Interrupts
from tests.histories.schedules import scheduled
from tests.histories.search import arena, search, violation_of
from tests.histories.settle import settle
from tests.histories.shrink import shrunk
from tests.histories.step import DRAWN, OPERATOR, History, Step, drawn, parse_history, written
from tests.histories.stored import StoredHistory, stored_histories
from tests.histories.world import Arena, World

SEED = 20261126
TWO_WRITERS = parse_history(
    "join a0; feed f0 1; mark; pour f1 0; lose s; pour f2 0; pour f1 0; read a0; pour f2 2; feed f1 0; feed f2 0"
)


@pytest.fixture(scope="module")
def place() -> Iterator[Arena]:
    """Start a server for all histories of this file."""
    with arena() as one:
        yield one


@pytest.fixture(scope="module", params=["auto", "replicas=1"])
def followed(request: pytest.FixtureRequest) -> Iterator[Arena]:
    """Start a server with a replica, once for each durability that asks it."""
    with arena(request.param) as one:
        yield one


@pytest.fixture(scope="module")
def in_files() -> Iterator[Arena]:
    """Start a server with a replica, and keep the payloads of its stream in files."""
    with arena("auto", has_segments=True) as one:
        yield one


def _stored() -> list[Any]:
    return [
        pytest.param(
            one, id=one.covers, marks=[pytest.mark.xfail(strict=True, reason=one.breaks)] if one.breaks else []
        )
        for one in stored_histories()
    ]


@pytest.mark.parametrize("theme", DRAWN)
def test_random_histories_keep_every_promise(place: Arena, theme: str) -> None:
    """The seeds are the same each time. `make histories` draws others for as long as you like."""
    found, _ = search(place, SEED, histories=30, theme=theme)
    assert found is None, f"{found.violation}: {written(found.history)}"


def test_random_histories_lose_nothing_that_a_replica_has_confirmed(followed: Arena) -> None:
    """The process that received the confirmation of a commit may have ended before the loss."""
    found, _ = search(followed, SEED, histories=25)
    assert found is None, f"{found.violation}: {written(found.history)}"


CONFIRMED = parse_history("feed f0 0; feed f0 0; die f0; lose p0")
TAKEN = parse_history("feed f0 0; die f0; lose s")


@pytest.mark.parametrize(
    ("owner", "name", "history"),
    [(Committer, "_confirm", CONFIRMED), (Confirmer, "asks", TAKEN)],
    ids=["block", "shard"],
)
def test_a_commit_that_waits_for_no_replica_is_found(followed: Arena, owner: type, name: str, history: History) -> None:
    """A writer waits for its blocks, and before for the note in the stream's slot that it has the shard."""
    assert violation_of(followed, history) is None
    with patch.object(owner, name, lambda *_: None):
        violation = violation_of(followed, history)
    assert violation is not None
    assert violation.kind == "lost"


def test_no_entry_names_a_file_that_may_be_used_again(in_files: Arena) -> None:
    """A loss brings entries back whose removal no replica had. Their files must wait for that."""
    found, _ = search(in_files, SEED, histories=15, theme="segments")
    assert found is None, f"{found.violation}: {written(found.history)}"


PAUSED = [
    (before, step)
    for before, steps in (
        ("join a0; feed f0 3; end f0; read a0; ack a0; close a0", "clean 2; recycle; beat a0; leave a0; delete"),
        ("join a0; feed f0 3; read a0", "ack a0; leave a0; feed f0 1; end f0; abandon; clean 2; read a0; pour f0 3"),
        ("feed f0 3; die f0", "seal; abandon; join a0; feed f1 0"),
        ("plan 1", "job w0 0; job w0 2; plan 0"),
        ("plan 1; job w0 0; job w0 0; job w0 0; join o0; join o1; read o0; read o1", "ack o0; close o0; clean 2"),
    )
    for step in steps.split("; ")
]
"""Histories, and a step in which an actor then pauses."""


@pytest.mark.parametrize(("before", "step"), PAUSED)
def test_who_paused_changes_nothing_of_a_newer_stream_of_the_name(place: Arena, before: str, step: str) -> None:
    """The stream is deleted and made again meanwhile. Its manifests only have the name, so scripts compare more."""
    first, (paused,) = parse_history(before), parse_history(step)
    end = points(place, (*first, paused))[len(first)]
    begin = 4 if paused.who == OPERATOR else 0  # the operator looks for the stream first
    for point in range(begin, end, 3):
        history = (*first, replace(paused, inner=((point, Step("remake")),)))
        assert (found := violation_of(place, history)) is None, f"{found}: {written(history)}"


@pytest.mark.parametrize("step", ["seal", "feed f1 0"])
def test_who_finds_no_stream_removes_nothing_of_the_next_one(place: Arena, step: str) -> None:
    """An actor takes back what it made of an epoch as the stream was deleted, and pauses before that."""
    first, (paused,) = parse_history("feed f0 3; die f0"), parse_history(step)
    begin = 4 if paused.who == OPERATOR else 0  # the operator looks for the stream first
    for point in range(begin, points(place, (*first, paused))[len(first)] - 5):
        inner = ((point, Step("delete")), (point + 5, Step("remake")))
        history = (*first, replace(paused, inner=inner))
        assert (found := violation_of(place, history)) is None, f"{found}: {written(history)}"


REUSED = parse_history("join a0; feed f0; fill f0; read a0; ack a0; clean; recycle; lose p0")


def test_a_file_that_is_used_again_before_a_replica_has_the_removal_is_found(in_files: Arena) -> None:
    """The entry comes back with the loss, and a reader would find other samples in its file."""
    assert violation_of(in_files, REUSED) is None
    with patch.object(Question, "is_answered", lambda _: True):
        violation = violation_of(in_files, REUSED)
    assert violation is not None
    assert violation.kind == "reused"


@pytest.mark.parametrize("one", _stored())
def test_a_stored_history_keeps_every_promise(place: Arena, one: StoredHistory) -> None:
    """Each failed once, or is near to one that did."""
    assert violation_of(place, one.history) is None


def test_two_writers_of_a_shard_are_found_if_no_script_compares_their_tokens(place: Arena) -> None:
    """Without the comparison in commit.lua, a block of one writer is taken for the other's, and the audit is clean."""
    comparison = b" or writer ~= ARGV[9]"
    assert comparison in entries._COMMIT

    def fails(history: History) -> bool:
        violation = violation_of(place, history)
        return violation is not None and violation.kind == "hole"

    assert not fails(TWO_WRITERS)
    with patch.object(entries, "_COMMIT", entries._COMMIT.replace(comparison, b"")):
        assert fails(TWO_WRITERS)
        shortest = shrunk(TWO_WRITERS, fails)
    assert sum(step.size for step in shortest) <= 8
    kinds = [step.kind for step in shortest]
    assert kinds.index("mark") < kinds.index("lose")
    assert {step.who for step in shortest if step.kind in ("pour", "feed")} == {"f0", "f1", "f2"}


def test_random_histories_find_two_writers_if_blocks_carry_no_token(place: Arena) -> None:
    """Without tokens, as it once was, a writer takes the blocks of another for its own."""
    make = Committer.__init__

    def without_token(self: Committer, target: ShardTarget, *args: Any, **options: Any) -> None:
        make(self, replace(target, token=""), *args, **options)

    with patch.object(Committer, "__init__", without_token):
        found, _ = search(place, 40, histories=300, theme="writers")
        assert found is not None
        assert found.violation.kind == "hole"
        assert violation_of(place, found.history) == found.violation
    assert violation_of(place, found.history) is None
    assert len(found.history) <= 6


def test_random_histories_find_a_rank_that_acknowledges_for_the_others(place: Arena) -> None:
    """The slowest rank decides what an ordered group has acknowledged. Here the first one does."""

    def highest(self: Positions, world: int) -> int:
        return max(self.of(rank) for rank in range(world))

    with patch.object(Positions, "minimum", highest):
        found, _ = search(place, SEED, histories=30, theme="ranks")
    assert found is not None
    assert found.violation.kind == "untrue"
    assert violation_of(place, found.history) is None


@pytest.mark.parametrize("seed", [7, 2, 7771, 13])
def test_a_schedule_of_the_chaos_suite_keeps_every_promise_as_a_history(place: Arena, seed: int) -> None:
    """The faults and their order are those of the suite, with steps of work between them instead of seconds."""
    assert violation_of(place, scheduled(seed)) is None


def test_a_seed_of_the_chaos_suite_that_fails_fails_again(place: Arena) -> None:
    """In the suite a fault hits another process each time. Here a member does not claim what a cut connection lost."""
    with patch.object(LeaseRenewer, "recover", lambda *_, **__: None):
        first, again = violation_of(place, scheduled(2)), violation_of(place, scheduled(2))
    assert first is not None
    assert (first.kind, again) == ("stuck", first)


def points(place: Arena, history: History) -> list[int]:
    """Run a history, and return how many requests and pauses each step made."""
    world = World(place)
    with world.interrupts.installed():
        world.run(history)
        settle(world)
        for who in [*world.producers, *world.trainers]:
            world.end(who)
    return world.interrupts.points


def test_a_history_makes_the_same_requests_each_time(place: Arena) -> None:
    """Otherwise a found history could not be run again, or shrunk."""
    for seed in range(12):
        assert points(place, drawn(seed)) == points(place, drawn(seed))


def test_a_history_makes_the_same_requests_on_a_busy_machine(place: Arena) -> None:
    """Looks that are due every second or two came at other steps, and a seed that failed failed in another way."""
    history, take, left = scheduled(2), World.take, iter(range(100))

    def delayed(world: World, step: Step) -> None:
        if next(left, 0) == 99:
            Event().wait(2.1)  # no call of `time.sleep` sleeps here
        take(world, step)

    expected = points(place, history)
    with patch.object(World, "take", delayed):
        assert points(place, history) == expected


def test_a_history_is_the_same_as_text() -> None:
    """A found history is printed as the command that runs it again."""
    for seed in range(200):
        history = drawn(seed)
        assert parse_history(written(history)) == history
    with pytest.raises(ValueError, match="'sleep f0' is no step"):
        parse_history("feed f0 1; sleep f0")


def test_shrinking_leaves_only_what_the_failure_needs() -> None:
    """Steps, inner steps, numbers and slots that do not matter go."""
    history = parse_history("feed f0 4; read a0; feed f1 3 [7: lose s+p0, 9: die f1]; mark; feed f2 2; jump p1")

    def fails(one: History) -> bool:
        return any("p0" in inner.who for step in one for _, inner in step.inner)

    assert written(shrunk(history, fails)) == "feed f1 0 [0: lose p0 0]"


def test_an_endless_step_is_a_hang() -> None:
    """A wait counts its pauses, so that no history waits forever."""
    interrupts = Interrupts(lambda _: None)
    with pytest.raises(Hang), interrupts.step(Step("feed")):
        while True:
            interrupts.reached()

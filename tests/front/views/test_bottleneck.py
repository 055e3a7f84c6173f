"""The monitor names the bottleneck, and each row here is one situation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.views.bottleneck import GroupSituation, StreamSituation, judge
from penstock.views.monitor import rate, seen, situation
from penstock_common.explain.snapshot import EpochSnapshot, GroupSnapshot, MemberSnapshot, StreamSnapshot
from penstock_common.rate_meter import RateMeter
from penstock_common.stream.groups.presence import Liveness
from penstock_common.stream.groups.roster import WaitingWriter
from penstock_common.stream.reported_rates import ReportedRate, ReportedRates
from penstock_common.stream.servers.suitability import ServerMemory

MB = 1 << 20
BUSY = GroupSituation("resnet", live=1, holds=True, waits=0.01, lag_samples=500, lag_bytes=500 * MB, pending=4)
HUNGRY = replace(BUSY, waits=0.6, lag_samples=3, lag_bytes=MB, demand=100.0)
SLOW = replace(BUSY, group="vit", waits=0.0, lag_bytes=900 * MB)
NOW = StreamSituation("train", budget_bytes=1000 * MB, held_bytes=10 * MB, is_making=True, trainers=(HUNGRY,))


@pytest.mark.parametrize(
    ("now", "cause", "words"),
    [
        (
            replace(NOW, workers=4, wished=6, worker_rate=20.0),
            "producers",
            "wait 60 % of their time for producers: 2 more workers would do (one takes 50 ms for a sample)",
        ),
        (replace(NOW, workers=4, wished=5, worker_rate=20.0), "producers", "1 more worker would do"),
        (replace(NOW, workers=4, wished=4, worker_rate=20.0), "producers", "as many as should do are at work"),
        (replace(NOW, workers=4), "producers", "who have not said yet how fast they are"),
        (replace(NOW, workers=4, idle=0.9, wished=6), "jobs", "workers have no job for 90 % of theirs"),
        (
            replace(NOW, workers=1, wished=76, worker_rate=20.0),
            "producers",
            "a sample takes a worker 50 ms, and 75 more workers would do, on several hosts; or a faster transform",
        ),
        (
            replace(NOW, workers=2, wished=214_062, worker_rate=20.0),
            "producers",
            "for producers: more workers would do, more than can be told (one takes 50 ms for a sample)",
        ),
        (NOW, "no workers", "no worker says that it is at work"),
        (replace(NOW, is_making=False), "jobs", "no epoch is being made"),
        (
            replace(NOW, workers=4, trainers=(replace(HUNGRY, lag_samples=1800, ready_samples=900),)),
            "reading",
            "though 900 samples lie ready",
        ),
        (
            replace(NOW, waiting=2, waits_for_memory=True, memory_limit=100 * MB, waited_s=42),
            "memory",
            "the server's memory is full: 2 writers wait (42 s by now)",
        ),
        (
            replace(NOW, waiting=1, waits_for_folder=True, folder="/mnt/fast"),
            "folder",
            "file system of the segments in /mnt/fast is full: 1 writer waits",
        ),
        # foreign keys leave so little memory that writers continue only as trainers free some: their waits are too
        # short to be counted
        (
            replace(NOW, workers=1, wished=9, memory_left=MB, memory_limit=200 * MB, memory_used=180 * MB),
            "memory",
            "the server's memory is full: writers go on only as space is made; 180 MiB of 200 MiB are used",
        ),
        (
            replace(NOW, workers=1, wished=3, worker_rate=9.0, memory_left=MB, held_bytes=900 * MB),
            "producers",
            "2 more workers",
        ),
        (
            replace(NOW, workers=1, wished=3, worker_rate=9.0, memory_left=MB, folder="/dev/shm"),
            "producers",
            "2 more workers",
        ),
        (replace(NOW, waiting=1, memory_left=-5, memory_limit=100 * MB), "memory", "1 writer waits"),
        (
            replace(NOW, trainers=(replace(HUNGRY, silent=(("gpu-1", 41.0, 12),)),)),
            "dead member",
            "member gpu-1 of group resnet was not heard of for 41 s; it holds 12 entries, which others of its group",
        ),
        (
            replace(NOW, trainers=(replace(HUNGRY, live=0, silent=(("gpu-1", None, 1),)),)),
            "dead member",
            "is gone; it holds 1 entry and nobody else reads",
        ),
        (
            replace(NOW, trainers=(replace(HUNGRY, silent=(("gpu-1", 41.0, 12), ("gpu-2", 40.0, 3))),)),
            "dead member",
            "member gpu-1 of group resnet was not heard of for 41 s, nor were 1 more; it holds 12",
        ),
        (
            replace(NOW, waiting=1, trainers=(replace(BUSY, is_ordered=True, missing=(1,)),)),
            "dead member",
            "rank-1 of group resnet is not there; the other ranks cannot go past it",
        ),
        (
            replace(NOW, waiting=1, trainers=(replace(BUSY, waits=0.9),)),
            "unacknowledged",
            "producers wait for space while trainers of resnet wait for samples: 4 entries were given",
        ),
        (
            replace(NOW, is_deleting=True, refusal="full"),
            "deletion",
            "its deletion began and did not end: run",
        ),
        (replace(NOW, trainers=(), is_making=False, has_epochs=False), "nothing made", "no epoch that could be read"),
        (
            replace(NOW, trainers=(replace(HUNGRY, is_ordered=True, silent=(("rank-1", 50.0, 0),)),)),
            "dead member",
            "member rank-1 of group resnet was not heard of for 50 s; the other ranks cannot go past it",
        ),
        (
            replace(NOW, waiting=1, trainers=(BUSY, replace(BUSY, group="vit", live=0, lag_bytes=900 * MB))),
            "absent group",
            "group vit, which nobody reads now, holds 900 MiB of 1000 MiB",
        ),
        (replace(NOW, waiting=1, trainers=(BUSY,)), "trainers", "producers wait for trainers"),
        (
            replace(NOW, waiting=1, trainers=(BUSY, replace(BUSY, group="vit", lag_bytes=900 * MB))),
            "trainers",
            "group vit, of 2 groups the one furthest behind sets the pace",
        ),
        (
            replace(NOW, trainers=(replace(HUNGRY, lag_samples=700, open_epoch=3),)),
            "open epoch",
            "for the end of epoch 3, which has no unread sample, while 700 samples of later epochs lie ready",
        ),
        (
            replace(NOW, trainers=(), open_epoch=3),
            "open epoch",
            "nobody reads, and a trainer would wait for the end of epoch 3, which has no unread sample, while samples",
        ),
        (
            replace(NOW, waiting=1, trainers=(replace(BUSY, waits=0.9, open_epoch=3),)),
            "open epoch",
            "a writer of that epoch pauses, or died. If it died, end the epoch",
        ),
        (
            replace(NOW, is_making=False, is_all_made=True, trainers=(replace(BUSY, lag_bytes=900 * MB),)),
            "balanced",
            "",
        ),
        # a single look may miss that writers wait
        (
            replace(NOW, trainers=(HUNGRY, replace(SLOW, lag_bytes=800 * MB))),
            "slow group",
            "for group vit, which is slower",
        ),
        (
            replace(NOW, trainers=(replace(BUSY, live=0, waits=None, lag_samples=0, lag_bytes=0, pending=0),)),
            "no trainers",
            "nobody reads now, and every sample that there is was read",
        ),
        # a slow group and a fast one: more workers would only wait, too
        (
            replace(NOW, workers=4, wished=6, worker_rate=20.0, room=0.94, trainers=(HUNGRY, SLOW)),
            "slow group",
            (
                "trainers of resnet wait 60 % of their time for group vit, which is slower: the budget is full of what "
                "it has yet to read, and producers wait for space 94 % of their time. A larger budget evens out a "
                "while (penstock produce --budget). A group that stays slower needs a stream of its own (--stream), or "
                "is dropped: penstock groups drop train vit"
            ),
        ),
        (replace(NOW, waiting=1, trainers=(HUNGRY, SLOW)), "slow group", "wait for space. A larger budget"),
        # the slow group has been given all entries, and the fast one is about to get one more
        (replace(NOW, room=0.9, trainers=(HUNGRY, replace(SLOW, lag_bytes=0))), "slow group", "for group vit"),
        (replace(NOW, workers=4, room=0.2, trainers=(HUNGRY, SLOW)), "producers", "who have not said"),
        # a full budget, between two waits that are too short to be counted
        (replace(NOW, workers=4, room=0.9, trainers=(BUSY,)), "trainers", "producers wait for trainers"),
        (replace(NOW, trainers=()), "no trainers", "nobody reads: 10 MiB of 1000 MiB lie ready; start a trainer"),
        (
            replace(
                NOW,
                is_all_made=True,
                is_making=False,
                trainers=(replace(BUSY, live=0, waits=None, lag_samples=0, pending=0),),
            ),
            "done",
            "every planned epoch is made and read",
        ),
        (
            replace(
                NOW,
                is_all_made=True,
                is_making=False,
                trainers=(replace(BUSY, live=0, waits=None, lag_samples=0, pending=31, holds=False),),
            ),
            "done",
            "every planned epoch is made, and groups that left did not acknowledge 31 entries",
        ),
        (
            # epochs that a group has read are kept as long as there is space: they lie ready for nobody
            replace(
                NOW,
                is_all_made=True,
                is_making=False,
                held_bytes=900 * MB,
                trainers=(
                    replace(BUSY, live=0, waits=None, lag_bytes=3 * MB),
                    replace(BUSY, group="vit", live=0, waits=None, lag_bytes=2 * MB, pending=5),
                ),
            ),
            "no trainers",
            "nobody reads: 3.0 MiB of 1000 MiB lie ready, and 5 entries to be given out again; start a trainer",
        ),
        (
            # a group that left: what is there may go, and what went does not come back
            replace(
                NOW,
                trainers=(
                    replace(BUSY, live=0, waits=None, lag_samples=0, lag_bytes=0, pending=0),
                    replace(BUSY, group="eval", live=0, waits=None, holds=False, lag_bytes=3 * MB, lost=(0, 1)),
                ),
            ),
            "no trainers",
            (
                "nobody reads: 3.0 MiB of 1000 MiB lie ready for group eval, which left, so nothing is kept for it, "
                "and 4 entries to be given out again; start a trainer; group eval left before it had read epochs 0-1, "
                "and samples of them were released: its trainer needs start='remaining'"
            ),
        ),
        (replace(NOW, trainers=(BUSY,)), "balanced", "trainers set the pace: they wait 1 % of their time"),
        (replace(NOW, trainers=(replace(BUSY, waits=None),)), "unknown", "not enough is known yet"),
        # an evaluation group that has left and holds nothing limits no stream
        (
            replace(
                NOW, waiting=1, trainers=(BUSY, replace(BUSY, group="eval", live=0, holds=False, lag_bytes=900 * MB))
            ),
            "trainers",
            "group resnet sets the pace",
        ),
    ],
)
def test_the_sentence_names_what_holds_the_stream_up(now: StreamSituation, cause: str, words: str) -> None:
    """A user acts on the sentence, and a wrong cause costs hours."""
    found = judge(now)
    assert found.cause == cause
    assert words in found.text
    assert "\n" not in found.text


@pytest.mark.parametrize(
    "now",
    [
        NOW,
        replace(NOW, workers=4, wished=6, worker_rate=20.0),
        replace(NOW, workers=1, wished=76, worker_rate=20.0),
    ],
)
def test_the_workers_that_are_advised_start_on_a_shared_server(now: StreamSituation) -> None:
    """Without the names that jobs may use, they refuse to start there."""
    remedy = judge(now).remedy
    assert remedy.startswith("penstock worker ")
    assert remedy.endswith(" --allow MODULE --root DIR")


def snapshot(at_s: float = 10.0, made: int = 0, given: int = 0, **changes: object) -> StreamSnapshot:
    """Return two workers of one host, and one trainer that waits for most of its time."""
    told = ReportedRate(100.0, {"training": 0.3, "asking": 0.7}, 0)
    member = MemberSnapshot("gpu-0", Liveness(500), 2)
    group = GroupSnapshot(
        "resnet", "shared", False, True, lag_entries=1, lag_samples=4, lag_bytes=4000, lag_s=0.2, pending_entries=2,
        redelivered_entries=0, dead_letters=0, given_samples=given, given_bytes=given * 1000,
        members=(member, MemberSnapshot("~released", Liveness(), 0)),
    )  # fmt: skip
    worker = ReportedRate(20.0, {"busy": 1.0}, 0)
    found = StreamSnapshot(
        "train", "abc", at_s, budget_bytes=1000 * MB, held_bytes=MB, next_epoch=1, final=None, made_entries=made,
        made_samples=made, made_bytes=made * 1000,
        epochs=(EpochSnapshot(0, "sized", "epoch", 1000, 400, 0, MB, {"resnet": 396}),), groups=(group,), waiting={},
        waited_s=0.0, rates=ReportedRates({"host-a.1f": worker, "host-a.2f": worker}, {("resnet", "gpu-0"): told}, {}),
        memory=ServerMemory(2 * MB, 0, "noeviction"),
    )  # fmt: skip
    return replace(found, **changes)  # type: ignore[arg-type]


def test_rates_are_of_the_time_between_two_looks() -> None:
    """A count since the beginning of a run hides that the run stands still now."""
    found = seen(snapshot(10.0, 100, 40), snapshot(12.0, 160, 60))
    assert found["in"] == {"samples_per_s": 30.0, "bytes_per_s": 30_000.0, "entries_per_s": 30.0}
    assert found["groups"][0]["out"] == {"samples_per_s": 10.0, "bytes_per_s": 10_000.0}
    assert found["workers"] == [
        {"host": "host-a", "workers": 2, "samples_per_s": 40.0, "busy": 1.0, "room": 0.0, "idle": 0.0}
    ]
    assert found["groups"][0]["members"][0]["waits"] == 0.7
    assert "wait 70 % of their time for producers: 3 more workers would do" in found["bottleneck"]["text"]


def test_a_stream_made_anew_has_no_rates_yet() -> None:
    """A difference between two lives of a name would be nonsense, and even negative."""
    assert seen(snapshot(10.0, 100), snapshot(12.0, 5, id="def"))["in"]["samples_per_s"] is None
    assert seen(None, snapshot())["in"]["samples_per_s"] is None
    assert rate(5, 3, 1.0) is None


def test_a_writer_that_waits_and_a_full_server_are_told_apart() -> None:
    """Faster trainers fix one, and more memory the other."""
    waiter = WaitingWriter(0, 0, need_bytes=5, held_bytes=5, why="budget", is_next=False)
    now = situation(snapshot(waiting={(0, 3): waiter}))
    assert (now.waiting, now.waits_for_memory) == (1, False)
    assert situation(snapshot(waiting={(0, 3): replace(waiter, why="memory")})).waits_for_memory
    assert situation(snapshot(waiting={(0, 3): replace(waiter, why="folder")})).waits_for_folder


def test_the_share_of_waiting_is_what_a_training_loop_says_of_itself() -> None:
    """The rule reads a field that trainers write: if its name changed, no wait would be seen."""
    now = [0.0]
    pace = RateMeter("training", lambda: now[0])
    pace.enter("training")
    now[0] = 3.0
    pace.count(3)
    pace.enter("asking")
    now[0] = 4.0
    assert pace.look().shares["training"] == pytest.approx(0.75, abs=0.05)

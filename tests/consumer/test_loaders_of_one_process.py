"""Several loaders of one process, and several threads at one loader: nothing is delivered twice or cut short in
silence.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest

import penstock
from penstock.errors import (
    GroupKindMismatch,
    MemberReplaced,
    PenstockError,
    WaitTimeout,
)
from penstock_common.stream.commands import Client
from penstock_consumer.read import member
from penstock_consumer.read.claims import Claim
from penstock_consumer.read.heartbeat import MANY_DELIVERIES
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.options import default_member
from tests.contracts.feed import produce

COUNT, BLOCK, BATCH = 400, 5, 10


def loader(url: str, *, timeout_s: float = 20, **options: Any) -> Loader:
    """Return a loader with the default name."""
    tuning = penstock.Tuning(timeout_s=timeout_s, notify=lambda _: None)
    return Loader("t", group="g", batch_size=BATCH, url=url, tuning=tuning, **options)


def test_loaders_in_threads_of_one_process_share_the_samples(any_url: str) -> None:
    """This is what the error for a loader in two threads advises. As one member each thread got all samples."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    found, names, all_joined = list[int](), set[str](), threading.Barrier(3)

    def train() -> None:
        with loader(any_url, timeout_s=5) as one, suppress(WaitTimeout):  # the others may read the whole epoch
            names.add(one.member)
            all_joined.wait(20)
            for batch in one:
                found.extend(batch["y"].tolist())

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(COUNT))
    assert len(names) == 3


@pytest.mark.parametrize(
    ("order", "advice"),
    [
        (None, r"as member '.*each loader in the thread"),
        (penstock.Canonical(), "as 'rank-0': this one stops; a rank is one loader, so close the older one first"),
    ],
    ids=["shared", "canonical"],
)
def test_a_second_loader_of_a_thread_ends_the_first_before_another_batch(any_url: str, order: Any, advice: str) -> None:
    """A notebook's cell that is run again makes one. Until the next heartbeat both gave the same samples."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    with loader(any_url, order=order) as first, loader(any_url, order=order) as second:
        older = iter(first)
        given = next(iter(second))["y"].tolist()
        with pytest.raises(MemberReplaced, match=f"another loader of this process joined group 'g' {advice}"):
            next(older)
        found = [number for batch in second for number in batch["y"].tolist()]
    assert sorted(given + found) == list(range(COUNT))


@pytest.mark.parametrize("order", ["shared", "canonical"])
def test_of_two_threads_that_join_at_once_the_older_alone_ends(
    any_url: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server named the second one, and this process the first one. Each was told that the other replaced it."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    is_on_server, has_other, ends = threading.Event(), threading.Event(), dict[str, str]()
    join = Claim.join

    def join_and_wait(claim: Claim, start: Any) -> None:
        join(claim, start)
        if threading.current_thread().name == "older":
            is_on_server.set()
            has_other.wait(1)  # the newer one joins meanwhile, if it can

    monkeypatch.setattr(Claim, "join", join_and_wait)

    def train() -> None:
        name, how = threading.current_thread().name, "ended"
        tuning = penstock.Tuning(timeout_s=20, member=None if order == "canonical" else "m", notify=lambda _: None)
        canonical = penstock.Canonical() if order == "canonical" else None
        try:
            one = Loader("t", group="g", batch_size=BATCH, url=any_url, order=canonical, tuning=tuning)
            if name == "newer":
                has_other.set()
            for _ in one:
                time.sleep(0.05)
            one.close()
        except MemberReplaced as error:
            how = str(error)
        ends[name] = how

    older, newer = (threading.Thread(target=train, name=name) for name in ("older", "newer"))
    older.start()
    is_on_server.wait(20)
    newer.start()
    for thread in (older, newer):
        thread.join(60)
    assert ends["newer"] == "ended"
    assert ends["older"].startswith("another loader of this process joined group 'g'")


def test_a_forked_process_has_no_member_and_no_lock_of_its_parents(any_url: str) -> None:
    """Another thread of the parent may join just then, and the child would wait for its lock for ever."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    with loader(any_url) as one, member._JOINING_LOCK:
        next(iter(one))
        if (pid := os.fork()) == 0:
            os._exit(0 if member._JOINING_LOCK.acquire(timeout=5) and not member._MEMBERS else 1)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_loader_that_could_not_join_ends_no_other(any_url: str) -> None:
    """The older one keeps the name, and a process that takes it later is not taken for a loader of this one."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    with loader(any_url, order=penstock.Canonical()) as one:
        with pytest.raises(GroupKindMismatch):
            Loader("t", group="g", batch_size=BATCH + 1, url=any_url, order=penstock.Canonical())
        assert sorted(number for batch in one for number in batch["y"].tolist()) == list(range(COUNT))
        member = one._member
        assert member is not None
        assert not member.claim.who.is_succeeded.is_set()


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("order", [None, penstock.Canonical()], ids=["shared", "canonical"])
def test_a_replaced_loader_says_that_its_last_batch_comes_again(any_url: str, order: Any, is_closed: bool) -> None:
    """A loop that takes as many batches as there are never asks for the next one, which acknowledges the last."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    said: list[str] = []
    tuning = penstock.Tuning(timeout_s=20, notify=said.append)
    first = Loader("t", group="g", batch_size=BATCH, url=any_url, order=order, tuning=tuning)
    batches = iter(first)
    for _ in range(COUNT // BATCH):
        last = next(batches)["y"].tolist()
    if is_closed:
        first.close()
    with loader(any_url, order=order) as second:
        again = [] if is_closed else [number for batch in second for number in batch["y"].tolist()]
    assert again == ([] if is_closed else last)
    assert ["it may come again" in line for line in said] == ([] if is_closed else [True])


# --- close ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, COUNT // BATCH, COUNT])
@pytest.mark.parametrize("order", [None, penstock.Canonical()], ids=["shared", "canonical"])
def test_a_second_close_does_nothing(any_url: str, order: Any, batches: int) -> None:
    """It sent the last position again, as a member that had left, and said that another process had joined."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    with loader(any_url, order=order) as one:
        for _ in islice(one, batches):
            pass
        one.close()
        one.close()


def test_a_second_close_does_nothing_after_one_that_failed(any_url: str) -> None:
    """A `with` statement closes once more, and its error would hide the first."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    one = loader(any_url, order=penstock.Canonical())
    for _ in islice(one, 3):
        pass
    with loader(any_url, order=penstock.Canonical()):
        with pytest.raises(MemberReplaced, match="another loader of this process"):
            one.close()
        one.close()


def test_a_second_close_of_a_mixture_does_nothing(any_url: str) -> None:
    """Each of its loaders is closed once."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    parts = {group: (Loader("t", group=group, batch_size=BATCH, url=any_url), 1) for group in "ab"}
    with penstock.mix(parts) as mixture:
        next(iter(mixture))
        mixture.close()


def test_a_mixture_of_one_group_with_itself_is_refused(any_url: str) -> None:
    """Both parts would be one member, and give each sample twice."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    with loader(any_url) as one, loader(any_url) as two, pytest.raises(MemberReplaced):
        list(penstock.mix({"a": (one, 1), "b": (two, 1)}))


def test_the_main_thread_keeps_the_name_of_its_process() -> None:
    """A container that starts again goes on with what it held."""
    names: list[str] = []
    thread = threading.Thread(target=lambda: names.extend([default_member(), default_member()]))
    thread.start()
    thread.join()
    assert default_member().endswith(f"-{os.getpid()}")
    assert len(set(names)) == 1
    assert names[0].startswith(f"{default_member()}-")


@pytest.mark.parametrize("policy", ["on_next", "manual", "on_checkpoint"])
def test_a_loop_whose_loader_another_thread_closes_says_so(any_url: str, policy: Any) -> None:
    """It ended like a whole epoch, went on with what was read ahead, or met an assertion."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    one = loader(any_url, acknowledge=policy)
    batches = iter(one)
    next(batches)
    thread = threading.Thread(target=one.close)
    thread.start()
    thread.join(20)
    with pytest.raises(PenstockError, match="is closed"):
        next(batches)


def test_a_loop_that_waits_while_another_thread_closes_its_loader_says_so(any_url: str) -> None:
    """No epoch has come, so nothing else would end the wait."""
    with penstock.Writer("t", url=any_url, spec={"y": ("int64", ())}):
        pass
    one = loader(any_url)
    thread = threading.Timer(0.5, one.close)
    thread.start()
    with pytest.raises(PenstockError, match="is closed"):
        next(iter(one))
    thread.join(20)


def test_a_loop_that_closes_its_loader_itself_ends(any_url: str) -> None:
    """A program that has enough closes it in the loop, and needs no error."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    one = loader(any_url)
    seen = 0
    for _ in one:
        seen += 1
        one.close()
    assert seen == 1


def test_loaders_that_were_closed_make_no_entry_suspect(any_url: str, any_client: Client) -> None:
    """A program that is started again and again, or a page that is reloaded, trains on nothing that kills it."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    said: list[str] = []
    for _ in range(MANY_DELIVERIES + 2):
        tuning = penstock.Tuning(notify=said.append)
        with Loader("t", group="g", batch_size=BATCH, url=any_url, tuning=tuning, acknowledge="manual") as one:
            next(iter(one))
    found = [number for batch in loader(any_url) for number in batch["y"].tolist()]
    assert sorted(found) == list(range(COUNT))
    assert not [line for line in said if "does training die on it?" in line]


def test_a_checkpoint_after_close_says_that_the_rank_is_closed(any_url: str) -> None:
    """It was told of another process, which did not exist."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    one = loader(any_url, order="canonical", acknowledge="on_checkpoint")
    next(iter(one))
    one.close()
    with pytest.raises(PenstockError, match="is closed"):
        one.checkpointed()
    two = loader(any_url, order="canonical", acknowledge="on_checkpoint")
    next(iter(two))
    two.checkpointed()
    two.close()
    two.checkpointed()  # it has nothing left

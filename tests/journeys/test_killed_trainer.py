"""Trainers that die, vanish, are doubled or interrupted: all is trained on, and twice only what a crash allows."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest

from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, run_script
from penstock_common.stream.streams import set_plan
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, open_stream, produce, sample
from tests.contracts.processes import Child, child
from tests.tuned import tuned

COUNT = 600


def train(
    url: str, member: str, batches: str, pause_s: str = "0", epochs: str = "1", lease_s: str = "1", every_s: str = "0"
) -> None:
    """A trainer: prints each batch's numbers after its step; stops in the middle of step ``batches``, if not -1."""
    loader = Loader(
        "t",
        group="g",
        batch_size=10,
        url=url,
        tuning=Tuning(
            member=member, lease_s=float(lease_s), timeout_s=30, prefetch_bytes=3000, acknowledge_every_s=float(every_s)
        ),
    )
    step = 0
    with loader:
        for _ in range(int(epochs)):
            for batch in loader:
                step += 1
                if step == int(batches):
                    print("middle", flush=True)
                    time.sleep(60)
                time.sleep(float(pause_s))
                print(*batch["y"].tolist(), flush=True)


def steps(lines: list[str]) -> list[int]:
    """The numbers trained on, from what a trainer printed."""
    return [int(word) for line in lines if line and line[0].isdigit() for word in line.split()]


def run_until_middle(trainer: Child) -> list[str]:
    """Return the lines that a trainer printed until it stopped in a step."""
    lines: list[str] = []
    while (line := trainer.line()) != "middle":
        assert line
        lines.append(line)
    return lines


def test_a_trainer_restarted_under_its_name_goes_on_at_once(any_url: str, any_client: Client) -> None:
    """Kill -9 in a step, with a prefetch queue full: what it had been given is its own, no lease has to lapse."""
    produce(any_url, "t", COUNT, block_samples=7)
    logged = kill_in_a_step(any_url)
    with child(train, any_url, "killed", -1, 0, 1, 600) as trainer:
        require_everything(any_client, logged, trainer.rest())


def test_what_a_killed_trainer_had_not_trained_on_goes_to_another(url: str, client: Client) -> None:
    """A member with another name, as in a new container, gets after a lease exactly what is unacknowledged."""
    produce(url, "t", COUNT, block_samples=7)
    logged = kill_in_a_step(url)
    with child(train, url, "other", -1) as trainer:
        require_everything(client, logged, trainer.rest())


def test_acknowledgements_that_were_not_sent_yet_are_trained_on_again(any_url: str) -> None:
    """A loader that sends them at intervals repeats at most one interval after a kill, and loses nothing."""
    produce(any_url, "t", COUNT, block_samples=7)
    with child(train, any_url, "killed", 12, 0, 1, 600, 100) as trainer:
        logged = run_until_middle(trainer)
        logged += trainer.kill()
    with child(train, any_url, "killed", -1, 0, 1, 600) as trainer:
        rest = trainer.rest()
    trained = Counter(steps(logged)) + Counter(steps(rest))
    assert set(trained) == set(range(COUNT))
    repeated = {number for number, count in trained.items() if count > 1}
    assert len(repeated) > 10
    assert repeated <= set(steps(logged))
    assert max(trained.values()) == 2


def kill_in_a_step(url: str) -> list[str]:
    """Return the lines that a trainer printed before it was killed in its twelfth step."""
    with child(train, url, "killed", 12) as trainer:
        logged = run_until_middle(trainer)
        return logged + trainer.kill()


def require_everything(client: Client, logged: list[str], rest: list[str]) -> None:
    """All was trained on; twice at most the step before the kill, which the loop could not acknowledge any more."""
    trained = Counter(steps(logged)) + Counter(steps(rest))
    assert set(trained) == set(range(COUNT))
    repeated = {number for number, count in trained.items() if count > 1}
    assert repeated <= set(steps(logged[-1:]))
    assert max(trained.values()) <= 2
    assert client.xpending(open_stream(client, "t").partitions[0].entries(0), "g")["pending"] == 0


def test_a_living_member_takes_over_within_the_running_epoch(any_url: str) -> None:
    """If one of two members dies, the other's iteration ends only when it has everything."""
    produce(any_url, "t", COUNT, block_samples=7)
    with child(train, any_url, "dies", 5, 0.01) as dying:
        logged = run_until_middle(dying)
        with child(train, any_url, "lives", -1, 0.01) as living:
            rest = [living.line()]
            logged += dying.kill()  # long before the other has read all it can get
            rest += living.rest()
    trained = Counter(steps(logged)) + Counter(steps(rest))
    assert set(trained) == set(range(COUNT))
    assert sum(trained.values()) - COUNT <= 10


def test_a_member_that_had_gone_on_takes_up_what_one_that_died_later_left_behind(any_url: str) -> None:
    """The live member waits for the next epoch: what it takes over is trained on, not held until it leaves."""
    produce(any_url, "t", 60, block_samples=7)
    with child(train, any_url, "dies", 3, 0, 1, 1) as dying:
        logged = run_until_middle(dying)  # with all of the epoch in its hands
        produce(any_url, "t", 20, block_samples=7)
        with Loader(
            "t",
            group="g",
            batch_size=10,
            url=any_url,
            tuning=Tuning(member="lives", lease_s=1, timeout_s=20),
        ) as lives:
            assert sum(len(batch["y"]) for batch in lives) == 20
            logged += dying.kill()
            rest = [number for batch in lives for number in batch["y"].tolist()]
    assert set(steps(logged)) | set(rest) == set(range(60))
    assert len(steps(logged)) + len(rest) - 60 <= 10


def test_a_member_that_closes_hands_over_without_a_lease(any_url: str) -> None:
    """A trainer that is scaled down leaves the group, so no other member waits for it."""
    produce(any_url, "t", COUNT, block_samples=7)
    settings: dict[str, Any] = {"group": "g", "batch_size": 10, "url": any_url, "timeout_s": 20, "prefetch_bytes": 3000}
    with Loader("t", **tuned("Loader", settings, Tuning(member="stays", lease_s=600))) as stays:
        leaves = Loader("t", **tuned("Loader", settings, Tuning(member="leaves", lease_s=600)))
        found = next(iter(leaves))["y"].tolist()
        threading.Timer(0.5, leaves.close).start()
        began = time.monotonic()
        found += [number for batch in stays for number in batch["y"].tolist()]
        assert time.monotonic() - began < 5
    assert sorted(found) == list(range(COUNT))


def test_connections_cut_while_reading_repeat_and_lose_nothing(url: str, client: Client) -> None:
    """Every connection of a trainer is cut again and again; entries under way are found by id."""
    produce(url, "t", COUNT, block_samples=3)
    said: list[str] = []
    found: list[int] = []
    with Loader(
        "t",
        group="g",
        batch_size=5,
        url=url,
        tuning=Tuning(timeout_s=20, prefetch_bytes=400, notify=said.append),
    ) as loader:
        for number, batch in enumerate(loader):
            found += batch["y"].tolist()
            if number % 10 == 5:
                for info in client.client_list():
                    if "xreadgroup" in info["cmd"] or "eval" in info["cmd"]:
                        client.client_kill_filter(_id=info["id"])
            time.sleep(0.002)
    assert any("connection broke while reading" in line for line in said)
    assert sorted(found) == list(range(COUNT))


@pytest.mark.parametrize("told", [0, 1])
def test_an_epoch_that_is_just_being_opened_is_waited_for_and_not_passed_by(
    any_url: str, any_client: Client, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer may look between the epoch's manifest and its partitions: it must not take it for a released one."""
    produce(any_url, "t", 10, partitions=2)
    scripts = iter(range(100))
    has_looked = threading.Event()

    def slow(client: Client, script: str, *rest: Any) -> Any:
        if script is load_script("open_epoch") and next(scripts) == told:
            assert has_looked.wait(10)
        return run_script(client, script, *rest)

    with Loader("t", group="g", batch_size=5, url=any_url, tuning=Tuning(timeout_s=20)) as loader:
        assert sum(len(batch["y"]) for batch in loader) == 10
        monkeypatch.setattr("penstock_common.stream.manifest.run_script", slow)
        opening = threading.Thread(target=produce, args=(any_url, "t", 10))
        opening.start()
        threading.Timer(1.5, has_looked.set).start()  # longer than one wait for a hint
        assert sum(len(batch["y"]) for batch in loader) == 10
        opening.join()


def test_a_connection_cut_while_a_trainer_waits_for_an_epoch_is_made_again(any_url: str, any_client: Client) -> None:
    """It may wait for hours, with no data under way: one broken connection then must not end a training."""
    produce(any_url, "t", 10)
    said: list[str] = []
    cuts = 0

    def cut_and_go_on() -> None:
        nonlocal cuts
        while not cuts:  # until the wait was met
            cuts = sum(
                any_client.client_kill_filter(_id=i["id"]) for i in any_client.client_list() if i["cmd"] == "xread"
            )
        produce(any_url, "t", 10)

    with Loader("t", group="g", batch_size=5, url=any_url, tuning=Tuning(timeout_s=20, notify=said.append)) as loader:
        assert sum(len(batch["y"]) for batch in loader) == 10
        other = threading.Thread(target=cut_and_go_on)
        other.start()
        assert sum(len(batch["y"]) for batch in loader) == 10
        other.join()
    assert cuts == 1
    assert any("connection broke while asking the server" in line for line in said)


def test_a_server_that_restarts_while_a_trainer_reads_and_a_writer_writes(fresh_server: Any, tmp_path: Any) -> None:
    """With its append-only file a server comes back as it was, and both sides go on by themselves."""
    server = fresh_server(appendonly=True, directory=tmp_path, extra={"appendfsync": "always"})
    url, port = server.url, server.port
    found: list[int] = []
    errors: list[BaseException] = []
    quiet: dict[str, Any] = {"url": url, "notify": lambda _: None}

    def write() -> None:
        try:
            with (
                Writer("t", spec=SPEC, **tuned("Writer", quiet, Tuning(block_bytes=5 * SAMPLE_BYTES))) as writer,
                writer.epoch() as epoch,
            ):
                for number in range(COUNT):
                    epoch.write(sample(number))
                    time.sleep(0.002)
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        try:
            with Loader(
                "t", group="g", batch_size=5, **tuned("Loader", quiet, Tuning(timeout_s=30, lease_s=2))
            ) as loader:
                for batch in loader:
                    found.extend(batch["y"].tolist())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    while len(found) < 50 and not errors:
        time.sleep(0.01)
    server.close()
    fresh_server(appendonly=True, directory=tmp_path, port=port, extra={"appendfsync": "always"})
    for thread in threads:
        thread.join(30)
    assert not errors
    assert set(found) == set(range(COUNT))
    assert len(found) == COUNT


def test_a_server_that_stood_still_takes_nothing_from_the_living(fresh_server: Any) -> None:
    """A stopped server ages every lease at once; that proves nothing about their holders."""
    server = fresh_server()
    produce(server.url, "t", COUNT, block_samples=7)
    settings: dict[str, Any] = {
        "group": "g", "batch_size": 10, "url": server.url, "timeout_s": 20, "lease_s": 1.0, "prefetch_bytes": 3000,
    }  # fmt: skip
    said: list[str] = []
    with (
        Loader("t", **tuned("Loader", settings, Tuning(member="one", notify=said.append))) as one,
        Loader("t", **tuned("Loader", settings, Tuning(member="two", notify=said.append))) as two,
    ):
        ones, twos = iter(one), iter(two)
        found = next(ones)["y"].tolist() + next(twos)["y"].tolist()
        for _ in range(2):
            os.kill(server.pid, signal.SIGSTOP)
            time.sleep(1.6)
            os.kill(server.pid, signal.SIGCONT)
            time.sleep(0.4)
        for batches in (ones, twos):
            found += [number for batch in batches for number in batch["y"].tolist()]
    assert sorted(found) == list(range(COUNT))
    assert not any("lost" in line for line in said)


def idle(url: str) -> None:
    """A trainer that ends without closing anything, with a reader, a keeper and a full queue."""
    loader = Loader("t", group="g", batch_size=10, url=url, tuning=Tuning(member="m", prefetch_bytes=1000))
    print(*next(iter(loader))["y"].tolist(), flush=True)


def test_a_program_that_just_ends_does_not_hang_and_hands_back(any_url: str, any_client: Client) -> None:
    """A script may leave a loader open, its interpreter must still end, and other members continue at once."""
    produce(any_url, "t", COUNT, block_samples=7)
    with child(idle, any_url) as trainer:
        trainer.rest(timeout_s=10)
    began = time.monotonic()
    set_plan(any_client, open_stream(any_client, "t"), 1)
    with Loader("t", group="g", batch_size=10, url=any_url, tuning=Tuning(timeout_s=20)) as loader:
        assert sorted(number for batch in loader for number in batch["y"].tolist()) == list(range(COUNT))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("where", ["waiting", "training"])
def test_ctrl_c_ends_a_trainer_within_seconds(any_url: str, where: str) -> None:
    """A user who presses Ctrl-C does not want to wait for a lease or a timeout."""
    if where == "training":
        produce(any_url, "t", COUNT, block_samples=7)
    else:
        with (
            Writer("t", url=any_url, spec=SPEC, tuning=Tuning(notify=lambda _: None)) as writer,
            writer.epoch(sizes=[20]).shard(0) as s,
        ):
            for number in range(20):
                s.write(sample(number))
    with child(train, any_url, "m", -1, 0.02, 5) as trainer:
        assert trainer.line()
        if where == "waiting":
            assert trainer.line()
            time.sleep(0.3)
        began = time.monotonic()
        trainer.interrupt()
        trainer.finish(timeout_s=10)
        assert time.monotonic() - began < 2
        assert trainer.process.returncode != 0
        assert "KeyboardInterrupt" in trainer.errors()

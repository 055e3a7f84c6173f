"""Deleting a stream: nothing of it stays on the server, in any state, and no process that used it hangs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import redis

from penstock.__main__ import main
from penstock.cli.doctor import BAD
from penstock_common.errors import EpochNotFound, PenstockError, StreamDeleted, StreamNotFound
from penstock_common.server.client import ControlClient
from penstock_common.server.scripts import load_script
from penstock_common.server.slots import SLOTS
from penstock_common.stream.commands import Client, run_script
from penstock_common.stream.groups.roster import Membership, join_group, pin_epoch
from penstock_common.stream.keys import StreamKeys, is_of_stream
from penstock_common.stream.manifest import abandon_epoch, load_manifest, open_epoch
from penstock_common.stream.removal import deletion
from penstock_common.stream.removal.deletion import delete_stream
from penstock_common.stream.servers.budgets import admit_stream
from penstock_common.stream.servers.embedded import find_servers
from penstock_common.stream.streams import Stream, create_stream, load_stream, set_field, set_plan
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.writer import Writer
from tests.clusters import started_cluster, until
from tests.contracts.feed import SPEC, loader_of, numbers, produce, sample, writer_of
from tests.contracts.processes import child

VIEWS = {
    "audit t": 1, "epochs list t": 0, "inspect": 0, "inspect t": 0, "monitor --once": 0, "monitor t --once": 0,
    "doctor --no-probe": BAD,
}  # fmt: skip
"""Command -> its exit code for a stream whose deletion did not end."""


def all_keys(client: Client) -> set[bytes]:
    """Return every key of the server, by SCAN."""
    return set(client.scan_iter(match="*", count=100))


def in_every_state(url: str, client: Client, partitions: int) -> Stream:
    """Make a stream with epochs in all states: read, half read, bad, abandoned, half opened, half released."""
    produce(url, "t", 60, epochs=4, partitions=partitions, block_samples=5)
    stream = load_stream(client, "t")
    with loader_of(url, "done") as done:
        numbers(done)
    with suppress(PenstockError), loader_of(url, "half", batch_size=5) as half:
        next(iter(half))
    join_group(client, Membership(stream, "night", "", ""), declared=True)
    with writer_of(url) as writer:
        with writer.epoch() as bad:
            bad.write(sample(0))
            bad.quarantine("truncated")
        writer.epoch().write(sample(1))  # stays open
        abandoned = writer.epoch()
        abandoned.write(sample(2))
        abandoned.flush()
        abandon_epoch(client, stream, abandoned.number)
    first = stream.partitions[0]
    entry = client.xadd(first.entries(1), {"meta": b"{", "x": b"not an entry"})
    with loader_of(url, "unlucky", start=1) as unlucky:
        numbers(unlucky)
    assert client.exists(first.dead(1, "unlucky")), entry
    pin_epoch(client, stream, 2)
    half_open = open_epoch(client, stream)
    client.hdel(stream.partitions[-1].roster, f"e:{half_open.epoch}")  # as if its opener had died before the last one
    released = load_manifest(client, stream, 0)
    run_script(
        client, load_script("retire_epoch"), [first.roster, first.state(0)], ["", 0, released.id]
    )  # begun, and left
    client.hset(f"penstock:{{t.{first.tag}}}:1:pos:later", "0", "5")  # a kind of group of a later version
    client.set(f"penstock:{{t.{first.tag}}}:99:leftover", "of an epoch that nothing knows any more")
    return stream


@pytest.mark.parametrize("partitions", [1, 3])
def test_nothing_of_a_deleted_stream_stays_on_the_server(url: str, client: Client, partitions: int) -> None:
    """This holds for any half-done work, and other streams keep every key, even those whose names begin alike."""
    for name in ("t.x", "tt", "t-1"):
        produce(url, name, 10, partitions=partitions)
    others = all_keys(client)
    stream = in_every_state(url, client, partitions)
    mine = all_keys(client) - others
    assert len(mine) > 20
    assert all(is_of_stream(key.decode(), "t") for key in mine)
    gone = delete_stream(client, "t")
    assert all_keys(client) == others
    assert gone.keys == len(mine)
    assert (gone.epochs, gone.stream) == (8, stream.name)
    with pytest.raises(StreamNotFound, match="no stream 't'"):
        delete_stream(client, "t")


def test_a_stream_made_anew_under_the_name_starts_from_nothing(any_url: str, any_client: Client) -> None:
    """No epoch, group or number of the former life may reach into the new one."""
    in_every_state(any_url, any_client, 2)
    delete_stream(any_client, "t")
    produce(any_url, "t", 10)
    with loader_of(any_url, "done") as loader:
        assert numbers(loader) == list(range(10))
    admit_stream(any_client, "t", None)


@pytest.mark.parametrize("dies_at", [1, 2, 3, 4])
def test_an_interrupted_deletion_is_run_again(
    any_url: str,
    any_client: Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dies_at: int,
) -> None:
    """Ctrl-C in the middle leaves a stream that cannot be used, and that the same command removes."""
    stream = in_every_state(any_url, any_client, 2)
    steps = 0
    unlink, retire = redis.Redis.unlink, deletion.retire_epoch

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def step(*args: object) -> object:
            nonlocal steps
            steps += 1
            if steps == dies_at * 4:
                raise KeyboardInterrupt
            return call(*args)

        return step

    class Dying(ControlClient):
        def unlink(self, *names: object) -> int:
            for name in names:
                dying(unlink)(self, name)
            return len(names)

    monkeypatch.setattr(deletion, "retire_epoch", dying(retire))
    with Dying.from_url(any_url) as interrupted:
        with pytest.raises(KeyboardInterrupt):
            delete_stream(interrupted, "t")
        with pytest.raises(StreamDeleted, match="is being deleted; if that was interrupted, `penstock delete t` again"):
            open_epoch(interrupted, stream)
        with pytest.raises(StreamDeleted, match="is being deleted"):
            Writer("t", url=any_url)
    for command, code in VIEWS.items():
        assert main([*command.split(), "--url", any_url]) == code, command
        told = capsys.readouterr()
        assert "its deletion began and did not end: run `penstock delete t` again" in told.out + told.err, command
        assert ": clean" not in told.out
    monkeypatch.setattr(deletion, "retire_epoch", retire)
    assert main(["delete", "t", "--yes", "--force", "--url", any_url]) == 0
    assert not all_keys(any_client)


def test_a_deletion_without_a_master_says_whether_it_deleted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs every master, because only a scan finds what earlier streams of the name left."""
    with started_cluster(find_servers()[0]) as cluster:
        own, lost = cluster.master_of(StreamKeys("t").meta), cluster.masters[1]
        assert own is cluster.master_of(StreamKeys("u").meta) is not lost
        for name in ("t", "u"):
            produce(cluster.url, name, 20, partitions=1)  # all of it is on one master
        lost_id, slots = cluster.id_of(lost), range(SLOTS // 3, 2 * SLOTS // 3)

        def delete(name: str) -> tuple[int, str]:
            status = main(["delete", name, "--yes", "--url", cluster.url])
            return status, capsys.readouterr().err

        def kept(name: str) -> list[bytes]:
            return [key for key in sorted(cluster.asked(own, "KEYS", "*")) if is_of_stream(key.decode(), name)]

        def lose(stream: Stream) -> str:
            lost.kill()
            return remove(stream)

        remove = deletion._remove_segments
        with monkeypatch.context() as patch:
            patch.setattr(deletion, "_remove_segments", lose)
            status, told = delete("t")
        away = f"no Redis answers at redis://127.0.0.1:{lost.port}"
        rest = "once every server takes writes, `penstock delete t` deletes the rest"
        assert (status, f"stream 't' is deleted in part; {rest}: {away}" in told) == (1, True), told
        before = {name: kept(name) for name in ("t", "u")}
        for name, keys in before.items():
            status, told = delete(name)
            words = f"stream {name!r} is left as it was, because any server may have keys of it: {away}"
            assert (status, words in told) == (1, True), told
            assert kept(name) == keys
        cluster.masters.remove(lost)
        for node in cluster.masters:
            cluster.asked(node, "CLUSTER", "FORGET", lost_id)
        cluster.asked(own, "CLUSTER", "ADDSLOTS", *slots)
        until(
            lambda: all(b"cluster_slots_ok:16384" in cluster.asked(one, "CLUSTER", "INFO") for one in cluster.masters)
        )
        assert [delete(name)[0] for name in before] == [0, 0]
        assert not [key for node in cluster.masters for key in cluster.asked(node, "KEYS", "*")]


@pytest.mark.parametrize("wrong", [b"", b"\xff", b"another"])
def test_a_stream_whose_id_another_program_wrote_is_deleted(any_url: str, any_client: Client, wrong: bytes) -> None:
    """Scripts compare the id as it is, so that it need not be one."""
    produce(any_url, "t", 10)
    any_client.hset(load_stream(any_client, "t").keys.meta, "id", wrong)
    assert main(["delete", "t", "--yes", "--force", "--url", any_url]) == 0
    assert {key for key in all_keys(any_client) if is_of_stream(key.decode(), "t")} == set()


def test_nothing_that_still_runs_brings_a_deleted_stream_back(any_url: str, any_client: Client) -> None:
    """Half a meta, or a roster with one group, would stay for ever and confuse the next stream of that name."""
    produce(any_url, "t", 10)
    stream = load_stream(any_client, "t")
    delete_stream(any_client, "t")
    calls: list[Callable[[], object]] = [
        lambda: open_epoch(any_client, stream),
        lambda: open_epoch(any_client, stream, 0),
        lambda: join_group(any_client, Membership(stream, "g", "m", "1")),
        lambda: set_plan(any_client, stream, 3),
        lambda: set_field(any_client, stream, "retention", "epochs:1"),
        lambda: load_manifest(any_client, stream, 0),
    ]
    for call in calls:
        with pytest.raises(StreamDeleted, match="stream 't' was deleted"):
            call()
        assert not all_keys(any_client)


class TestLive:
    """A process that uses the stream while it is deleted soon stops with a named error."""

    def test_a_writer_stops(self, any_url: str, any_client: Client) -> None:
        """This holds in the middle of an epoch, between two, and in a feed. No connection stays behind."""
        before = len(any_client.client_list())
        writers = [writer_of(any_url, spec=SPEC, block_bytes=240) for _ in range(3)]
        within = writers[0].epoch()
        within.write(sample(0))
        writers[2].write(sample(0))
        delete_stream(any_client, "t")
        began = time.monotonic()
        with pytest.raises(StreamDeleted, match=r"stream 't' was deleted.*: start again to use it"):
            for number in range(100):
                within.write(sample(number))
        with pytest.raises(StreamDeleted):
            writers[1].epoch()
        with pytest.raises(StreamDeleted):
            for number in range(100):
                writers[2].write(sample(number))
        assert time.monotonic() - began < 10
        for writer in writers:
            with suppress(StreamDeleted), writer:
                pass
        until(lambda: len(any_client.client_list()) == before)
        assert not all_keys(any_client)

    @pytest.mark.parametrize("is_waiting", [False, True])
    def test_a_loader_stops(self, any_url: str, any_client: Client, is_waiting: bool) -> None:
        """This holds while it trains, and while it waits for the next epoch."""
        produce(any_url, "t", 1000, block_samples=5)
        loader = Loader(
            "t", group="g", batch_size=5, url=any_url, tuning=Tuning(notify=lambda _: None, prefetch_bytes=500)
        )
        batches = iter(loader)
        next(batches)
        if is_waiting:
            numbers(batches)
        delete_stream(any_client, "t")
        began = time.monotonic()
        with pytest.raises(StreamDeleted, match="stream 't' was deleted"):
            numbers(iter(loader) if is_waiting else batches)
        assert time.monotonic() - began < 15
        with suppress(PenstockError):
            loader.close()
        assert not all_keys(any_client)

    def test_a_replay_stops(self, any_url: str, any_client: Client) -> None:
        """It reports that the stream is gone, not that retention was too fast."""
        produce(any_url, "t", 2000, block_samples=5)
        replay = Replay("t", url=any_url, epoch=0, batch_size=5, tuning=Tuning(prefetch_bytes=500, lease_s=0.5))
        batches = iter(replay)
        next(batches)
        delete_stream(any_client, "t")
        with pytest.raises(StreamDeleted):
            list(batches)
        replay.close()
        assert not all_keys(any_client)

    def test_a_shard_whose_index_was_deleted_under_it_is_told_as_deleted(
        self, any_url: str, any_client: Client
    ) -> None:
        """It was reported as data that the server lost, with the advice to abandon an epoch that is gone."""
        with writer_of(any_url, spec=SPEC) as writer:
            shard = writer.epoch(0, sizes=[1]).shard(0)
            shard.write(sample(1))
            shard.commit_all()
            delete_stream(any_client, "t")
            with pytest.raises(StreamDeleted):
                shard.close()
        assert not all_keys(any_client)

    def test_processes_at_full_speed_stop_and_leave_nothing(self, any_url: str, any_client: Client) -> None:
        """They are at any point of their work when it happens, many times a second."""
        for _ in range(2):
            create_stream(any_client, "t", budget_bytes=100_000, retention="epochs:1")
            with child(write_for_ever, any_url) as writer, child(read_for_ever, any_url) as reader:
                assert (writer.line(), reader.line()) == ("writing", "reading")
                delete_stream(any_client, "t")
                assert writer.rest(20)[-1:] == ["StreamDeleted"]
                assert reader.rest(20)[-1:] == ["StreamDeleted"]
            assert not all_keys(any_client)


def write_for_ever(url: str) -> None:
    """Write small epochs, one after another."""
    try:
        with writer_of(url, spec=SPEC, block_bytes=240) as writer:
            for turn in range(10**9):
                with writer.epoch() as epoch:
                    for number in range(20):
                        epoch.write(sample(number))
                if turn == 3:
                    print("writing", flush=True)
    except StreamDeleted:
        print("StreamDeleted")


def read_for_ever(url: str) -> None:
    """Read each epoch as it comes."""
    try:
        with loader_of(url, timeout_s=15) as loader:
            for turn in range(10**9):
                assert numbers(loader)
                if turn == 3:
                    print("reading", flush=True)
    except StreamDeleted:
        print("StreamDeleted")


class TestCommand:
    """An operator sees these messages."""

    def test_it_is_refused_with_names_while_somebody_is_at_work(
        self, any_url: str, any_client: Client, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A typo in the name must not end a training of three days."""
        command = ["delete", "t", "--yes", "--url", any_url]
        with writer_of(any_url, spec=SPEC) as writer:
            epoch = writer.epoch()
            epoch.write(sample(1))
            epoch.flush()
            assert main(command) == 1
            told = capsys.readouterr().err
            assert "'t' is in use by a writer of epoch 0 (wrote 0 s ago)" in told
            assert "one that has ended counts as gone at most 30 s after it was last seen" in told  # after Ctrl-C, too
            epoch.close()
        with loader_of(any_url, "resnet", member="host-1"):
            assert main(command) == 1
            assert "is in use by member host-1 of group resnet (seen 0 s ago): stop them" in capsys.readouterr().err
        with Replay("t", url=any_url, epoch=0, batch_size=1):
            assert main(command) == 1
            assert "is in use by a replay of epoch 0" in capsys.readouterr().err
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["epochs"] == 1
        assert not all_keys(any_client)

    def test_it_asks_or_wants_to_be_told(
        self, any_url: str, any_client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A deleted stream cannot be brought back."""
        produce(any_url, "t", 10)
        assert main(["delete", "t", "--url", any_url]) == 1
        assert "cannot be undone: give --yes" in capsys.readouterr().err
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        for answer, code in (("n", 1), ("", 1), ("y", 0)):
            monkeypatch.setattr("builtins.input", lambda _, said=answer: said)
            assert main(["delete", "t", "--url", any_url]) == code
            assert bool(all_keys(any_client)) == bool(code)
        capsys.readouterr()
        monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
        for words in ([], ["--yes"], ["--force"]):
            assert main(["delete", "t", *words, "--url", any_url]) == 1
            assert capsys.readouterr().err.startswith("penstock: no stream 't'"), words

    def test_it_asks_also_about_keys_without_a_stream(
        self, any_url: str, any_client: Client, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A deletion removes what an interrupted one left."""
        produce(any_url, "t", 10)
        any_client.delete(load_stream(any_client, "t").keys.meta)
        assert main(["delete", "t", "--url", any_url]) == 1
        assert "cannot be undone: give --yes" in capsys.readouterr().err
        assert main(["delete", "t", "--yes", "--url", any_url]) == 0
        assert not all_keys(any_client)


def test_a_released_epoch_is_still_said_to_be_released(any_url: str, any_client: Client) -> None:
    """Only a stream that is gone is called deleted."""
    produce(any_url, "t", 10)
    with pytest.raises(EpochNotFound, match="no epoch 7"):
        load_manifest(any_client, load_stream(any_client, "t"), 7)

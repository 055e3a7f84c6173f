"""What `connect` and `translated` say when something is wrong: one line, no password, and what to do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
import redis
from redis import exceptions as foreign

from penstock_common.errors import PenstockError, ServerUnavailable, ServerUnsuitable, Unauthorized
from penstock_common.stream.link.channel import PlainChannel, ReplyError
from penstock_common.stream.link.connection import connect, open_channel, translated
from penstock_common.stream.link.failure import address, redacted
from penstock_common.stream.link.fast import FastChannel
from penstock_common.stream.servers.embedded import EmbeddedServer

Fresh = Callable[..., EmbeddedServer]


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class TestConnect:
    """Whatever is wrong shows at once."""

    def test_no_server_is_named_with_what_to_do(self) -> None:
        """The first thing most users meet."""
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
        ],
    )
    def test_a_malformed_url_is_refused_with_the_forms_that_work(self, url: str) -> None:
        """redis-py takes some of these for something else, or fails much later."""
        with pytest.raises(ServerUnavailable, match=r"is no Redis URL .* write redis://host:6379/0"):
            connect(url)

    def test_a_password_never_shows(self) -> None:
        """Error messages end in logs and in public issues."""
        assert redacted("redis://me:se@cr:et@host:1/2") == "redis://me@host:1/2"
        assert redacted("redis://default:secret@host:1/2") == "redis://host:1/2"
        assert redacted("redis://host?password=secret&db=1") == "redis://host?db=1"
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
        with connect(f"redis://:right@127.0.0.1:{server.port}/3", client_name="me") as client:
            assert address(client) == f"redis://127.0.0.1:{server.port}/3"
            for fast in (True, False):
                channel = open_channel(client, fast=fast)
                channel.send([[b"CLIENT", b"LIST"], [b"SET", b"k", b"v"]])
                listed = channel.read()
                assert isinstance(listed, bytes)
                assert sum(b"name=me " in line and b"db=3 " in line for line in listed.splitlines()) >= 1
                assert channel.read() == b"OK"
                channel.close()
            assert client.get("k") == b"v"

    def test_a_user_without_rights_is_unauthorized(self, fresh_server: Fresh) -> None:
        """ACL users per role are how a site keeps trainers from writing."""
        server = fresh_server()
        with connect(server.url) as admin:
            admin.acl_setuser("reader", enabled=True, passwords=["+p"], keys=["*"], commands=["+ping", "+get"])
        with (
            connect(f"redis://reader:p@127.0.0.1:{server.port}") as client,
            pytest.raises(Unauthorized, match="extend the user's ACL"),
            translated(client),
        ):
            client.set("k", "v")

    def test_a_server_that_stops_answering_is_reported_within_the_timeout(self) -> None:
        """A stopped process still accepts connections."""
        with socket.create_server(("127.0.0.1", 0)) as mute:
            started = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("penstock_common.stream.link.connection.CONNECT_TIMEOUT_S", 0.2)
                with pytest.raises(ServerUnavailable, match="does not answer"):
                    connect(f"redis://127.0.0.1:{mute.getsockname()[1]}")
            assert time.monotonic() - started < 3

    def test_something_that_is_no_redis_is_not_trusted(self) -> None:
        """A web server on the port answers at once, with nonsense."""
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

    def test_commands_are_never_repeated_silently(self, any_server: EmbeddedServer) -> None:
        """redis-py's default repeats ten times; a repeated XADD is a duplicate."""
        script = "redis.call('INCR', KEYS[1]); for i = 1, 5e7 do end; return 1"
        with connect(any_server.url, timeout_s=0.05) as hasty, connect(any_server.url) as patient:
            with pytest.raises(ServerUnavailable, match="does not answer"), translated(hasty):
                hasty.eval(script, 1, "count")
            assert patient.get("count") == b"1"


class TestTranslated:
    """The one place where foreign exceptions end."""

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
            (foreign.ClusterDownError("CLUSTERDOWN Hash slot not served"), ServerUnsuitable),
            (foreign.ResponseError("WRONGTYPE Operation against a key"), ReplyError),
            (ConnectionResetError(104, "Connection reset by peer"), ServerUnavailable),
            (TimeoutError("timed out"), ServerUnavailable),
            (socket.gaierror(-2, "Name or service not known"), ServerUnavailable),
        ],
    )
    def test_every_foreign_failure_becomes_one_line_that_names_the_server(
        self, error: Exception, want: type[PenstockError]
    ) -> None:
        """A traceback out of a library tells a user nothing to do."""
        with pytest.raises(want) as caught, translated("redis://host:1"):
            raise error
        assert "redis://host:1" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is error

    @pytest.mark.parametrize("error", [foreign.WatchError("changed"), ServerUnsuitable("mine"), KeyError("k")])
    def test_what_is_no_failure_of_the_server_passes_untouched(self, error: Exception) -> None:
        """A lost WATCH is flow control; a Penstock error already says it."""
        with pytest.raises(type(error)) as caught, translated("redis://host:1"):
            raise error
        assert caught.value is error


class TestOpenChannel:
    """Which channel one gets."""

    def test_the_fast_path_is_taken_where_it_fits(self, any_server: EmbeddedServer) -> None:
        """Nobody should have to ask for speed."""
        with connect(any_server.url) as client:
            channel = open_channel(client)
            assert isinstance(channel, FastChannel)
            channel.close()

    def test_an_unknown_redis_py_falls_back_to_its_own_calls(
        self, any_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A new release of redis-py must cost speed, not correctness; asked for, the reason is told."""

        class Sealed(redis.Connection):
            def can_read(self, *args: object, **kwargs: object) -> bool:
                raise TypeError("can_read has other arguments now")

        with connect(any_server.url) as client:
            monkeypatch.setattr(client.connection_pool, "connection_class", Sealed)
            channel = open_channel(client)
            assert isinstance(channel, PlainChannel)
            channel.send([[b"PING"]])
            assert channel.read() == b"PONG"
            channel.close()
            with pytest.raises(ServerUnsuitable, match="can_read has other arguments now"):
                open_channel(client, fast=True)

    def test_a_server_that_is_gone_is_named(self, fresh_server: Fresh) -> None:
        """A channel is opened again after every failure, often while the server restarts."""
        server = fresh_server()
        with connect(server.url) as client:
            server.close()
            with pytest.raises(ServerUnavailable, match=f"no Redis answers at {server.address}"):
                open_channel(client)

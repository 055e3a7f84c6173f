"""The channel keeps its contract, as the plain one does, and agrees with redis-py's packer and parser on any bytes."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis._parsers import _RESP2Parser
from redis._parsers.encoders import Encoder
from redis.connection import PythonRespSerializer
from redis.exceptions import BusyLoadingError, InvalidResponse, ResponseError

from penstock_common.server.channel import SKIP, Channel, Command, PlainSocket, Reply, ReplyError, Skip
from penstock_common.server.client import ControlClient
from penstock_common.server.connection import open_channel
from penstock_common.server.resp import BUFFER_BYTES, BY_REFERENCE_BYTES, RespReader, pack
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from tests.contracts.channel import ChannelContract, pattern
from tests.contracts.plain_channel import deliver, entries_of, open_plain_channel
from tests.contracts.sink import RecordingSink


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[ControlClient]:
    """A client with redis-py's own defaults (RESP3 in some versions), because channels must not depend on them."""
    with ControlClient.from_url(server.url) as connected:
        yield connected


class TestChannel(ChannelContract):
    """Over TCP."""

    @pytest.fixture
    def channel(self, client: ControlClient) -> Iterator[Channel]:
        """An open channel of the kind under test."""
        channel = open_channel(client)
        yield channel
        channel.close()


class TestPlainChannel(ChannelContract):
    """The oracle. A contract that redis-py cannot keep would not be fair."""

    @pytest.fixture
    def channel(self, client: ControlClient) -> Iterator[Channel]:
        """An open channel of the kind under test."""
        channel = open_plain_channel(client)
        yield channel
        channel.close()


@pytest.fixture(scope="module")
def unix_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlClient]:
    """Return a client of a separate server, which listens on a unix socket, too."""
    path = tmp_path_factory.mktemp("unix") / "s"
    with (
        EmbeddedServer(extra={"unixsocket": str(path)}) as server,
        connect(f"unix://default:{server.password}@{path}") as connected,
    ):
        yield connected


class TestChannelOverUnixSocket(ChannelContract):
    """A Unix socket takes the same socket calls in another address family."""

    @pytest.fixture
    def client(self, unix_client: ControlClient) -> ControlClient:
        """Return the contract's client."""
        return unix_client

    @pytest.fixture
    def channel(self, client: ControlClient) -> Iterator[Channel]:
        """An open channel of the kind under test."""
        channel = open_channel(client)
        yield channel
        channel.close()


# --- against the plain channel and redis-py, on anything that may be sent and received --------------------------------


class CutSocket(PlainSocket):
    """A socket that receives at most the given number of bytes at a time, as a network may."""

    def __init__(self, sock: socket.socket, cuts: Sequence[int]) -> None:
        super().__init__(sock)
        self._cuts, self._turn = cuts, 0

    def receive(self, view: memoryview) -> int:
        """Receive no more than the next cut."""
        self._turn += 1
        return super().receive(view[: self._cuts[self._turn % len(self._cuts)]])


class OracleConnection:
    """The part of a connection that redis-py's parser needs."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.socket_timeout = None
        self.encoder = Encoder("utf-8", "strict", False)


def encode(reply: Reply) -> bytes:
    """Return the reply as a server sends it."""
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case ResponseError():
            return b"-%b\r\n" % str(reply).encode()
        case list():
            return b"*%d\r\n" % len(reply) + b"".join(map(encode, reply))


def same(left: Reply, right: Reply) -> bool:
    """Compare value and type, and for errors class and text."""
    if isinstance(left, ResponseError):
        return type(left) is type(right) and str(left) == str(right)
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


values = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=60),
    st.sampled_from([b"\r\n" * 40, b"x" * (BUFFER_BYTES + 1), b"y" * 20_000, b"OK"]),
    st.sampled_from(["ERR no", "NOGROUP none", "OOM command not allowed", "MOVED 1 127.0.0.1:1"]).map(ResponseError),
)
replies = st.recursive(values, lambda inner: st.lists(inner, max_size=5), max_leaves=12)
cuts = st.lists(st.integers(1, 40) | st.just(BUFFER_BYTES), min_size=1, max_size=20)


field = st.tuples(
    st.binary(max_size=12) | st.just(b"a\r\n$1\r\nb") | st.sampled_from([b"x", b"meta", b"skipped"]),
    st.binary(max_size=60) | st.just(b"z" * 40_000),
).map(list)
fields = st.lists(field, min_size=1, max_size=3).map(lambda pairs: list(itertools.chain.from_iterable(pairs)))
entry = st.tuples(st.integers(0, 2**64 - 1).map(b"%d-0".__mod__), fields).map(list)


class SplittingSink(RecordingSink):
    """A sink that takes some fields as bytes, skips some, and receives the others into two halves of its memory."""

    def __init__(self) -> None:
        super().__init__(self._split)
        self.rooms: list[bytearray] = []

    def _split(self, name: bytes, nbytes: int) -> Sequence[memoryview] | Skip | None:
        if name in (b"meta", b"skipped"):
            return SKIP if name == b"skipped" else None
        self.rooms.append(bytearray(nbytes))
        view = memoryview(self.rooms[-1])
        return [view[: nbytes // 2], view[nbytes // 2 :]]


items = st.sampled_from([0, 1, 2, 8, 1023, 1024, BY_REFERENCE_BYTES - 1, BY_REFERENCE_BYTES, 40_000]).map(pattern)
argument: st.SearchStrategy[bytes | memoryview] = st.one_of(
    items,
    items.map(lambda data: memoryview(data)),
    items.map(lambda data: memoryview(bytearray(data))),
    items.map(lambda data: memoryview(data[: len(data) // 8 * 8]).cast("q")),
)
commands = st.lists(st.lists(argument, max_size=5).map(lambda arguments: [b"XADD", *arguments]), max_size=5)


class TestAgainstThePlainChannel:
    """Both channels send and receive the same bytes."""

    @settings(max_examples=150, deadline=None)
    @given(commands)
    def test_the_bytes_on_the_wire_are_those_of_redis_py(self, sent: list[list[bytes | memoryview]]) -> None:
        """A length that is wrong by one shifts all later bytes."""
        packer = PythonRespSerializer(BY_REFERENCE_BYTES, Encoder("utf-8", "strict", False).encode)
        flat = [[part if isinstance(part, bytes) else part.cast("B") for part in command] for command in sent]
        theirs = b"".join(bytes(part) for command in flat for part in packer.pack(*command))
        assert b"".join(pack(sent)) == theirs

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(fields, min_size=1, max_size=6))
    def test_a_stream_that_one_writes_is_read_alike_by_both(
        self, server: EmbeddedServer, sent: list[list[bytes]]
    ) -> None:
        """Both channels send the same commands to one server in turn, and get the same answers."""
        appends: list[Command] = [[b"XADD", b"alike", b"%d-1" % n, *each] for n, each in enumerate(sent, 1)]
        reads: list[Command] = [
            [b"XREADGROUP", b"GROUP", b"g", b"me", b"STREAMS", b"alike", b">"],
            [b"XREADGROUP", b"GROUP", b"g", b"me", b"STREAMS", b"alike", b"0"],
            [b"XDEL", b"alike", b"1-1"],
            [b"XRANGE", b"alike", b"-", b"+"],
            [b"XREAD", b"STREAMS", b"alike", b"0"],
            [b"XPENDING", b"alike", b"nobody"],
        ]
        seen: list[list[object]] = []
        with connect(server.url) as client:
            for channel in (open_channel(client), open_plain_channel(client)):
                client.delete("alike")
                client.xgroup_create("alike", "g", id="0", mkstream=True)
                channel.send([*appends, *reads])
                seen.append([channel.read() for _ in appends])
                for command in reads:
                    sink = SplittingSink()
                    if command[0] == b"XDEL":
                        seen[-1].append(channel.read())
                        continue
                    try:
                        seen[-1] += [channel.read_entries(sink), sink.events, sink.rooms]
                    except ReplyError as error:
                        seen[-1].append(str(error))
                channel.close()
        assert seen[0] == seen[1]


class TestParser:
    """Replies cut anywhere, valid or not, against redis-py's parser."""

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(replies, min_size=1, max_size=4), cuts)
    @example([[ResponseError("LOADED no error class")], b""], [1])
    def test_it_reads_what_redis_py_reads(self, sent: list[Reply], cuts: list[int]) -> None:
        """The oracle is the library that most programs use."""
        stream = b"".join(map(encode, sent))
        ours, theirs = socket.socketpair(), socket.socketpair()
        with ours[0], ours[1], theirs[0], theirs[1]:
            for pair in (ours, theirs):
                pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
                pair[0].setblocking(False)
            if len(stream) > 150_000:  # would need a thread; smaller streams show the same
                return
            ours[0].sendall(stream)
            theirs[0].sendall(stream)
            oracle = _RESP2Parser(4096)
            oracle.on_connect(OracleConnection(theirs[1]))
            reader = RespReader(CutSocket(ours[1], cuts), _RESP2Parser.parse_error)
            for _ in sent:
                assert same(reader.reply(), oracle.read_response())

    @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(entry, max_size=3), st.booleans(), cuts)
    def test_entries_cut_anywhere_arrive_whole(self, sent: list[list[Reply]], xread: bool, cuts: list[int]) -> None:
        """Both the fast and the slow way through a header must find what the plain channel finds."""
        reply: Reply = [[b"key", list(sent)]] if xread else list(sent)
        stream = encode(reply) + encode(b"next")
        near, far = socket.socketpair()
        with near, far:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            near.sendall(stream)
            reader = RespReader(CutSocket(far, cuts), _RESP2Parser.parse_error)
            quick, careful = SplittingSink(), SplittingSink()
            found = reader.entries(quick)
            assert reader.reply() == b"next"
        for one in entries_of(reply):
            deliver(one, careful)
        assert (found, quick.events) == (len(sent), careful.events)
        assert quick.rooms == careful.rooms

    @pytest.mark.parametrize(
        "hostile",
        [
            b"$999999999999\r\n",
            b"$-2\r\n",
            b"*99999999\r\n",
            b"$abc\r\n",
            b":\r\n",
            b"\r\n",
            b"%1\r\n",
            b"*1\r\n" * 40,
            b"*4194304\r\n*1\r\n:1\r\n",
            b"$3\r\nabcdef\r\n",
            b"+" + b"x" * 70_000,
        ],
    )
    def test_insane_replies_are_refused_instead_of_obeyed(self, hostile: bytes) -> None:
        """A broken or hostile server must not make a trainer allocate gigabytes, recurse or wait for ever."""
        for read in (RespReader.reply, lambda reader: reader.entries(RecordingSink())):
            near, far = socket.socketpair()
            with near, far:
                near.sendall(hostile)
                near.close()
                with pytest.raises(InvalidResponse):
                    read(RespReader(PlainSocket(far), _RESP2Parser.parse_error))

    @pytest.mark.parametrize(
        "hostile",
        [
            b"*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nx\r\n$9999999999\r\n",
            b"*1\r\n*2\r\n$3\r\n1-1\r\n*3\r\n$1\r\nx\r\n",
            b"*2\r\n*3\r\n$3\r\n1-1\r\n",
            b"*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\nx\r\n$3\r\nabcdef\r\n",
            b"*1\r\n*2\r\n$3\r\n1-1\r\n*-1\r\n",
            b"*2\r\n*-1\r\n*2\r\n$3\r\n1-1\r\n$-1\r\n",
            b"*1\r\n*2\r\n$3\r\nkey\r\n*1\r\n*2\r\n$3\r\n1-1\r\n*-1\r\n",
            b":1\r\n",
            b"+OK\r\n",
        ],
    )
    def test_replies_that_are_no_entries_are_refused(self, hostile: bytes) -> None:
        """A payload one byte longer than announced would shift all later bytes."""
        near, far = socket.socketpair()
        with near, far:
            near.sendall(hostile)
            near.close()
            with pytest.raises(InvalidResponse):
                RespReader(PlainSocket(far), _RESP2Parser.parse_error).entries(RecordingSink())

    def test_a_loading_server_is_no_value(self) -> None:
        """redis-py counts it as a connection failure, and so do we."""
        near, far = socket.socketpair()
        with near, far:
            near.sendall(b"-LOADING Redis is loading the dataset in memory\r\n")
            with pytest.raises(BusyLoadingError):
                RespReader(PlainSocket(far), _RESP2Parser.parse_error).reply()

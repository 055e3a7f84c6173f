"""The promises of a Channel over any socket. A subclass provides `channel`, open to the server of `client`."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Sequence

import pytest
import redis
from redis.exceptions import OutOfMemoryError, ResponseError

from penstock_common.errors import ServerUnavailable
from penstock_common.server.channel import SKIP, Channel, Command, Reply, ReplyError
from tests.contracts.sink import RecordingSink


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes that would show a shift, a gap, or a CRLF that is taken for a line end."""
    unit = bytes((seed + 7 * i) % 256 for i in range(251)) + b"\r\n$3\r\n*2\r\n"
    return (unit * (nbytes // len(unit) + 1))[:nbytes]


class ChannelContract:
    """The promises. A subclass provides `channel`, an open Channel to the server of `client`."""

    @pytest.fixture
    def key(self, client: redis.Redis) -> Iterator[bytes]:
        """Yield a unique key, which is deleted afterwards."""
        name = uuid.uuid4().hex.encode()
        yield name
        client.delete(name)

    @pytest.fixture
    def group(self, client: redis.Redis, key: bytes) -> bytes:
        """Return the key of an empty stream with the group `g`."""
        client.xgroup_create(key, "g", id="0", mkstream=True)
        return key

    def ask(self, channel: Channel, *commands: Command) -> list[Reply]:
        """Return the replies to commands sent in one pipeline."""
        channel.send(commands)
        return [channel.read() for _ in commands]

    def test_replies_of_every_type_come_back_in_order(self, channel: Channel, key: bytes) -> None:
        """Callers match replies to commands by position only."""
        replies = self.ask(
            channel,
            [b"SET", key, b"a\r\nb"],
            [b"GET", key],
            [b"STRLEN", key],
            [b"GET", key + b"?"],
            [b"EVAL", b"return {1,{},{2,false}}", b"0"],
        )
        assert replies == [b"OK", b"a\r\nb", 4, None, [1, [], [2, None]]]

    def test_an_error_inside_exec_is_a_value_in_its_place(self, channel: Channel, key: bytes) -> None:
        """EXEC does not roll back: a writer must see which command of the transaction failed."""
        replies = self.ask(
            channel, [b"MULTI"], [b"SET", key, b"text"], [b"XADD", key, b"*", b"f", b"v"], [b"STRLEN", key], [b"EXEC"]
        )
        assert replies[:4] == [b"OK", b"QUEUED", b"QUEUED", b"QUEUED"]
        result = replies[4]
        assert isinstance(result, list)
        assert result[0] == b"OK"
        assert isinstance(result[1], ResponseError)
        assert "WRONGTYPE" in str(result[1])
        assert result[2] == 4
        assert not channel.broken

    def test_an_aborted_exec_answers_nil_and_an_error_leaves_the_channel_whole(
        self, channel: Channel, client: redis.Redis, key: bytes
    ) -> None:
        """A lost WATCH and a refused command are normal for the protocol, not failures of the connection."""
        assert self.ask(channel, [b"WATCH", key]) == [b"OK"]
        client.set(key, "other")
        assert self.ask(channel, [b"MULTI"], [b"SET", key, b"mine"], [b"EXEC"]) == [b"OK", b"QUEUED", None]
        refused, pong = self.ask(channel, [b"NOSUCHCOMMAND"], [b"PING"])
        assert isinstance(refused, ResponseError)
        assert pong == b"PONG"

    def test_out_of_memory_is_recognizable_by_its_class(
        self, channel: Channel, client: redis.Redis, key: bytes
    ) -> None:
        """Writers wait for memory on this error and on no other."""
        before = str(client.config_get("maxmemory")["maxmemory"])
        client.config_set("maxmemory", "1")
        try:
            (reply,) = self.ask(channel, [b"SET", key, b"v"])
        finally:
            client.config_set("maxmemory", before)
        assert isinstance(reply, OutOfMemoryError)

    @pytest.mark.parametrize("nbytes", [0, 1, 5999, 6000, 65536, 150_528, 10_000_000])
    def test_a_payload_of_any_size_is_stored_bit_for_bit(
        self, channel: Channel, client: redis.Redis, key: bytes, nbytes: int
    ) -> None:
        """Large arguments are sent in another way than small ones, and the server must get the same command."""
        x, y = pattern(nbytes, 1), pattern(nbytes // 3, 2)
        views = [memoryview(x), memoryview(bytearray(y)).toreadonly()]
        channel.send([[b"MULTI"], [b"XADD", key, b"1-1", b"meta", b"{}", b"x", views[0], b"y", views[1]], [b"EXEC"]])
        assert [channel.read() for _ in range(3)] == [b"OK", b"QUEUED", [b"1-1"]]
        assert client.xrange(key) == [(b"1-1", {b"meta": b"{}", b"x": x, b"y": y})]

    def test_thousands_of_arguments_fit_one_send(self, channel: Channel, client: redis.Redis, key: bytes) -> None:
        """The kernel takes at most 1024 pieces in one call; callers need not count."""
        big = memoryview(pattern(7000))
        push: Command = [b"RPUSH", key, *[big] * 20, *[b"small"] * 20]
        self.ask(channel, *[push] * 100)
        items = client.lrange(key, 0, -1)
        assert len(items) == 4000
        assert set(items) == {bytes(big), b"small"}
        assert items[:40] == [bytes(big)] * 20 + [b"small"] * 20

    def test_numpy_style_views_are_sent_as_their_bytes(self, channel: Channel, client: redis.Redis, key: bytes) -> None:
        """A memoryview of items wider than a byte has a length in items, but Redis needs bytes."""
        wide = memoryview(bytearray(range(64))).cast("q")
        large = memoryview(bytearray(80_000)).cast("l")
        self.ask(channel, [b"SET", key, wide])
        assert client.get(key) == bytes(range(64))
        self.ask(channel, [b"SET", key, large])
        assert client.get(key) == bytes(80_000)

    def test_buffers_may_be_reused_as_soon_as_send_returns(
        self, channel: Channel, client: redis.Redis, key: bytes
    ) -> None:
        """Writers promise this to the users of their arrays."""
        buffer = bytearray(pattern(3_000_000))
        sent = bytes(buffer)
        channel.send([[b"SET", key, memoryview(buffer)]])
        buffer[:] = bytes(len(buffer))
        assert channel.read() == b"OK"
        assert client.get(key) == sent

    @pytest.mark.parametrize("sizes", [(0, 10), (100, 4096), (20_000, 3), (150_528, 150_528), (3_000_000, 70_000)])
    def test_entries_of_a_group_land_in_split_targets(
        self, channel: Channel, client: redis.Redis, group: bytes, sizes: tuple[int, int]
    ) -> None:
        """A batch boundary splits an entry: its payload belongs to the end of one array and the start of the next."""
        for number in range(3):
            client.xadd(
                group, {"meta": b"m%d" % number, "x": pattern(sizes[0], number), "y": pattern(sizes[1], number)}
            )
        arrays: list[bytearray] = []

        def targets(name: bytes, nbytes: int) -> Sequence[memoryview] | None:
            if name == b"meta":
                return None
            arrays.append(bytearray(nbytes))
            view, third = memoryview(arrays[-1]), nbytes // 3
            return [view[:0], view[:third], view[third : third + 1], view[third + 1 :]]

        sink = RecordingSink(targets)
        channel.send([[b"XREADGROUP", b"GROUP", b"g", b"me", b"COUNT", b"10", b"STREAMS", group, b">"], [b"PING"]])
        assert channel.read_entries(sink) == 3
        assert channel.read() == b"PONG"
        want = [pattern(size, number) for number in range(3) for size in sizes]
        assert arrays == want
        assert [event[0] for event in sink.events] == ["begin", "target", "value", "target", "target", "end"] * 3

    def test_targets_may_be_many_small_views(self, channel: Channel, client: redis.Redis, key: bytes) -> None:
        """Samples scattered over rows must not meet the kernel's limit on pieces."""
        payload = pattern(300_000)
        client.xadd(key, {"x": payload})
        room = bytearray(len(payload))
        rows = [memoryview(room)[start : start + 100] for start in range(0, len(room), 100)]
        channel.send([[b"XRANGE", key, b"-", b"+"]])
        assert channel.read_entries(RecordingSink(lambda name, nbytes: rows)) == 1
        assert room == payload

    def test_skipped_fields_leave_the_next_ones_intact(self, channel: Channel, client: redis.Redis, key: bytes) -> None:
        """A sink that refused an entry still needs the following ones."""
        for number in range(4):
            client.xadd(key, {"x": pattern(200_000), "tail": b"t%d" % number})
        sink = RecordingSink(lambda name, nbytes: SKIP if name == b"x" else None)
        channel.send([[b"XRANGE", key, b"-", b"+"], [b"PING"]])
        assert channel.read_entries(sink) == 4
        assert [event[2] for event in sink.events if event[0] == "value"] == [b"t0", b"t1", b"t2", b"t3"]
        assert channel.read() == b"PONG"

    def test_field_names_are_any_bytes(self, channel: Channel, client: redis.Redis, key: bytes) -> None:
        """A client that writes to a stream must not be able to confuse a reader by a field's name."""
        names = [b"", b"a\r\n$1\r\nb", b"*2\r\n", bytes(range(256)), b"n" * 5000]
        fields = {name: b"value%d" % number for number, name in enumerate(names)}
        client.execute_command("XADD", key, "7-7", *itertools.chain.from_iterable(fields.items()))
        sink = RecordingSink()
        channel.send([[b"XRANGE", key, b"-", b"+"]])
        assert channel.read_entries(sink) == 1
        assert sink.values == fields
        assert sink.ids == [b"7-7"]

    def test_every_shape_of_entry_reply_is_understood(
        self, channel: Channel, client: redis.Redis, group: bytes
    ) -> None:
        """One entry of XRANGE and one key of XREAD look alike at first sight."""
        for number in range(1, 4):
            client.xadd(group, {"f": str(number)}, id=f"{number}-1")
        reads: list[tuple[Command, list[bytes]]] = [
            ([b"XRANGE", group, b"2-1", b"2-1"], [b"2-1"]),
            ([b"XRANGE", group, b"-", b"+"], [b"1-1", b"2-1", b"3-1"]),
            ([b"XRANGE", group, b"9", b"+"], []),
            ([b"XREAD", b"STREAMS", group, b"2-1"], [b"3-1"]),
            ([b"XREAD", b"STREAMS", group, b"0"], [b"1-1", b"2-1", b"3-1"]),
            ([b"XREAD", b"STREAMS", group, b"9"], []),
            ([b"XREADGROUP", b"GROUP", b"g", b"me", b"STREAMS", group, b"0"], []),
            ([b"XREADGROUP", b"GROUP", b"g", b"me", b"COUNT", b"1", b"STREAMS", group, b">"], [b"1-1"]),
            ([b"XREADGROUP", b"GROUP", b"g", b"me", b"STREAMS", group, b"0"], [b"1-1"]),
        ]
        for command, want in reads:
            sink = RecordingSink()
            channel.send([command])
            assert (channel.read_entries(sink), sink.ids) == (len(want), want), command

    def test_an_entry_that_was_deleted_is_listed_nowhere(
        self, channel: Channel, client: redis.Redis, group: bytes
    ) -> None:
        """Readers know a lost payload by an answer without the entry: no read of theirs lists one without fields."""
        for number in (1, 2, 3, 4):
            client.xadd(group, {"f": str(number)}, id=f"{number}-1")
        client.xreadgroup("g", "other", {group: ">"}, count=1)
        client.xdel(group, "1-1", "3-1")
        reads: list[tuple[Command, list[bytes]]] = [
            ([b"XREADGROUP", b"GROUP", b"g", b"me", b"STREAMS", group, b">"], [b"2-1", b"4-1"]),
            ([b"XREADGROUP", b"GROUP", b"g", b"me", b"STREAMS", group, b">"], []),
            ([b"XRANGE", group, b"1-1", b"1-1"], []),
            ([b"XRANGE", group, b"-", b"+"], [b"2-1", b"4-1"]),
        ]
        for command, want in reads:
            sink = RecordingSink()
            channel.send([command])
            assert (channel.read_entries(sink), sink.ids) == (len(want), want), command

    def test_an_entry_without_fields_is_refused(self, channel: Channel, client: redis.Redis, group: bytes) -> None:
        """A member's own history lists deleted entries so. No reader asks for it, so nothing is taken of the answer."""
        client.xadd(group, {"f": "1"}, id="1-1")
        client.xreadgroup("g", "me", {group: ">"})
        client.xdel(group, "1-1")
        sink = RecordingSink()
        channel.send([[b"XREADGROUP", b"GROUP", b"g", b"me", b"STREAMS", group, b"0"]])
        with pytest.raises(ServerUnavailable):
            channel.read_entries(sink)
        assert sink.events == []
        assert channel.broken

    def test_an_expired_block_is_no_entries(self, channel: Channel, group: bytes) -> None:
        """An expired wait is not a failure."""
        channel.send([[b"XREADGROUP", b"GROUP", b"g", b"me", b"BLOCK", b"20", b"STREAMS", group, b">"], [b"PING"]])
        assert channel.read_entries(RecordingSink(), timeout_s=5) == 0
        assert channel.read() == b"PONG"

    def test_a_block_ends_when_an_entry_arrives(self, channel: Channel, client: redis.Redis, group: bytes) -> None:
        """`timeout_s` None waits as long as the server does."""
        channel.send([[b"XREADGROUP", b"GROUP", b"g", b"me", b"BLOCK", b"5000", b"STREAMS", group, b">"]])
        soon = threading.Timer(0.05, client.xadd, (group, {"f": "v"}))
        soon.start()
        assert channel.read_entries(RecordingSink(), timeout_s=None) == 1
        soon.join()

    def test_an_error_reply_to_a_read_can_be_inspected(self, channel: Channel, key: bytes) -> None:
        """A reader creates the group on NOGROUP and continues with the same channel."""
        channel.send([[b"XREADGROUP", b"GROUP", b"nobody", b"me", b"STREAMS", key, b">"], [b"PING"]])
        with pytest.raises(ReplyError, match="NOGROUP") as caught:
            channel.read_entries(RecordingSink())
        assert str(caught.value.error).startswith("NOGROUP")
        assert channel.read() == b"PONG"

    def test_silence_longer_than_the_timeout_breaks_the_channel(self, channel: Channel, group: bytes) -> None:
        """Otherwise the late reply would be taken for that of the next command."""
        channel.send([[b"XREADGROUP", b"GROUP", b"g", b"me", b"BLOCK", b"3000", b"STREAMS", group, b">"]])
        started = time.monotonic()
        with pytest.raises(ServerUnavailable, match="does not answer"):
            channel.read_entries(RecordingSink(), timeout_s=0.05)
        assert time.monotonic() - started < 2
        assert channel.broken
        for use in (lambda: channel.send([[b"PING"]]), channel.read, lambda: channel.read_entries(RecordingSink())):
            with pytest.raises(ServerUnavailable, match="open another"):
                use()

    def test_a_connection_killed_inside_a_payload_is_unavailable(
        self, channel: Channel, client: redis.Redis, key: bytes
    ) -> None:
        """Half an entry must never look like a whole one."""
        client.xadd(key, {"x": bytes(40_000_000)})
        (my_id,) = self.ask(channel, [b"CLIENT", b"ID"])

        def kill(name: bytes, nbytes: int) -> list[memoryview]:
            client.client_kill_filter(_id=str(my_id))
            return [memoryview(bytearray(nbytes))]

        sink = RecordingSink(kill)
        channel.send([[b"XRANGE", key, b"-", b"+"], [b"XRANGE", key, b"-", b"+"]])
        with pytest.raises(ServerUnavailable):
            for _ in itertools.repeat(None, 3):
                channel.read_entries(sink)
        assert channel.broken

    def test_an_interruption_closes_the_channel(self, channel: Channel, client: redis.Redis, key: bytes) -> None:
        """After Ctrl-C in the middle of a reply, no connection may answer the wrong command."""
        client.xadd(key, {"x": bytes(1000)})
        (my_id,) = self.ask(channel, [b"CLIENT", b"ID"])

        def interrupt(name: bytes, nbytes: int) -> None:
            raise KeyboardInterrupt

        channel.send([[b"XRANGE", key, b"-", b"+"]])
        with pytest.raises(KeyboardInterrupt):
            channel.read_entries(RecordingSink(interrupt))
        assert channel.broken
        deadline = time.monotonic() + 5
        while any(one["id"] == str(my_id) for one in client.client_list()):
            assert time.monotonic() < deadline, "the server still holds the connection"

    def test_a_signal_ends_a_wait_at_once(self, channel: Channel, group: bytes) -> None:
        """Job timeouts are signals whose handler raises, and so is Ctrl-C."""

        def expire(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, expire)
        try:
            channel.send([[b"XREADGROUP", b"GROUP", b"g", b"me", b"BLOCK", b"9000", b"STREAMS", group, b">"]])
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                channel.read_entries(RecordingSink(), timeout_s=None)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - started < 3
        assert channel.broken

    def test_closing_from_another_thread_ends_a_wait(self, channel: Channel, group: bytes) -> None:
        """A loader that is closed has a thread in a BLOCK of seconds."""
        channel.send([[b"XREADGROUP", b"GROUP", b"g", b"me", b"BLOCK", b"9000", b"STREAMS", group, b">"]])
        closer = threading.Timer(0.05, channel.close)
        closer.start()
        started = time.monotonic()
        with pytest.raises(ServerUnavailable, match="closed"):
            channel.read_entries(RecordingSink(), timeout_s=None)
        closer.join()
        assert time.monotonic() - started < 3

    def test_a_target_of_the_wrong_size_is_refused_before_a_byte_is_written(
        self, channel: Channel, client: redis.Redis, key: bytes
    ) -> None:
        """A sink's mistake must not shift the bytes of every later field."""
        client.xadd(key, {"x": b"12345"})
        room = bytearray(4)
        channel.send([[b"XRANGE", key, b"-", b"+"]])
        with pytest.raises(ValueError, match="4 bytes for a field of 5"):
            channel.read_entries(RecordingSink(lambda name, nbytes: [memoryview(room)]))
        assert room == bytes(4)
        assert channel.broken

    def test_closing_twice_is_harmless_and_leaks_no_socket(self, channel: Channel) -> None:
        """Loops close in `finally`, after any error."""
        channel.close()
        channel.close()
        assert channel.broken
        gc.collect()

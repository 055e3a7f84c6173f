"""Every input that the fuzzers ever kept, without a fuzzer: a fixed fault stays fixed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import InvalidResponse

from penstock_common.server.channel import SKIP
from penstock_common.server.resp import MAX_BULK_BYTES, RespReader
from tests.contracts.sink import RecordingSink
from tests.fuzz import decoder, replies
from tests.fuzz.entries import golden_entries, packed

CORPUS = Path(__file__).parent / "corpus"
MOST_MEMORY = 4 << 20
"""The memory for an entry of at most 8 kB, read by three readers into small batches."""


def inputs(target: str) -> list[Path]:
    """Return the files of a target's corpus."""
    return sorted((CORPUS / target).iterdir())


@pytest.fixture
def small_limits() -> Iterator[None]:
    """Use the fuzzer's limits."""
    with replies.small_limits():
        yield


def test_no_entry_of_the_corpus_breaks_a_promise_or_takes_memory_by_what_it_claims() -> None:
    """A client that may write to a stream can waste a trainer's time, and do nothing else."""
    worst = (0, "")
    for path in inputs("decoder"):
        data = path.read_bytes()
        tracemalloc.start()
        decoder.check(data)
        worst = max(worst, (tracemalloc.get_traced_memory()[1], path.name))
        tracemalloc.stop()
    assert 0 < worst[0] < MOST_MEMORY, worst


def test_no_golden_entry_breaks_a_promise() -> None:
    """The fuzzer starts from the corpus for other languages, so its checks must hold there."""
    entries = golden_entries()
    assert len(entries) > 100
    for entry in entries:
        decoder.check(packed(entry))


@pytest.mark.parametrize("codec", [b'"zstd"', b'"blosc2"'])
def test_the_fuzzer_starts_from_compressed_entries(codec: bytes) -> None:
    """Frames come from outside, and libraries in C read them."""
    metas = [entry.fields[0][1] for entry in golden_entries() if entry.fields]
    assert sum(b'"compression"' in meta and codec in meta for meta in metas) > 10


@pytest.mark.usefixtures("small_limits")
def test_no_reply_of_the_corpus_is_read_wrongly_however_it_is_cut() -> None:
    """A connection cut anywhere must not turn one sample into another."""
    for data in [*(path.read_bytes() for path in inputs("resp")), *replies.seeds()]:
        replies.check(data)


@pytest.mark.parametrize("length", [b" 3", b"+3", b"0_3", b"3 ", b"\xd9\xa3", b"", b"-", b"-0", b"03", b"1" * 20])
def test_a_length_that_is_no_number_is_refused_instead_of_waited_for(length: bytes) -> None:
    """A wait for bytes that were not announced hangs until its timeout."""
    for reply in (b"$" + length + b"\r\nabc\r\n", b"*1\r\n$" + length + b"\r\nabc\r\n"):
        reader = RespReader(replies.SlicedSocket(reply, b""), ValueError)
        with pytest.raises(InvalidResponse):
            reader.reply()


@pytest.mark.parametrize("call", ["reply", "entries"])
def test_an_announced_half_gigabyte_takes_no_memory_before_it_comes(call: str) -> None:
    """Memory depends on the received bytes, not on the announced ones."""
    announced = b"$%d\r\n" % MAX_BULK_BYTES
    data = announced if call == "reply" else b"*1\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\nx\r\n" + announced
    reader = RespReader(replies.SlicedSocket(data + b"abc", b""), ValueError)
    tracemalloc.start()
    with pytest.raises(ConnectionResetError):
        _ = reader.reply() if call == "reply" else reader.entries(RecordingSink())
    assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    tracemalloc.stop()


def test_a_payload_larger_than_its_first_room_comes_whole() -> None:
    """Memory that grows must not lose or duplicate bytes at its edges."""
    data = bytes(range(251)) * 20_000
    reader = RespReader(replies.SlicedSocket(b"$%d\r\n%b\r\n:1\r\n" % (len(data), data), b"\xff"), ValueError)
    assert reader.reply() == data
    assert reader.reply() == 1


def test_the_corpus_is_small_and_named_by_content() -> None:
    """Every run of the tests reads it, and two runs of the fuzzer must not choose the same names."""
    files = [path for target in CORPUS.iterdir() for path in target.iterdir()]
    assert 50 < len(files) < 300
    assert sum(path.stat().st_size for path in files) < 300_000
    assert all(len(path.name.removeprefix("crash-")) == 40 for path in files)


def test_a_skipped_payload_leaves_the_reader_in_step() -> None:
    """The entry after a bad one is read as usual."""
    entry = b"*2\r\n$3\r\n%b\r\n*2\r\n$1\r\nx\r\n$70000\r\n%b\r\n"
    data = b"*2\r\n" + entry % (b"1-0", b"\r\n" * 35_000) + entry % (b"2-0", b"*1" * 35_000)
    sink = RecordingSink(lambda name, nbytes: SKIP)
    assert RespReader(replies.SlicedSocket(data, b"\x10\xf0"), ValueError).entries(sink) == 2
    assert sink.ids == [b"1-0", b"2-0"]

"""Other data in Redis, in which others may have written nonsense: it is read, or refused by the name of its key."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_common.errors import DamagedKey, PenstockError
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import index_record
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.manifest import find_manifest, retained_epochs
from penstock_common.stream.streams import find_stream, read_counters
from tests.contracts.feed import loader_of, open_stream, produce
from tests.fuzz.decoder import _META, _PLAN, _STREAM

NONSENSE = st.one_of(
    st.binary(max_size=12),
    st.sampled_from([
        b"", b"[", b"{}", b"[]", b"null", b"true", b'"x"', b"1e5", b"-1", b"NaN", b"9" * 5000, b"[" * 5000, b"\xff",
        b'{"x":["uint8",[2]]}', b'{"x":["object",[]]}', b'{"seen":"x"}', b'{"seen":null}', b'{"first":[],"declared":1}',
        b"[null]", b"[[1]]", b"0-4,6", b"4-", b"-", b"1-x",
    ]),
)  # fmt: skip
FIELDS = {
    "meta": [*_META, b"next_epoch", b"final", b"released"],
    "plan": [*_PLAN, b"d:0", b"d:x", b"d:", b"done", b"next_shard"],
    "record": [b"e", b"f", b"n", b"b", b"h", b"w"],
    "roster": [
        b"g:a", b"m:a:b", b"m:a", b"e:0", b"e:x", b"b:0", b"t:0", b"t:x", b"d:a:0", b"d:a", b"d:", b"r:t", b"x:0",
        b"x:", b"bytes", b"gen", b"w:0",
    ],
}  # fmt: skip


class Answers:
    """A server whose hashes hold given values."""

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        self._fields = fields

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        """Return the same for every key."""
        return self._fields

    def hmget(self, key: str, *names: Any) -> list[bytes | None]:
        """Return those fields."""
        flat = names[0] if names and isinstance(names[0], list) else names
        return [self._fields.get(name.encode()) for name in flat]


def hashes(kind: str, base: dict[bytes, bytes]) -> st.SearchStrategy[dict[bytes, bytes]]:
    """Draw the right fields, with some of them left out and some replaced."""
    changes = st.dictionaries(st.one_of(st.sampled_from(FIELDS[kind]), st.binary(max_size=4)), NONSENSE, max_size=4)
    kept = st.sets(st.sampled_from([*base, b"none"]), max_size=2)
    return st.builds(lambda new, less: {k: v for k, v in base.items() if k not in less} | new, changes, kept)


@given(hashes("meta", _META))
@settings(max_examples=200, deadline=None)
def test_nonsense_in_a_streams_meta_is_named(fields: dict[bytes, bytes]) -> None:
    """A reader of a stream must learn which key is damaged, and not how a parser failed."""
    client: Client = Answers(fields)
    with suppress(PenstockError):
        find_stream(client, "t")
    with suppress(PenstockError):
        read_counters(client, _STREAM)


@given(hashes("plan", _PLAN))
@settings(max_examples=200, deadline=None)
def test_nonsense_in_a_manifest_is_named(fields: dict[bytes, bytes]) -> None:
    """The same holds for epochs."""
    client: Client = Answers(fields)
    with suppress(PenstockError):
        find_manifest(client, _STREAM, 0)
    with suppress(PenstockError):
        retained_epochs(client, _STREAM)


@given(hashes("record", {b"e": b"1-0", b"f": b"0", b"n": b"1", b"b": b"8", b"h": b"[]"}), st.binary(max_size=6))
@settings(max_examples=200, deadline=None)
def test_nonsense_in_a_shards_index_is_named(fields: dict[bytes, bytes], record_id: bytes) -> None:
    """A replay and an audit depend on it."""
    with suppress(PenstockError):
        index_record(record_id, fields)


@given(hashes("roster", {b"gen": b"1"}))
@settings(max_examples=200, deadline=None)
def test_nonsense_on_a_roster_is_named(fields: dict[bytes, bytes]) -> None:
    """The same holds for groups and members."""
    with suppress(PenstockError):
        load_roster(Answers(fields), _STREAM.partitions[0])


@pytest.mark.parametrize(("field", "value"), [("spec", "[["), ("tags", "7"), ("budget_bytes", "much")])
def test_a_trainer_names_the_damaged_key(any_url: str, any_client: Client, field: str, value: str) -> None:
    """An operator needs this name."""
    produce(any_url, "t", 3)
    key = open_stream(any_client, "t").keys.meta
    any_client.hset(key, field, value)
    with pytest.raises(DamagedKey) as caught, loader_of(any_url) as loader:
        list(loader)
    assert key in str(caught.value)
    assert "docs/redis-keys.md" in str(caught.value)

"""Invalid values of another program in a roster: the error names the key, and is not an error of a Lua script."""

from __future__ import annotations

import pytest
import redis

from penstock_common.errors import DamagedKey
from penstock_common.explain.snapshot import snapshot_partition
from penstock_common.stream.groups.roster import Membership, beat, join_group
from penstock_common.stream.streams import Stream
from tests.contracts.feed import open_stream, produce


@pytest.mark.parametrize(
    ("field", "nonsense"),
    [("g:g", "{not json"), ("g:g", "17"), ("g:g", "[]"), ("m:g:me", "{not json"), ("m:g:me", "17")],
)
def test_nonsense_that_a_script_meets_is_named_by_its_key(
    url: str, client: redis.Redis, field: str, nonsense: str
) -> None:
    """`ERR user_script:18: Expected value` does not name the key. This runs on every version of the server."""
    produce(url, "t", 10)
    stream: Stream = open_stream(client, "t")
    who = Membership(stream, "g", "me", "incarnation")
    join_group(client, who)
    (partition,) = stream.partitions
    client.hset(partition.roster, field, nonsense)
    with pytest.raises(DamagedKey, match=r"roster.*holds what Penstock did not write.*redis-keys"):
        beat(client, who, partition, {})
        join_group(client, who)


@pytest.mark.parametrize("which", ["roster", "epochs"])
def test_nonsense_that_a_writer_meets_making_room_is_named_by_its_key(
    url: str, client: redis.Redis, which: str
) -> None:
    """It reads several keys at once, and must name the damaged one."""
    produce(url, "t", 10)
    stream: Stream = open_stream(client, "t")
    (partition,) = stream.partitions
    key, field = (partition.roster, "e:first") if which == "roster" else (stream.keys.epochs, "first")
    client.hset(key, field, "1")
    with pytest.raises(DamagedKey, match=f"^{key} holds what Penstock did not write"):
        snapshot_partition(client, stream, partition)

"""The server's clock jumps: who lives looks silent for a moment, and must lose nothing by it."""

from __future__ import annotations

import time
from typing import Any

from penstock_common.stream.groups.roster import Membership, join_group, load_roster
from penstock_producer.write.cleaner import clean_up
from tests.contracts.feed import loader_of, open_stream, produce


def test_a_clock_that_jumps_far_ahead_takes_no_living_group_for_vanished(any_url: str, any_client: Any) -> None:
    """After the jump every sign of life is old; within a second each member gives a new one, and the dead do not."""
    produce(any_url, "t", 100)
    stream = open_stream(any_client, "t")
    join_group(any_client, Membership(stream, "dead", "", ""))
    with loader_of(any_url, "alive") as loader:
        next(iter(loader))
        while int(any_client.info("server")["uptime_in_seconds"]) < 2:
            time.sleep(0.1)
        # anything older than a millisecond counts as ten minutes old, as it would after the jump
        assert clean_up(any_client, stream, lambda _: None, silent_ms=1).expired == ["dead"]
        groups = load_roster(any_client, stream.partitions[0]).groups
        assert (groups["alive"].holds, groups["dead"].holds) == (True, False)
        assert list(load_roster(any_client, stream.partitions[0]).members)

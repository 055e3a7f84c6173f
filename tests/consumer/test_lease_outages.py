"""A server that stood still ages every lease at once: from a third of a lease on its silence counts as an outage."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_common.stream.client import connect
from penstock_common.stream.groups import roster
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_consumer.read import heartbeat as keepers
from penstock_consumer.read.heartbeat import LeaseRenewer
from penstock_consumer.read.leases import Leases
from tests.contracts.feed import open_stream, produce

LEASE_S = 30.0


@pytest.mark.parametrize(("silent_s", "is_outage"), [(9.0, False), (11.0, True)])
def test_a_silence_of_more_than_a_third_of_a_lease_gives_everyone_a_new_lease(
    any_url: str, monkeypatch: pytest.MonkeyPatch, silent_s: float, is_outage: bool
) -> None:
    """No member could renew, and two silences in one lease would otherwise make live members look dead."""
    produce(any_url, "t", 60)
    now_s, silences = 0.0, [silent_s]
    with connect(any_url) as client:
        stream = open_stream(client, "t")
        entries = stream.partitions[0].entries(0)
        who = Membership(stream, "g", "m", "1")
        join_group(client, who)
        taken: Any = client.xreadgroup("g", "quiet", {entries: ">"}, count=1)
        entry = taken[0][1][0][0]
        keeper = LeaseRenewer(client, who, Leases(), LEASE_S, lambda _: None, lambda: now_s)
        keeper.horizon = 0
        beat = roster.beat_each

        def answered(*args: Any, **options: Any) -> Any:
            nonlocal now_s
            if now_s >= 20 and silences:
                now_s += silences.pop()
                age()
            return beat(*args, **options)

        def age() -> None:
            """Make an entry idle on the server for as long as by this clock."""
            client.xclaim(entries, "g", "quiet", 0, [entry], idle=60_000 + int(now_s * 1000), justid=True)

        monkeypatch.setattr(keepers, "beat_each", answered)

        def beats(until_s: float) -> None:
            nonlocal now_s
            while now_s < until_s and not keeper.claims:
                now_s += 1.0
                age()
                keeper._beat()
                keeper._after_beat()

        beats(LEASE_S * 7 / 6 + 3)
        assert bool(keeper.claims) != is_outage
        beats(20 + silent_s + LEASE_S * 7 / 6 + 3)
        assert [claim.entry_id for claim in keeper.claims] == [entry]

"""Kill -9 wherever it hurts while segments turn over: nothing is lost, nothing is twice, and no file stays behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from chaos.leftovers import leftovers
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Tuning
from penstock_producer.write.writer import Writer
from tests.contracts.processes import child
from tests.journeys import turnover
from tests.journeys.trouble import Lines
from tests.journeys.turnover import BLOCK_BYTES, BUDGET_BYTES, RECYCLING, SAMPLES, SPEC, WRITING


@pytest.mark.slow
def test_whoever_is_killed_while_segments_turn_over_no_sample_is_lost_and_no_file_left(
    any_server: EmbeddedServer, memory_path: Path
) -> None:
    """Writers, recyclers and trainers are killed one after the other; then the folder is compared with the stream."""
    url = any_server.url
    with Writer("t", url=url, spec=SPEC, payload=f"segments:{memory_path}", budget_bytes=BUDGET_BYTES,
                tuning=Tuning(block_bytes=BLOCK_BYTES, notify=lambda _: None)) as writer:  # fmt: skip
        join_group(writer.client, Membership(writer.stream, "g", "", ""), declared=True)
    trained: list[str] = []
    with child(turnover.train, url, "a") as reader:
        first = Lines(reader)
        with child(turnover.recycle, url):
            for point in WRITING:
                with child(turnover.write, url, point) as killed:
                    assert killed.finish(60) == ["dies"], (point, killed.errors())
        for place, point in enumerate(RECYCLING):
            trainer, slow = (turnover.train, url, f"b{place}", 2), (turnover.write, url, "", 0.002)
            with child(turnover.recycle, url, point) as killed, child(*trainer) as dying, child(*slow) as going:
                assert killed.finish(60) == ["begun", "dies"], (point, killed.errors())
                died = dying.finish(60)
                assert died.pop() == "dies", dying.errors()
                trained += died
                going.kill()
        with child(turnover.recycle, url), child(turnover.write, url) as last:
            assert last.finish(120) == ["done"], last.errors()
            assert first.end(120) == "done", reader.errors()
        trained += first.lines
    numbers = Counter(int(word) for line in trained if line[:1].isdigit() for word in line.split())
    assert set(numbers) == set(range(SAMPLES))
    assert sum(numbers.values()) - SAMPLES <= len(RECYCLING) * 2 * 16, "only what a dying trainer had in hand"
    with connect(url) as client, Writer("t", url=url):
        report = audit_stream(client, "t", deep=True)
        assert report.is_clean, report
        assert not report.pending
        assert leftovers(url, "t") == []
    assert turnover.folder_bytes(memory_path) < 2 * BUDGET_BYTES

"""An epoch larger than what anybody may keep in memory: written once to a disk, replayed by several, memory flat."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from penstock_common.stream.commands import Client
from penstock_common.tuning import Tuning
from penstock_producer.write.writer import Writer

BUDGET = 32 << 20
SAMPLE_BYTES, SAMPLES = 48_000, 2100
"""Three times the budget."""
READER = """
import json, os, sys
from pathlib import Path
import numpy as np
import penstock

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

url = sys.argv[1]
told = []
with penstock.Replay(
    "t", url=url, epoch=0, batch_size=50, shuffle=1, window=100, prefetch_bytes=8 << 20, notify=str
) as replay:
    before = resident()
    for _ in range(3):
        seen, most = [], 0
        for batch in replay:
            assert (batch["x"][:, 0] == batch["y"] % 251).all() and (batch["x"][:, -1] == batch["y"] % 241).all()
            seen += batch["y"].tolist()
            most = max(most, resident() - before)
        assert sorted(seen) == list(range(len(seen)))
        told.append([len(seen), most])
print(json.dumps(told))
"""


def test_an_epoch_of_three_times_the_memory_is_replayed_three_times_by_two_with_flat_memory(
    any_url: str, any_client: Client, tmp_path: Path
) -> None:
    """Decoded once, trained on for weeks: neither the server nor a trainer may hold the epoch."""
    memory = int(any_client.info("memory")["used_memory"])
    spec = {"x": ("uint8", (SAMPLE_BYTES,)), "y": ("int64", ())}
    with (
        Writer(
            "t", url=any_url, spec=spec, payload=f"segments:{tmp_path}", budget_bytes=8 * BUDGET, retention="epochs:1",
            tuning=Tuning(notify=lambda _: None),
        ) as writer,
        writer.epoch() as epoch,
    ):  # fmt: skip
        for number in range(SAMPLES):
            x = np.full(SAMPLE_BYTES, number % 251, np.uint8)
            x[-1] = number % 241
            epoch.write({"x": x, "y": number})
    assert SAMPLES * SAMPLE_BYTES >= 3 * BUDGET
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, any_url], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for reader in readers:
        passes = json.loads(reader.communicate(timeout=120)[0])
        assert reader.returncode == 0
        assert [samples for samples, _ in passes] == [SAMPLES] * 3
        assert max(grown for _, grown in passes) < BUDGET
        assert passes[2][1] - passes[0][1] < BUDGET // 2, "the third pass needs no more than the first"
    assert int(any_client.info("memory")["used_memory"]) - memory < BUDGET // 8

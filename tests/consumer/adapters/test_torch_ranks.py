"""DistributedDataParallel on an ordered group: ranks that never wait for each other's missing batch."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.contracts.ordered import expected, interleaved, plan, rank_of
from tests.contracts.processes import child

torch = pytest.importorskip("torch")

WORLD, BATCH = 3, 32
WORKERS = (0, 1)
"""The numbers of worker processes of the DataLoader, which makes batches itself if it has none."""
SIZES = (4000, 4000, 2007)
BAD = frozenset(number for number in range(10_007) if number * 7919 % 100 < 7)
STEPS = -(-sum(SIZES) // (WORLD * BATCH))


def train(url: str, rank: str, meeting: str) -> None:
    """Run one rank of two trainings, without and with a worker of the DataLoader.

    It prints the contents of the batches of each, and the weights at its end.
    """
    import torch.distributed as distributed
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    import penstock.torch

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=WORLD)
    torch.manual_seed(int(rank))  # DDP itself must make them equal
    for workers in WORKERS:
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 1e-10)
        with rank_of(url, int(rank), WORLD, BATCH, group=f"workers-{workers}", timeout_s=60) as loader:
            source = DataLoader(penstock.torch.dataset(loader), batch_size=None, num_workers=workers)
            seen = []
            for batch in penstock.torch.acknowledging(source):
                optimizer.zero_grad()
                (model(batch["x"]).squeeze(1) - batch["y"]).pow(2).mean().backward()
                optimizer.step()
                seen.append(batch["y"].tolist())
        weights = [parameter.tolist() for parameter in model.parameters()]
        sys.stdout.write(json.dumps({"seen": seen, "weights": weights}) + "\n")
        sys.stdout.flush()
    distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_train_to_the_end_with_equal_steps_and_one_model(any_url: str, tmp_path: Path) -> None:
    """10,007 samples for three ranks, 7 % of them bad: one step more on one rank would hang all of them.

    The samples are read without and with a worker of the DataLoader, by the same processes, because each imports torch.
    """
    plan(any_url, SIZES, BAD, block_samples=250, retention="epochs:1")
    with ExitStack() as stack:
        ranks = [stack.enter_context(child(train, any_url, rank, tmp_path / "meeting")) for rank in range(WORLD)]
        told = [[json.loads(line) for line in rank.rest(timeout_s=240)] for rank in ranks]
    assert [len(reports) for reports in told] == [len(WORKERS)] * WORLD
    for reports in zip(*told, strict=True):
        assert [len(report["seen"]) for report in reports] == [STEPS] * WORLD
        together = interleaved([report["seen"] for report in reports])
        assert together == expected(sum(SIZES), BAD, 0, STEPS * WORLD * BATCH)
        assert reports[0]["weights"] == reports[1]["weights"] == reports[2]["weights"]

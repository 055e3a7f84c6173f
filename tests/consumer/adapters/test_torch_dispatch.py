"""Frameworks around a DataLoader: training on a part of each epoch, or on batches of batches, is reported."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from penstock_common.errors import PenstockError
from penstock_common.rate_meter import RateMeter
from penstock_common.stream.client import connect
from penstock_common.stream.commands import server_ms
from penstock_common.stream.groups.roster import Membership, RankOrder, rank_member
from penstock_common.stream.reported_rates import RateReporter, trainer_field
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import load_stream
from penstock_consumer.read.heartbeat import FIRST_BATCHES, UnusedRankCheck
from penstock_consumer.read.loader import Loader
from tests.contracts.feed import produce
from tests.contracts.ordered import plan, rank_of
from tests.contracts.processes import child

torch = pytest.importorskip("torch")
stateful = pytest.importorskip("torchdata.stateful_dataloader")

from torch.utils.data import DataLoader, IterableDataset  # noqa: E402 - only where PyTorch is

from penstock.torch import dataset  # noqa: E402 - only where PyTorch is

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

WORLD, BATCH, SAMPLES = 2, 2, 480
"""An epoch of 120 steps for each of two ranks."""
FIX = "accelerator.prepare(model, optimizer)"


# --- batches of batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [DataLoader, stateful.StatefulDataLoader])
def test_a_data_loader_that_would_batch_batches_is_refused(kind: Any, workers: int, any_url: str) -> None:
    """A model often accepts an extra dimension, and a batch would be acknowledged before its step has begun."""
    plan(any_url, [20])
    with rank_of(any_url) as loader:
        for settings in ({}, {"batch_size": 4}, {"batch_size": 4, "collate_fn": list}):
            with pytest.raises(ValueError, match=r"DataLoader\(dataset, batch_size=None\)"):
                next(iter(kind(dataset(loader), num_workers=workers, **settings)))
        assert next(iter(kind(dataset(loader), batch_size=None)))["y"].shape == (8,)


# --- rank 0 reading for all -------------------------------------------------------------------------------------------


WAYS = ("own", "dispatched", "prepared", "sharded")
"""Each rank reads its own part of an epoch, or rank 0 reads for all. The last two are refused."""


class OwnDataset(IterableDataset[Any]):
    """A user's dataset of a loader, which does not see that Accelerate reads it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield {name: torch.from_numpy(array) for name, array in batch.items()}


def train(rank: str, port: str, *urls: str) -> None:
    """Run one rank under Accelerate, in each of WAYS on its server.

    It prints the labels of its steps, and the loader's report on the peers.
    """
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    for way, url in zip(WAYS, urls, strict=True):
        sys.stdout.write(json.dumps(train_on(url, int(rank), way, accelerator)) + "\n")
    accelerator.end_training()


def train_on(url: str, rank: int, way: str, accelerator: Any) -> dict[str, list[Any]]:
    """Train on an epoch, and return the labels of the steps and the loader's report."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-10)
    said: list[str] = []
    heard = threading.Event()

    def notify(line: str) -> None:
        if FIX in line:
            said.append(line)
            heard.set()

    seen: list[int] = []
    with rank_of(url, rank, WORLD, BATCH, timeout_s=60, lease_s=6, notify=notify) as loader:
        batches: Any = DataLoader(OwnDataset(loader) if way == "dispatched" else dataset(loader), batch_size=None)
        if way in ("prepared", "sharded"):
            return {"seen": [], "said": refused(batches, way, rank, accelerator)}
        if way == "dispatched":
            model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward((model(batch["x"]).squeeze(1) - batch["y"]).pow(2).mean())
            optimizer.step()
            seen += batch["y"].tolist()
            if rank == 0 and way == "dispatched" and len(seen) > FIRST_BATCHES * BATCH:
                heard.wait(0.5)  # a step; if no report comes at the epoch's end, the test fails
    return {"seen": seen, "said": said}


def refused(batches: Any, way: str, rank: int, accelerator: Any) -> list[str]:
    """Return the error of a rank that prepares its DataLoader. Rank 0 alone reads one that is not sharded."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    if way == "sharded":
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    try:
        prepared = accelerator.prepare(batches)
        if rank == 0:
            next(iter(prepared))
    except PenstockError as error:
        return [str(error)]
    return []


@pytest.fixture(scope="module")
def trained() -> dict[str, list[dict[str, Any]]]:
    """Return the output of both ranks for each of WAYS. The same processes do both, because each imports torch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        urls = [stack.enter_context(EmbeddedServer()).url for _ in WAYS]
        for url in urls:
            plan(url, [SAMPLES])
        ranks = [stack.enter_context(child(train, rank, port, *urls)) for rank in range(WORLD)]
        told = [[json.loads(line) for line in rank.rest(timeout_s=120)] for rank in ranks]
    return {way: list(both) for way, both in zip(WAYS, zip(*told, strict=True), strict=True)}


@pytest.mark.slow
def test_a_data_loader_that_accelerate_prepared_is_refused_with_the_fix(
    trained: dict[str, list[dict[str, Any]]],
) -> None:
    """Rank 0 read for all, and said so only in a long epoch. Without dispatching Accelerate raised a TypeError."""
    assert [FIX in line for found in trained["prepared"] for line in found["said"]] == [True]
    assert [FIX in line for found in trained["sharded"] for line in found["said"]] == [True, True]


def test_a_data_loader_that_accelerate_prepared_is_refused_on_one_rank(any_url: str) -> None:
    """It read a batch ahead. A kill lost that batch, and a state was one step ahead. Skipping reads none ahead."""
    accelerate = pytest.importorskip("accelerate")
    plan(any_url, [24])
    accelerator = accelerate.Accelerator(cpu=True)
    try:
        with rank_of(any_url) as loader:
            batches = DataLoader(dataset(loader), batch_size=None)
            with pytest.raises(PenstockError, match=re.escape(FIX)):
                next(iter(accelerator.prepare(batches)))
            assert len(list(accelerate.skip_first_batches(batches, 1))) == 2
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
def test_a_user_s_dataset_that_accelerate_prepared_is_reported_with_the_fix(
    trained: dict[str, list[dict[str, Any]]],
) -> None:
    """Accelerate reads on rank 0 and distributes its batches: half of each epoch is silently never trained on."""
    zero, one = trained["dispatched"]
    assert len(set(zero["seen"] + one["seen"])) <= SAMPLES // 2 + WORLD * BATCH
    assert [len(found["said"]) for found in (zero, one)] == [1, 0]


@pytest.mark.slow
def test_ranks_that_each_read_train_on_the_whole_epoch_under_accelerate(
    trained: dict[str, list[dict[str, Any]]],
) -> None:
    """The reported remedy is right, and then nothing is reported."""
    zero, one = trained["own"]
    assert sorted(zero["seen"] + one["seen"]) == list(range(SAMPLES))
    assert zero["said"] == one["said"] == []


def looked(url: str, asked: Sequence[bool | None], samples: int = FIRST_BATCHES * BATCH) -> list[str]:
    """Return rank 0's report on peers that asked for a batch, or (False) did not, or (None) never reported."""
    said: list[str] = []
    with connect(url) as client:
        stream = load_stream(client, "t")
        watch = UnusedRankCheck(
            client, Membership(stream, "g", rank_member(0), "", RankOrder(0, len(asked) + 1, BATCH)), said.append
        )
        for _ in range(2):
            watch.look(samples)
            looked_ms = server_ms(client, stream.keys.rates)
            while server_ms(client, stream.keys.rates) == looked_ms:  # it may be older
                pass
            for rank, has_asked in enumerate(asked, 1):
                pace = RateMeter("training")
                if has_asked:
                    pace.enter("asking")
                if has_asked is not None:
                    RateReporter(client, stream, trainer_field("g", rank_member(rank))).report(pace)
        watch.look(samples)
    return said


def test_rank_0_speaks_only_when_all_peers_said_afterwards_that_they_read_nothing(any_url: str) -> None:
    """A report older than the first batches proves nothing, and a rank that waits for its first batch has asked."""
    produce(any_url, "t", 20)
    (line,) = looked(any_url, [False, False])
    assert FIX in line
    assert "ranks 1 to 2 of group 'g'" in line
    silent: list[tuple[bool | None, ...]] = [(True, False), (None, False), (True, True)]
    for asked in silent:
        with connect(any_url) as client:
            client.delete(load_stream(client, "t").keys.rates)
        assert looked(any_url, asked) == []
    assert looked(any_url, [False], samples=FIRST_BATCHES * BATCH - 1) == []

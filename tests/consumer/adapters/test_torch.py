"""`penstock.torch`: the adapters' promises, tensors without copies, and DataLoaders of PyTorch and torchdata."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock_common.errors import WaitTimeout
from penstock_common.tuning import Tuning
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.mixture import Mixture
from penstock_producer.write.writer import Writer
from tests.contracts.adapter import (
    BATCH,
    GROUP,
    MEMBER,
    SAMPLES,
    STREAM,
    AdapterContract,
    acknowledged,
    delivered,
    loader_of,
    report_until_killed,
)
from tests.contracts.feed import produce

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 - only where PyTorch is

from penstock.torch import acknowledging, dataset, prefetch_to_device  # noqa: E402 - only where PyTorch is
from penstock_consumer.adapters.torch_device import DeviceBatches  # noqa: E402 - only where PyTorch is


def train_until_killed(url: str) -> None:
    """Train, with one batch sent ahead."""
    loader = Loader(STREAM, group=GROUP, batch_size=BATCH, url=url, tuning=Tuning(member=MEMBER))
    batches = DeviceBatches(acknowledging(DataLoader(dataset(loader), batch_size=None)), Nowhere())
    report_until_killed(batch["y"].tolist() for batch in batches)


class Nowhere:
    """A device that only records what is sent."""

    def __init__(self) -> None:
        self.sent = 0

    def send(self, element: Any) -> Any:
        """Count a batch."""
        self.sent += 1
        return element

    def hand(self, sent: Any) -> Any:
        """Return the batch unchanged."""
        return sent


class Eager:
    """A readahead without a limit, like `DeviceBatches`, however slowly batches come."""

    def __init__(self, batches: Any, count: int) -> None:
        self.source, self.count = acknowledging(batches), count

    def __iter__(self) -> Iterator[Any]:
        elements = self.source.elements()
        ahead: list[Any] = []
        while True:
            while len(ahead) < self.count and (pair := next(elements, None)) is not None:
                ahead.append(pair)
            if not ahead:
                break
            element, token = ahead.pop(0)
            self.source.dataset.arrive(token)
            mine = self.source.dataset.tracker.running
            yield element
            if self.source.dataset.tracker.running is not mine:
                return
            self.source.dataset.tracker.report()
        self.source.dataset.finish()


class TestTorch(AdapterContract):
    """The contract with an IterableDataset, iterated directly."""

    def dataset(self, loader: Loader | Mixture, **settings: Any) -> Any:
        """Return a dataset with dicts as elements."""
        return dataset(loader, **settings)

    def read_ahead(self, batches: Any, count: int) -> Any:
        """Read ahead as `prefetch_to_device` does, but further."""
        return Eager(batches, count)

    def as_numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Return an array without a copy."""
        if tensor.dtype == torch.bfloat16:
            bits: np.ndarray[Any, Any] = tensor.view(torch.int16).numpy()
            return bits.view(ml_dtypes.bfloat16)
        values: np.ndarray[Any, Any] = tensor.numpy()
        return values

    train_until_killed = staticmethod(train_until_killed)


class TestDataLoader(TestTorch):
    """The adapter contract with PyTorch's DataLoader without worker processes."""

    def dataset(self, loader: Loader | Mixture, **settings: Any) -> Any:
        """Return a DataLoader as most users write it."""
        return DataLoader(dataset(loader, **settings), batch_size=None)

    def stateful(self, batches: Any) -> Any:
        """Return None, because PyTorch's DataLoader has no state."""
        return batches.dataset


def test_a_tensor_is_the_batchs_own_memory(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of each batch costs as much as receiving it."""
    produce(any_url, STREAM, SAMPLES)
    pulled: list[dict[str, int]] = []
    hand = Loader._next_batch

    def watched(self: Loader, *arguments: Any) -> Any:
        batch = hand(self, *arguments)
        pulled.append({name: array.ctypes.data for name, array in (batch or {}).items()})
        return batch

    monkeypatch.setattr(Loader, "_next_batch", watched)
    with loader_of(any_url) as loader:
        batches = DataLoader(dataset(loader), batch_size=None)
        given = [{name: tensor.data_ptr() for name, tensor in batch.items()} for batch in batches]
    assert given == pulled[:-1]


def test_ragged_tensors_and_bytes(any_url: str) -> None:
    """Text and boxes are a list of views of one flat tensor, or one padded tensor. Byte strings stay byte strings."""
    spec: Any = {"boxes": ("bfloat16", (None, 2)), "name": ("bytes", ()), "y": ("int64", ())}
    with Writer(STREAM, url=any_url, spec=spec, tuning=Tuning(notify=lambda _: None)) as writer:
        for _ in range(2):
            with writer.epoch() as epoch:
                for n in range(3):
                    epoch.write({"boxes": np.full((n, 2), n, ml_dtypes.bfloat16), "name": b"n" * n, "y": n})
    with loader_of(any_url) as loader:
        (batch,) = dataset(loader, select=("boxes", "name"))
        (padded,) = dataset(loader, select="boxes", ragged="padded")
    boxes, names = batch
    assert names == [b"", b"n", b"nn"]
    assert [tuple(box.shape) for box in boxes] == [(0, 2), (1, 2), (2, 2)]
    assert boxes[2].dtype == torch.bfloat16
    assert boxes[2].tolist() == [[2, 2], [2, 2]]
    assert boxes[1].untyped_storage().data_ptr() == boxes[2].untyped_storage().data_ptr()
    assert padded.tolist() == [[[0, 0], [0, 0]], [[1, 1], [0, 0]], [[2, 2], [2, 2]]]


def test_what_is_sent_ahead_of_the_step_is_not_acknowledged(any_url: str) -> None:
    """Two batches are on the device, one of them in the step: a crash must bring the other one again."""
    produce(any_url, STREAM, SAMPLES, epochs=2)
    side = Nowhere()
    with loader_of(any_url) as loader:
        batches = DeviceBatches(acknowledging(DataLoader(dataset(loader), batch_size=None)), side)
        for steps, _ in enumerate(batches, 1):
            if not hooks_of(loader).is_ready and side.sent == steps:
                continue  # a batch is not waited for only to have it early
            hooks_of(loader).acknowledger.flush()
            assert delivered(any_url)[0] == (steps - 1) * BATCH
        assert side.sent > steps - 1
        numbers = [number for batch in batches for number in batch["y"].tolist()]
    assert sorted(numbers) == list(range(SAMPLES))
    assert acknowledged(any_url)


WAYS: dict[str, Callable[..., Any]] = {
    "dataset": dataset,
    "DataLoader": lambda loader, **settings: DataLoader(dataset(loader, **settings), batch_size=None),
    "acknowledging": lambda loader, **settings: acknowledging(dataset(loader, **settings)),
    "device": lambda loader, **settings: DeviceBatches(acknowledging(dataset(loader, **settings)), Nowhere()),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_acknowledged_before_the_loop_waits_for_the_next_batch(way: str, any_url: str) -> None:
    """A writer may be waiting for the space of that batch."""
    with (
        Writer(STREAM, url=any_url, tuning=Tuning(notify=lambda _: None)) as writer,
        Loader(
            STREAM, group=GROUP, batch_size=BATCH, url=any_url, tuning=Tuning(timeout_s=1, notify=lambda _: None)
        ) as loader,
        writer.epoch() as epoch,
    ):
        epoch.write_batch({"y": np.arange(BATCH)})
        epoch.flush()
        batches = iter(WAYS[way](loader))
        next(batches)
        with pytest.raises(WaitTimeout):
            next(batches)
        hooks_of(loader).acknowledger.flush()
        assert delivered(any_url) == [BATCH]


@pytest.mark.parametrize("way", WAYS)
def test_of_two_iterations_the_older_ends(way: str, any_url: str) -> None:
    """The newer one gets what the older had read ahead, and the end of the older does not acknowledge a batch of the
    newer.
    """
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url) as loader:
        older = iter(WAYS[way](loader, select="y"))
        seen = next(older).tolist()
        newer = iter(WAYS[way](loader, select="y"))
        seen += next(newer).tolist()
        assert list(older) == []
        hooks_of(loader).acknowledger.flush()
        assert delivered(any_url) == [BATCH]
        seen += [number for y in newer for number in y.tolist()]
    assert sorted(seen) == list(range(SAMPLES))
    assert acknowledged(any_url)


def test_a_cpu_needs_no_copies(any_url: str) -> None:
    """One line serves hosts with and without a GPU."""
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url) as loader:
        numbers = [n for batch in prefetch_to_device(dataset(loader), "cpu") for n in batch["y"].tolist()]
    assert sorted(numbers) == list(range(SAMPLES))
    assert acknowledged(any_url)


def test_mistakes_are_named(any_url: str) -> None:
    """Batches of batches, another dataset, missing tensors: each gets an error instead of a wrong shape."""
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url) as loader:
        batches = dataset(loader)
        with pytest.raises(ValueError, match="batch_size=None"):
            acknowledging(DataLoader(batches))
        with pytest.raises(TypeError, match=r"penstock\.torch\.dataset"):
            acknowledging([1, 2])
        with pytest.raises(TypeError, match=r"a DataLoader takes penstock\.torch\.dataset\(loader\)"):
            next(iter(DataLoader(loader, batch_size=None)))
        with pytest.raises(TypeError, match=r"got a str, expected a loader: write dataset\(penstock\.Loader\("):
            dataset("train")  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"no argument 'batch_size'; it takes loader, select"):
            dataset(loader, batch_size=8)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="a stream has no items by number: iterate the dataset"):
            batches[0]
        with pytest.raises(ValueError, match="the stream has x, y"):
            dataset(loader, select="z")
        with pytest.raises(ValueError, match="'padded'"):
            dataset(loader, ragged="nested")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match=r"num_workers=0.*order='canonical'"):
            acknowledging(DataLoader(batches, batch_size=None, num_workers=1))


def test_a_replaced_loader_behind_a_data_loader_says_that_its_last_batch_comes_again(any_url: str) -> None:
    """Lightning makes a loader for each epoch, and asks no loader for more batches than its length."""
    produce(any_url, STREAM, 3 * BATCH)
    said: list[str] = []
    first = Loader(
        STREAM, group=GROUP, batch_size=BATCH, url=any_url, order="canonical", tuning=Tuning(notify=said.append)
    )
    batches = iter(DataLoader(dataset(first), batch_size=None))
    for _ in range(len(first)):
        last = next(batches)["y"].tolist()
    with loader_of(any_url, order="canonical") as second:
        assert [batch["y"].tolist() for batch in second] == [last]
    assert ["it may come again" in line for line in said] == [True]

"""torch's Datasets, IterableDatasets and DataLoaders as sources."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from penstock_common.errors import SampleError, SourceError
from penstock_common.tuning import Tuning
from penstock_consumer.adapters.torch import dataset
from penstock_consumer.read.loader import Loader
from penstock_producer.jobs.fill import EpochSeed
from penstock_producer.sources.config import LocalConfig, TorchConfig
from penstock_producer.sources.items import as_sample, batch_tensors
from penstock_producer.sources.names import register
from penstock_producer.sources.open import open_source
from penstock_producer.sources.protocol import Source
from penstock_producer.sources.seeding import sample_rng
from penstock_producer.write.writer import Writer
from tests.contracts.iterable import IterableContract
from tests.contracts.source import SourceContract, digest, in_fork, read
from tests.producer.sources.conftest import UserModule

CODE = """
import random
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
class Words(Dataset):
    classes = ["even", "odd"]
    targets = torch.arange(7) % 2
    def __len__(self): return 7
    def __getitem__(self, index):
        return {"x": torch.full((2, 3), index, dtype=torch.bfloat16), "y": self.targets[index], "text": "w" * index}
class Noisy(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        return torch.rand(2).requires_grad_(), random.random(), np.random.rand()
class Stream(IterableDataset):
    def __init__(self, items=lambda: ((torch.tensor([n]), n) for n in range(5))): self.items = items
    def __iter__(self): return self.items()
class Broken(Words):
    def __getitem__(self, index): return super().__getitem__(index)["x"] / (1 if index < 2 else 1 // 0)
def failing(): return Stream(lambda: (0 // (1 - n) for n in range(5)))
def empty(): return Stream(lambda: iter(()))
def failing_batches(): return DataLoader(Broken(), batch_size=2)
def no_batches(): return DataLoader([])
def batches(): return DataLoader(Words(), batch_size=2)
def by_workers():
    return DataLoader(Words(), batch_size=2, num_workers=2)
def singles():
    return DataLoader(Words(), batch_size=None)
"""


class TestDataset(SourceContract):
    """A torch Dataset keeps every promise of a source."""

    @pytest.fixture
    def config(self, user_module: UserModule) -> TorchConfig:
        """Return what a job would carry."""
        return TorchConfig(name=f"{user_module(CODE)}:Words")

    @pytest.fixture
    def source(self, config: TorchConfig) -> Source:
        """Opened here."""
        source: Source = opened(config)
        return source

    def test_an_index_gives_the_same_item_in_any_order(self, source: Any) -> None:
        """This covers what torch has beyond numpy: bfloat16, texts, labels of all items."""
        super().test_an_index_gives_the_same_item_in_any_order(source)
        made = read(source, 3)
        assert (made["x"].dtype.name, made["x"].tolist()) == ("bfloat16", [[3] * 3] * 2)
        assert (int(made["y"]), made["text"]) == (1, b"www")
        assert source.column("y").tolist() == [0, 1, 0, 1, 0, 1, 0]
        assert source.info["classes"] == {"y": ["even", "odd"]}

    def test_what_it_gives_may_be_changed_in_place(self, source: Any) -> None:
        """Torch's own arrays may be changed like all others."""
        made = read(source, 1)
        made["x"][...] = 9
        assert read(source, 1)["x"].tolist() == [[1] * 3] * 2


def opened(config: TorchConfig | LocalConfig) -> Any:
    """The source."""
    return open_source(config)


def test_augmentations_by_global_generators_are_repeated(user_module: UserModule) -> None:
    """Torch users draw from global generators: a job that is done again, by another process, must give the same."""
    source = opened(TorchConfig(name=f"{user_module(CODE)}:Noisy"))

    def made(index: int, epoch: int = 0) -> Any:
        return source.read(index, EpochSeed(1, epoch).of(0, index))

    first = [digest(made(n)) for n in range(4)]
    assert in_fork(lambda: "\n".join(digest(made(n)) for n in reversed(range(4)))).split("\n") == first[::-1]
    parts, other = made(0), made(0, epoch=1)
    assert all(not np.array_equal(parts[name], other[name]) for name in ("x", "y", "w"))


class TestIterableDataset(IterableContract):
    """Read in order, by one job."""

    @pytest.fixture
    def config(self, user_module: UserModule) -> TorchConfig:
        """Return what a job would carry."""
        return TorchConfig(name=f"{user_module(CODE)}:Stream")

    @pytest.fixture
    def failing(self, user_module: UserModule) -> TorchConfig:
        """One that raises."""
        return TorchConfig(name=f"{user_module(CODE)}:failing")

    @pytest.fixture
    def empty(self, user_module: UserModule) -> TorchConfig:
        """One without items."""
        return TorchConfig(name=f"{user_module(CODE)}:empty")


class TestDataLoader(IterableContract):
    """A user who has one need not take it apart; batch_size=None is torch's form for single samples."""

    @pytest.fixture(params=["batches", "singles"])
    def config(self, user_module: UserModule, request: pytest.FixtureRequest) -> TorchConfig:
        """Return what a job would carry."""
        return TorchConfig(name=f"{user_module(CODE)}:{request.param}")

    @pytest.fixture
    def failing(self, user_module: UserModule) -> TorchConfig:
        """A Dataset's ``__getitem__`` raises."""
        return TorchConfig(name=f"{user_module(CODE)}:failing_batches")

    @pytest.fixture
    def empty(self, user_module: UserModule) -> TorchConfig:
        """One without items."""
        return TorchConfig(name=f"{user_module(CODE)}:no_batches")


def test_a_data_loader_keeps_its_worker_processes(user_module: UserModule) -> None:
    """They do the reading that it was given them for; each of its batches is written at once."""
    source = opened(TorchConfig(name=f"{user_module(CODE)}:by_workers"))
    assert (source.unit, source.batched) == ("item", True)
    made = [source.make(item, n, sample_rng(0, 0, 0, n)) for n, item in enumerate(source)]
    assert [value for batch in made for value in batch["y"].tolist()] == [0, 1, 0, 1, 0, 1, 0]
    assert [word for batch in made for word in batch["text"]] == [b"w" * n for n in range(7)]
    assert made[0]["x"].shape[1:] == (2, 3)


def test_objects_of_a_notebook_are_known_as_torchs() -> None:
    """A DataLoader given to penstock.produce gives batches, and no samples that are lists of tensors."""
    numbers = TensorDataset(torch.arange(5))
    loader = opened(LocalConfig(token=register(DataLoader(numbers, batch_size=2))))
    assert loader.batched
    assert [loader.make(item, 0, sample_rng(0, 0, 0, 0))["x"].tolist() for item in loader] == [[0, 1], [2, 3], [4]]
    assert int(read(opened(LocalConfig(token=register(numbers))), 3)["x"]) == 3


@pytest.mark.parametrize("spec", [None, {"x": ("bfloat16", (4,)), "y": ("bfloat16", ())}])
def test_bfloat16_tensors_are_written_bit_for_bit(any_url: str, spec: Any) -> None:
    """Torch refuses to hand them to numpy, and a detour by float32 would lose what a NaN carries."""
    bits = torch.tensor([0x3F80, -0x8000, 0x7FC1, -0x41], dtype=torch.int16)
    x = bits.view(torch.bfloat16)
    with (
        Writer("half", url=any_url, spec=spec, tuning=Tuning(notify=lambda _: None)) as writer,
        writer.epoch() as epoch,
    ):
        for y in (1.5, 2.5):
            epoch.write({"x": x, "y": torch.tensor(y, dtype=torch.bfloat16)})
        epoch.write({"x": torch.stack([x, x], 1)[:, 0], "y": torch.tensor(3.5, dtype=torch.bfloat16)})
    with Loader("half", group="g", url=any_url, batch_size=3) as loader:
        (batch,) = dataset(loader)
    assert batch["x"].dtype == batch["y"].dtype == torch.bfloat16
    assert batch["x"].view(torch.int16).tolist() == [bits.tolist()] * 3
    assert batch["y"].tolist() == [1.5, 2.5, 3.5]


def test_a_transform_may_return_bfloat16_tensors() -> None:
    """Sources that know nothing of torch meet its tensors in what a transform returns."""
    half = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)
    made = as_sample({"x": half, "y": 1}, "data[0]")
    assert (made["x"].dtype.name, made["x"].tolist()) == ("bfloat16", [1.5, 2.5])
    assert batch_tensors((half,), "data[0]")["x"].dtype.name == "bfloat16"


class Point(NamedTuple):
    """An item with names of its own."""

    row: int
    column: int


class Detection(Dataset):
    """Items as torchvision's detection models take them: an image, and a dict of a varying number of boxes."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        boxes = torch.full((index, 4), float(index))
        target = {"boxes": boxes, "labels": torch.arange(index), "image_id": index}
        return torch.full((3, 8, 6 + index), float(index)), target


def test_the_detection_form_of_torchvision_comes_back_as_it_was(any_url: str) -> None:
    """Images and boxes of any number, with nothing written for it but a spec."""
    source = opened(LocalConfig(token=register(Detection())))
    spec: Any = {
        "x": ("float32", (3, None, None)), "y/boxes": ("float32", (None, 4)), "y/labels": ("int64", (None,)),
        "y/image_id": ("int64", ()),
    }  # fmt: skip
    with (
        Writer("boxes", url=any_url, spec=spec, tuning=Tuning(notify=lambda _: None)) as writer,
        writer.epoch() as epoch,
    ):
        for index in range(5):
            epoch.write(read(source, index))
    with Loader("boxes", group="g", url=any_url, batch_size=5) as loader:
        ((images, targets),) = dataset(loader, select=("x", "y"))
    for index, (image, wanted) in enumerate(Detection()[n] for n in range(5)):
        assert torch.equal(images[index], image)
        assert torch.equal(targets["boxes"][index], wanted["boxes"])
        assert torch.equal(targets["labels"][index], wanted["labels"])
        assert targets["image_id"][index] == wanted["image_id"]


def test_a_data_loaders_batches_have_the_names_of_its_datasets_items() -> None:
    """A user who changes from one to the other finds the tensors that the trainer reads."""
    items = [(torch.ones(2), {"boxes": torch.full((4,), n), "about": {"id": n}}) for n in range(3)]
    source = opened(LocalConfig(token=register(DataLoader(items, batch_size=2))))
    batches = [source.make(item, n, sample_rng(0, 0, 0, n)) for n, item in enumerate(source)]
    assert [list(batch) for batch in batches] == [["x", "y/boxes", "y/about/id"]] * 2
    assert [batch["y/about/id"].tolist() for batch in batches] == [[0, 1], [2]]
    named = opened(LocalConfig(token=register(DataLoader([{"y": {"id": n}} for n in range(2)], batch_size=2))))
    assert [named.make(item, 0, sample_rng(0, 0, 0, 0))["y/id"].tolist() for item in named] == [[0, 1]]
    points = opened(LocalConfig(token=register(DataLoader([Point(n, -n) for n in range(2)], batch_size=2))))
    assert [list(points.make(item, 0, sample_rng(0, 0, 0, 0))) for item in points] == [["row", "column"]]


def test_a_data_loader_without_batches_does_not_mix_a_samples_parts() -> None:
    """Torch makes lists of tuples there, and a list of unlike numbers would become float64."""
    pairs = TensorDataset(torch.tensor([2**60 + 1]), torch.tensor([0.5]))
    source = opened(LocalConfig(token=register(DataLoader(pairs, batch_size=None))))
    with pytest.raises(SampleError, match=r"list of values of float32 and int64, .*: give its Dataset itself"):
        source.make(next(iter(source)), 0, sample_rng(0, 0, 0, 0))
    itself = opened(LocalConfig(token=register(pairs)))
    assert {name: value.tolist() for name, value in read(itself, 0).items()} == {"x": 2**60 + 1, "y": 0.5}


def test_a_tuple_below_a_name_is_one_tensor_of_a_dataset_and_several_of_its_data_loader() -> None:
    """Torch's batches have a list there, whose parts may differ in dtype. The page says so."""
    items = [{"k": (n, 2 * n)} for n in range(2)]
    assert np.asarray(read(opened(LocalConfig(token=register(items))), 1)["k"]).tolist() == [1, 2]
    source = opened(LocalConfig(token=register(DataLoader(items, batch_size=2))))
    batch = source.make(next(iter(source)), 0, sample_rng(0, 0, 0, 0))
    assert {name: values.tolist() for name, values in batch.items()} == {"k0": [0, 1], "k1": [0, 2]}


def test_batches_whose_samples_lie_apart_are_refused_in_words() -> None:
    """The collate function of torchvision's detection examples makes no batch of tensors."""
    loader = DataLoader(Detection(), batch_size=2, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    source = opened(LocalConfig(token=register(loader)))
    with pytest.raises(SampleError, match=r"\[0\]: .* give the Dataset itself instead of its DataLoader"):
        source.make(next(iter(source)), 0, sample_rng(0, 0, 0, 0))


def test_what_is_not_torchs_is_refused(user_module: UserModule) -> None:
    """One line, when it is opened."""
    name = user_module("def numbers(): return [1, 2]")
    hint = rf"is a list; expected a torch Dataset, IterableDataset .*`penstock produce dataset {name}:numbers` takes"
    with pytest.raises(SourceError, match=hint):
        opened(TorchConfig(name=f"{name}:numbers"))
    with pytest.raises(SourceError, match="has a length, so limit= has no meaning"):
        opened(TorchConfig(name=f"{user_module(CODE)}:Words", limit=3))

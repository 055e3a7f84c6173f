"""Keras Sequences and PyDatasets: batches by index, each read once, through their plain protocol."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import SampleError, SourceError
from penstock_producer.sources.config import DatasetConfig, KerasConfig, LocalConfig
from penstock_producer.sources.items import batch_tensors
from penstock_producer.sources.keras import KerasSource
from penstock_producer.sources.names import register
from penstock_producer.sources.open import config_for_jobs, open_source
from penstock_producer.sources.protocol import BatchSource
from tests.contracts.source import SourceContract, read
from tests.producer.sources.conftest import UserModule

CODE = """
import numpy as np
class Batches:
    reads = []
    def __len__(self): return 4
    def __getitem__(self, index):
        self.reads.append(index)
        x = np.arange(10 * 2, dtype="float32").reshape(10, 2)[index * 3 : index * 3 + 3]
        return x, np.arange(10)[index * 3 : index * 3 + 3]
"""


class Batches:
    """Ten samples in batches of three."""

    def __init__(self, samples: int = 10, batch: int = 3) -> None:
        self.samples, self.batch = samples, batch
        self.reads: list[int] = []

    def __len__(self) -> int:
        return math.ceil(self.samples / self.batch)

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        rows = np.arange(self.samples)[index * self.batch : (index + 1) * self.batch]
        return rows[:, None] * np.ones(2, np.float32), rows


class Sequence(Batches):
    """The same batches in a class that looks like one of Keras."""

    __module__ = "keras.utils"


class TestKerasBatches(SourceContract):
    """Batches keep every promise of a source."""

    @pytest.fixture
    def config(self, user_module: UserModule) -> KerasConfig:
        """Return what a job would carry."""
        return KerasConfig(name=f"{user_module(CODE)}:Batches")

    @pytest.fixture
    def source(self, config: KerasConfig) -> BatchSource:
        """Opened here."""
        return opened(config)


def opened(config: Any) -> BatchSource:
    """A source of batches."""
    source = open_source(config)
    assert source.unit == "batch"
    return source


def test_a_batch_may_hold_texts_of_any_length() -> None:
    """Captions of images stay a list, because an array would pad them to the longest."""
    texts = [[b"a", b"longer"], [b"the last"]]

    class Captioned(Batches):
        """Numbers, and a text for each."""

        def __getitem__(self, index: int) -> Any:
            return {"x": np.arange(len(texts[index])), "text": texts[index]}

    source = KerasSource(Captioned(3, 2), "data")
    assert source.sizes == (2, 1)
    assert [read(source, item)["text"] for item in range(2)] == texts


def test_batch_sizes_are_learned_from_the_first_and_the_last() -> None:
    """Planning must know every sample's offset, and may not read the whole dataset for it."""
    batches = Batches()
    source = KerasSource(batches, "data")
    assert [source.size(item) for item in range(len(source))] == [3, 3, 3, 1]
    assert batches.reads == [0, 3]
    assert read(source, 3)["y"].tolist() == [9]


def test_jobs_with_the_planned_sizes_read_nothing_twice() -> None:
    """Python that makes batches is what costs; a job reads each of its batches once."""
    batches = Sequence()
    config = LocalConfig(token=register(batches))
    pinned = config_for_jobs(config, opened(config))
    batches.reads.clear()
    source = opened(pinned)
    assert [len(read(source, item)["x"]) for item in (1, 3)] == [3, 1]
    assert source.fingerprint == opened(config).fingerprint
    assert batches.reads[:2] == [1, 3]


def test_a_batch_of_another_size_is_named() -> None:
    """Offsets are planned; a batch that is short would shift all samples after it."""
    source = KerasSource([np.zeros((3, 1)), np.zeros((2, 1)), np.zeros((3, 1))], "data")
    with pytest.raises(SampleError, match=r"^data\[1\]: 2 samples, 3 planned; only the last may differ$"):
        read(source, 1)


def test_parts_keep_their_names() -> None:
    """Models with several inputs name them."""
    ones = np.ones((2, 1))
    assert list(batch_tensors((ones, ones, ones), "k")) == ["x", "y", "w"]
    assert list(batch_tensors([ones, ones], "k")) == ["x", "y"]
    assert list(batch_tensors(({"left": ones, "right": ones}, ones), "k")) == ["left", "right", "y"]
    assert list(batch_tensors(([ones, ones], ones, None), "k")) == ["x0", "x1", "y"]
    assert list(batch_tensors({"a": ones}, "k")) == ["a"]
    assert batch_tensors((ones, [1, 0]), "k")["y"].tolist() == [1, 0]
    with pytest.raises(SampleError, match="k: two tensors are named 'y'"):
        batch_tensors(({"y": ones}, ones), "k")
    with pytest.raises(SampleError, match="k: a batch of 4 parts"):
        batch_tensors((ones,) * 4, "k")


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "data has 0 batches"),
        (7, "the number of batches of data is unknown: TypeError"),
        (iter([1]), "the number of batches of data is unknown"),
    ],
)
def test_what_has_no_batches_is_refused(batches: Any, message: str) -> None:
    """When opening, not in the first job."""
    with pytest.raises(SourceError, match=message):
        KerasSource(batches, "data")


def test_tensors_of_different_length_are_named() -> None:
    """Else samples would be paired with others' labels."""
    source = KerasSource([(np.zeros((3, 1)), np.zeros(2))], "data")
    with pytest.raises(SourceError, match=r"data\[0\]: tensors disagree on the number of samples: {'x': 3, 'y': 2}"):
        source.size(0)


def test_a_transform_on_batches_is_refused() -> None:
    """It would get a batch where it expects a sample."""
    config = LocalConfig(token=register(Sequence()), transform="os.path:join")
    with pytest.raises(
        SourceError, match="gives batches, which no transform is applied to; transform in its __getitem__"
    ):
        open_source(config)


@pytest.mark.slow
def test_a_real_pydataset_is_read_and_told_from_a_dataset() -> None:
    """Its batches must never be taken for samples. In a process of its own: Keras takes seconds and starts threads."""
    code = f"""
import keras, numpy as np, sys
class Data(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return np.full((2 if index < 2 else 1, 4), index), np.zeros(2 if index < 2 else 1)
sys.modules["datamodule"] = sys.modules["__main__"]
from penstock_producer.sources.config import {DatasetConfig.__name__}, {LocalConfig.__name__}
from penstock_producer.sources.names import register
from penstock_producer.sources.open import open_source
source = open_source(LocalConfig(token=register(Data())))
print(source.unit, [source.size(i) for i in range(len(source))], source.read(2, None)["x"].tolist())
try:
    open_source(DatasetConfig(name="datamodule:Data"))
except Exception as error:
    print(error)
"""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "batch [2, 2, 1] [[2, 2, 2, 2]]",
        "datamodule:Data is a Keras Data: its items are batches; use the source kind keras",
    ]

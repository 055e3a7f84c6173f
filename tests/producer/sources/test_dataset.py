"""Indexable datasets of any Python type, by import name or as objects of this process."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import SampleError, SourceError
from penstock_producer.sources.config import DatasetConfig, GeneratorConfig, LocalConfig
from penstock_producer.sources.dataset import DatasetSource
from penstock_producer.sources.items import as_sample
from penstock_producer.sources.names import forget, lookup, register
from penstock_producer.sources.open import open_source
from penstock_producer.sources.protocol import Source
from penstock_producer.sources.transform import Transform
from tests.contracts.source import SourceContract, read
from tests.producer import made
from tests.producer.sources.conftest import UserModule

CODE = """
import numpy as np
class Words:
    items = ["a", "bb", "ccc"]
    def __len__(self): return len(self.items)
    def __getitem__(self, index): return self.items[index]
def encode(word, rng):
    return {"x": np.array([len(word), 5], "int32") + rng.integers(9), "text": word}
arrays = {"x": np.arange(12.0).reshape(6, 2), "y": np.arange(6)}
"""


class TestNamedDataset(SourceContract):
    """A user's class with a transform keeps every promise of a source."""

    @pytest.fixture
    def config(self, user_module: UserModule) -> DatasetConfig:
        """Return what a job would carry."""
        name = user_module(CODE)
        return DatasetConfig(name=f"{name}:Words", transform=f"{name}:encode")

    @pytest.fixture
    def source(self, config: DatasetConfig) -> Source:
        """Opened here."""
        return opened(config)


class TestArrays(SourceContract):
    """Arrays side by side keep every promise of a source."""

    @pytest.fixture
    def config(self, user_module: UserModule) -> DatasetConfig:
        """Return what a job would carry."""
        return DatasetConfig(name=f"{user_module(CODE)}:arrays")

    @pytest.fixture
    def source(self, config: DatasetConfig) -> Source:
        """Opened here."""
        return opened(config)


class TestLocalObject(SourceContract):
    """An object of this process keeps every promise of a source."""

    @pytest.fixture
    def config(self) -> LocalConfig:
        """Return what a job would carry."""
        return LocalConfig(token=register(Owned()))

    @pytest.fixture
    def source(self, config: LocalConfig) -> Source:
        """Opened here."""
        return opened(config)


class Owned:
    """Gives new arrays for each item, as a dataset should."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.arange(3) + index, index


def opened(config: Any) -> Source:
    """A source of samples."""
    source = open_source(config)
    assert source.unit == "sample"
    return source


def first(dataset: Any, transform: Any = None) -> Any:
    """The first sample of an object."""
    return read(DatasetSource(dataset, "data", Transform.of(transform) if transform else None), 0)


Point = namedtuple("Point", ["row", "column"])


@pytest.mark.parametrize(
    ("item", "sample"),
    [
        ({"a": 1, "b": b"x"}, {"a": 1, "b": b"x"}),
        ((1, 2), {"x": 1, "y": 2}),
        ((1, 2, 0.5), {"x": 1, "y": 2, "w": 0.5}),
        ((1,), {"x": 1}),
        (Point(3, 4), {"row": 3, "column": 4}),
        ((1, {"boxes": [2], "about": {"id": 3}}), {"x": 1, "y/boxes": [2], "y/about/id": 3}),
        (7, {"x": 7}),
        ([1, 2], {"x": [1, 2]}),
        ([1, 2.5], {"x": [1, 2.5]}),
        ([np.float32(1), 2], {"x": [np.float32(1), 2]}),
        ("grün", {"x": "grün".encode()}),
        (np.float16(2), {"x": np.float16(2)}),
    ],
)
def test_items_are_samples_where_their_meaning_is_plain(item: Any, sample: dict[str, Any]) -> None:
    """Items whose meaning is plain should need no transform."""
    found = as_sample(item, "data[0]")
    assert found == sample


def test_tensors_of_frameworks_become_arrays() -> None:
    """Datasets of torch give tensors; Penstock imports no framework to read them."""

    class Tensor:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.arange(3, dtype=np.float32)

    found = as_sample({"x": Tensor()}, "data[0]")["x"]
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({}, "an empty sample"),
        ((1, {}), r"tensor 'y' is a dict \(object\)"),
        ({"y/a": 1, "y": {"a": 2}}, "tensor 'y/a': found two of that name"),
        ((1, 2, 3, 4), r"a tuple of 4; expected \(x,\), \(x, y\)"),
        (None, r"tensor 'x' is a NoneType \(object\); expected numbers, an array or bytes: have the dataset or"),
        ({"x": object()}, "tensor 'x' is a object"),
        ({"x": ["a", "b"]}, "tensor 'x' is a list"),
        (
            {"a": [np.array(2**60 + 1), np.float32(0.5)]},
            "'a' is a list of values of float32 and int64, expected one dtype",
        ),
        ({"a": [[np.int64(2**60 + 1), 0.5]]}, "'a' is a list of values of int64 and Python float, expected one dtype"),
        ([2**60 + 1, 0.5], rf"list of integers and other numbers, of which float64 cannot hold {2**60 + 1}, expected"),
        ({"x": [[1], [1, 2]]}, "tensor 'x' is a list of 2 parts that differ in shape; expected one array: pad them"),
        (((np.zeros(3), np.zeros(2)), 1), r"'x' is a tuple of 2 parts .* or name them, .* gives tensors x/a and x/b"),
        ({"x": np.array(["2024-01-01"], "M8[D]")}, "datetime64"),
    ],
)
def test_items_that_cannot_travel_are_named(item: Any, message: str) -> None:
    """Without pickle some values cannot be sent; the user must learn which, and what to do."""
    with pytest.raises(SampleError, match=message) as caught:
        as_sample(item, "data[3]")
    assert str(caught.value).startswith("data[3]: ")


def test_arrays_side_by_side_are_one_dataset() -> None:
    """(x_train, y_train) is how Keras users hold data; it is not a dataset of two items."""
    x, y = np.arange(8).reshape(4, 2), np.arange(4)
    for arrays in ((x, y), {"x": x, "y": y}):
        source = DatasetSource(arrays, "data")
        assert len(source) == 4
        assert read(source, 2)["x"].tolist() == [4, 5]
        assert read(source, 2)["y"] == 2
    with pytest.raises(SourceError, match=r"arrays of different lengths: {'x': 4, 'y': 3}"):
        DatasetSource((x, y[:3]), "data")


def test_a_transform_working_in_place_leaves_the_arrays_alone() -> None:
    """The second epoch would be augmented twice."""
    rows = np.zeros((3, 2))

    def brighten(row: Any) -> Any:
        row += 1
        return {"x": row}

    assert first(rows, brighten)["x"].tolist() == [1, 1]
    assert not rows.any()


@pytest.mark.parametrize("kind", ["local", "dataset", "generator"])
def test_tables_whose_items_are_not_their_rows_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of a frame would be its samples, and a series would come back in the order of its labels."""
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"a": [1, 2]})
    for table, message in (
        (pandas.DataFrame({"a": [1]}), r'a pandas DataFrame, .*: give df\.to_dict\("records"\) .* or df\.to_numpy\(\)'),
        (
            pandas.Series([1, 2], index=[1, 0]),
            r"a pandas Series, whose items have labels; .*: give series\.to_numpy\(\)",
        ),
        (datasets.DatasetDict(train=one, test=one), r'of the splits train, test; .* one split: give ds\["train"\]'),
    ):
        monkeypatch.setattr(made, "table", table, raising=False)
        name = "tests.producer.made:table"
        configs: dict[str, Any] = {"dataset": DatasetConfig(name=name), "generator": GeneratorConfig(name=name)}
        with pytest.raises(SourceError, match=message):
            open_source(configs.get(kind) or LocalConfig(token=register(table)))


def test_the_ways_that_a_refused_table_names_give_its_rows() -> None:
    """Advice must work as it stands."""
    pandas = pytest.importorskip("pandas")
    frame, series = pandas.DataFrame({"a": [0.0, 2.0], "b": [1.0, 3.0]}), pandas.Series([5.0, 6.0], index=[1, 0])
    with pytest.raises(SourceError, match="'y' of data is a pandas Series"):
        DatasetSource({"x": frame.to_numpy(), "y": series}, "data")
    assert read(DatasetSource(frame.to_dict("records"), "data"), 1) == {"a": 2.0, "b": 3.0}
    assert read(DatasetSource(frame.to_numpy(), "data"), 1)["x"].tolist() == [2.0, 3.0]
    assert [float(read(DatasetSource(series.to_numpy(), "data"), row)["x"]) for row in range(2)] == [5.0, 6.0]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "data is empty"),
        (iter([1]), "data is a list_iterator; expected an object with len.*; an iterable is read with kind generator"),
        (7, "data is an int; expected an object with len"),
        ({"a": 1}, "data is a dict of other objects than arrays"),
    ],
)
def test_what_cannot_be_indexed_is_refused(dataset: Any, message: str) -> None:
    """When opening, not in the first job."""
    with pytest.raises(SourceError, match=message):
        DatasetSource(dataset, "data")


def test_an_item_that_fails_is_named_with_the_users_line(user_module: UserModule) -> None:
    """Among a million items the bad one must be found."""
    name = user_module(
        """
        class Data:
            def __len__(self): return 3
            def __getitem__(self, index):
                if index == 1:
                    raise KeyError("lost")
                return index
        """
    )
    source = opened(DatasetConfig(name=f"{name}:Data"))
    with pytest.raises(
        SampleError, match=rf"^{name}:Data\[1\]: the dataset failed: KeyError: 'lost' \({name}\.py:6\)$"
    ):
        read(source, 1)
    assert read(source, 2) == {"x": 2}


def test_the_fingerprint_knows_name_length_and_transform(user_module: UserModule) -> None:
    """A dataset that has grown is another one."""
    prints = {DatasetSource(list(range(n)), name).fingerprint for n in (1, 2) for name in ("a", "b")}
    prints.add(DatasetSource([0], "a", Transform.of(str)).fingerprint)
    assert len(prints) == 5


def test_a_token_is_worth_nothing_elsewhere() -> None:
    """A worker that was not forked from the notebook must say so instead of guessing."""
    token = register(Owned())
    assert lookup(token) is lookup(token)
    forget(token)
    forget(token)
    with pytest.raises(SourceError, match="is not in this process: only workers forked after it was registered"):
        open_source(LocalConfig(token=token))


def test_a_notebooks_transform_travels_by_token() -> None:
    """A lambda has no import name."""
    config = LocalConfig(token=register(Owned()), transform=register(lambda item: {"double": item[0] * 2}))
    assert read(opened(config), 1)["double"].tolist() == [2, 4, 6]

"""Objects with generators of their own in a user's dataset or transform: found wherever they are held, and seeded."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from penstock_common.errors import SampleError
from penstock_producer.sources.dataset import DatasetSource
from penstock_producer.sources.keras import KerasSource
from penstock_producer.sources.seeding import find_seeded, sample_rng
from penstock_producer.sources.transform import Transform


class Pipeline:
    """A stand-in for albumentations' Compose."""

    def __init__(self) -> None:
        self.seed: int | None = None

    def set_random_seed(self, seed: int) -> None:
        """Remembers it."""
        self.seed = seed


class Images:
    """A user's dataset: its items say what its transform was seeded with."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.files = [f"{number}.jpg" for number in range(1000)]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"y": find_seeded(self.transform, "")[0].target.seed, "index": index}


SHARED = Pipeline()


class ByGlobal(Images):
    """Names it in its code."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"y": SHARED.seed}


class ByClass(Images):
    """Has one for all instances."""

    pipeline = Pipeline()


def closed_over(pipeline: Pipeline) -> Any:
    """A function that has it from around."""
    return lambda item: pipeline.seed


HOLDERS: dict[str, Callable[[Pipeline], Any]] = {
    "attribute": lambda p: Images(p),
    "list": lambda p: Images([str, p]),
    "dict": lambda p: Images({"train": p}),
    "function": lambda p: Images(closed_over(p)),
    "partial": lambda p: Images(functools.partial(print, p)),
    "method": lambda p: Images(Images(p).__getitem__),
    "Subset": lambda p: Subset(Images(p), [3, 1]),
    "ConcatDataset": lambda p: ConcatDataset([Images(p), Subset(Images(p), [0])]),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_has_a_generator_of_its_own_is_found_where_it_is_held(holder: str) -> None:
    """Datasets are wrapped in datasets; one that is missed gives other samples in each process."""
    pipeline = Pipeline()
    assert [one.target for one in find_seeded(HOLDERS[holder](pipeline), "data")] == [pipeline]


def test_class_attributes_and_globals_of_a_datasets_code_are_found() -> None:
    """Many modules make their pipeline once, at module level."""
    assert [one.target for one in find_seeded(ByClass(None), "data")] == [ByClass.pipeline]
    assert [one.target for one in find_seeded(ByGlobal(None), "data")] == [SHARED]
    assert find_seeded(Images(None), "data") == ()


def test_the_search_ends_in_large_and_circular_datasets() -> None:
    """Opening a dataset must not walk through all of its samples."""
    looped = Images([])
    looped.transform.append(looped)
    looped.samples = [{"path": str(number)} for number in range(1_000_000)]  # type: ignore[attr-defined]
    assert find_seeded(looped, "data") == ()


class ClosedFile(Mapping[str, Any]):
    """Stands for a closed h5py.File: every look into it raises."""

    def __getitem__(self, name: str) -> Any:
        raise ValueError("the file is closed")

    def __iter__(self) -> Iterator[str]:
        raise ValueError("the file is closed")

    def __len__(self) -> int:
        raise ValueError("the file is closed")


f = ClosedFile()


class ByFile(Images):
    """Keeps its file under a name that the module's global has, too."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"y": self.f[index]}  # type: ignore[attr-defined]


def test_the_search_opens_no_file_that_is_a_mapping() -> None:
    """Datasets of HDF5 hold an h5py.File. To list what is in it reads the disk, and raises once it is closed."""
    assert [one.target for one in find_seeded(Images({"file": f, "transform": SHARED}), "data")] == [SHARED]
    assert find_seeded(ByFile(None), "data") == ()


def test_a_samples_seed_depends_on_the_sample_alone() -> None:
    """Not on which process reads it, nor on what was read before."""

    def read(order: list[int]) -> dict[int, Any]:
        source = DatasetSource(Images(Pipeline()), "data")
        assert source.draws
        return {index: source.read(index, sample_rng(7, 0, 0, index))["y"] for index in order}

    first = read(list(range(8)))
    assert read([5, 2, 7, 0, 1, 3, 4, 6]) == first
    assert len(set(first.values())) == 8


def test_a_transform_that_takes_no_generator_has_what_it_holds_seeded() -> None:
    """A function that takes the generator seeds itself, as before."""
    pipeline = Pipeline()
    transform = Transform.of(closed_over(pipeline))
    assert transform.draws
    assert transform(0, sample_rng(0, 0, 0, 1), "a") == {"x": pipeline.seed}
    assert pipeline.seed is not None
    assert Transform.of(lambda item, rng: (item, pipeline)).seeded == ()


def test_what_refuses_a_seed_is_named() -> None:
    """The sample is bad, and the message says whose fault it is."""

    class Refuses:
        def set_random_seed(self) -> None:
            """Takes no seed."""

    source = DatasetSource(Images([Refuses()]), "data")
    with pytest.raises(SampleError, match=r"data\[2\]: data.transform\[0\].set_random_seed\(seed\) failed"):
        source.read(2, np.random.default_rng(0))


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "PCG64": (lambda: np.random.default_rng(3), lambda g: g.normal()),
    "MT19937": (lambda: np.random.Generator(np.random.MT19937(3)), lambda g: g.normal()),
    "RandomState": (lambda: np.random.RandomState(3), lambda g: g.normal()),
    "Random": (lambda: random.Random(3), lambda g: g.gauss()),
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(1, generator=g).item()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_users_generators_follow_from_the_sample_and_differ_from_each_other(kind: str) -> None:
    """Forked workers have copies in one state, so two samples in three would draw the same."""
    make, draw = GENERATORS[kind]
    one, two = make(), make()
    transform = Transform.of(lambda item: (draw(one), draw(two)))
    assert transform.draws

    def drawn(order: list[int]) -> dict[int, tuple[float, float]]:
        made = {index: transform(0, sample_rng(7, 0, 0, index), "a") for index in order}
        return {index: (sample["x"], sample["y"]) for index, sample in made.items()}

    first = drawn(list(range(8)))
    assert drawn([5, 2, 7, 0, 1, 3, 4, 6]) == first
    assert len({number for pair in first.values() for number in pair}) == 16


GENERATOR = np.random.default_rng(3)
draw_normal = GENERATOR.normal
shuffle, uniform = random.shuffle, np.random.uniform


def in_comprehension(item: Any) -> Any:
    """Names it in code of its own, before Python 3.12."""
    return [GENERATOR.normal() for _ in range(2)]


def by_helper(item: Any) -> Any:
    """Names a function of its module."""
    return in_comprehension(item)


def by_method(item: Any) -> Any:
    """Names the generator's method."""
    return draw_normal()


def of_the_process(item: Any) -> Any:
    """Draws from the global generators, which have a seed already."""
    shuffle([])
    return uniform(), random.random(), np.random.rand(), np.random.mtrand._rand.rand()  # noqa: NPY002


def test_generators_are_found_in_all_code_of_a_transform() -> None:
    """One that is missed gives two workers the same numbers, and nothing shows it."""
    for function in (in_comprehension, by_helper, by_method, lambda item, default=GENERATOR: default.normal()):
        assert [one.target for one in find_seeded(function, "f")] == [GENERATOR]
    assert find_seeded(of_the_process, "f") == ()


def test_a_function_with_rng_has_its_generators_seeded() -> None:
    """It has the sample's own generator, and draws from another one all the same."""
    transform = Transform.of(lambda item, rng: (rng.random(), GENERATOR.random()))
    first, again = (transform(0, sample_rng(7, 0, 0, 1), "a") for _ in range(2))
    assert first == again
    own = sample_rng(7, 0, 0, 1)
    assert (first["x"], own.spawn(1)[0].random() == first["y"]) == (own.random(), False)


class Dice(random.Random):
    """A user's generator, which is seeded in another way."""

    def seed(self, *_: Any, number: int) -> None:  # type: ignore[override]
        """Take a number by name."""
        super().seed(number)

    def __init__(self) -> None:
        """Take a number that is given by name."""
        self.seed(number=3)


def test_a_generator_of_a_users_own_class_fails_no_sample() -> None:
    """Its seed may take something else."""
    dice = Dice()
    transform = Transform.of(lambda item: (dice.random(), item))
    assert not transform.seeded
    assert transform(0, sample_rng(7, 0, 0, 1), "a")["y"] == 0


class Rolls:
    """A dataset whose items are made by another method."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return {"x": self.roll()}

    def roll(self) -> float:
        """Draw from a generator of the module."""
        return float(GENERATOR.normal())


def test_generators_are_found_in_methods_that_a_dataset_calls() -> None:
    """Two workers would give the same numbers."""
    assert [one.target for one in find_seeded(Rolls(), "rolls")] == [GENERATOR]


def test_the_look_at_a_keras_batch_leaves_the_users_generators_alone() -> None:
    """It is made in the process of a notebook, which would draw the same numbers after each production."""

    class Batches:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return np.zeros((2, 1)), GENERATOR.normal(size=2)

    source = KerasSource(Batches(), "batches", (2, 2))
    rng = sample_rng(7, 0, 0, 0)
    assert source.unseeded().read(0, rng)["y"].tolist() != source.unseeded().read(0, rng)["y"].tolist()
    seeded = [source.read(0, sample_rng(7, 0, 0, 0))["y"].tolist() for _ in range(2)]
    assert seeded[0] == seeded[1]

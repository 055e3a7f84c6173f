"""Mistakes of new users with a framework's batches: each error says what to write instead."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_convert, random_split

import penstock
from tests.contracts.feed import produce

FRAMEWORKS = ("torch", "tensorflow", "jax")


def taken_apart(dataset: Any) -> None:
    """Unpack batches, as most tutorials do."""
    for _x, _y in dataset:
        break


def taken_apart_by_number(dataset: Any) -> None:
    """Unpack batches in a loop with the step's number."""
    for _step, (_x, _y) in enumerate(dataset):
        break


def taken_apart_at_once(dataset: Any) -> None:
    """Unpack the first batch, as users do to look at it."""
    _x, _y = next(iter(dataset))


def named(dataset: Any) -> set[str]:
    """Run a correct loop, with a number of other loops before it."""
    for element in dataset:
        _x, _y = element["x"], element["y"]
        for _pair, _other in zip(element, element, strict=True):
            pass
        return {name for _, name in enumerate(element)}
    return set()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "from penstock.torch import Dataset",
            r"penstock\.torch has no 'Dataset' to import; .*; did you mean 'dataset'",
        ),
        ("from penstock.tensorflow import Datasets", r"it has acknowledging, dataset; did you mean 'dataset'\?"),
        ("from penstock.jax import loader", r"penstock\.jax has no 'loader' to import; it has Dataset, dataset"),
        ("from penstock.keras import ModelCheckPoint", "did you mean 'ModelCheckpoint'"),
    ],
)
def test_an_import_of_a_name_that_is_not_there_says_which_are(line: str, words: str) -> None:
    """Python's own text names neither the existing names nor the one that was meant."""
    with pytest.raises(ImportError, match=words):
        exec(line)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_loop_that_takes_dicts_apart_is_told_how_to_get_tuples(framework: str, any_url: str) -> None:
    """It silently got the names of the tensors, and failed much later."""
    produce(any_url, "train", 160)  # each loop takes a batch or two
    adapter = importlib.import_module(f"penstock.{framework}")
    verb = rf"penstock\.{framework}\.dataset\(loader, select=\('x', 'y'\)\)"
    with penstock.Loader(
        "train", group="g", batch_size=8, url=any_url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as loader:
        dataset = adapter.dataset(loader)
        loops: list[Callable[[Any], None]] = [taken_apart, taken_apart_by_number, taken_apart_at_once]
        for loop in loops:
            with pytest.raises(TypeError, match=verb):
                loop(dataset)
        assert named(dataset) == {"x", "y"}
        for loop in loops:
            loop(adapter.dataset(loader, select=("x", "y")))
        _first, *others = list(iter(dataset))
        assert others


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("given", ["train", None, [1], {"x": 1}])
def test_an_adapter_says_what_it_takes(framework: str, given: Any) -> None:
    """Most other calls take a stream's name first."""
    name = repr(given) if given == "train" else "'train'"
    with pytest.raises(TypeError, match=rf"expected a loader: write dataset\(penstock\.Loader\({name}, group="):
        importlib.import_module(f"penstock.{framework}").dataset(given)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_adapter_asks_for_the_loader_of_a_view(framework: str, any_url: str) -> None:
    """A view's methods are the adapter's arguments."""
    with penstock.Loader(
        "train", group="g", batch_size=8, url=any_url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as loader:
        with pytest.raises(TypeError, match=r"got a View, expected its loader: write dataset\(loader, select="):
            importlib.import_module(f"penstock.{framework}").dataset(loader.view())
        with pytest.raises(TypeError, match=r"dataset\(\) has no argument 'batch_size'"):
            importlib.import_module(f"penstock.{framework}").dataset(loader, batch_size=8)
        produce(any_url, "train", 40)
        with pytest.raises(TypeError, match=r"select is 0, an int; expected names, select=\('x', 'y'\) or select='x'"):
            importlib.import_module(f"penstock.{framework}").dataset(loader, select=0)


def test_batches_of_torch_say_what_to_write(any_url: str) -> None:
    """They were plain dicts, and "KeyError: 'image'" names neither the tensors nor the remedy."""
    produce(any_url, "train", 40)
    with penstock.Loader(
        "train", group="g", batch_size=8, url=any_url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as loader:
        dataset = penstock.torch.dataset(loader)  # type: ignore[attr-defined]
        for way in (dataset, DataLoader(dataset, batch_size=None)):
            element: Any = next(iter(way))
            with pytest.raises(
                TypeError, match=r"penstock\.torch\.dataset\(loader, select=\('x', 'y'\)\)` gives tuples"
            ):
                _x, _y = element
            with pytest.raises(KeyError, match="no tensor 'image' here; there are: x, y"):
                element["image"]
            with pytest.raises(AttributeError, match=r"batch\[\"x\"\]\.to\(device\)"):
                element.to("cpu")
            assert sorted(element) == ["x", "y"]
        assert sorted(default_convert(element)) == sorted({**element}) == ["x", "y"]
        moved = next(iter(penstock.torch.prefetch_to_device(dataset, "cpu")))  # type: ignore[attr-defined]
        assert isinstance(moved["x"], torch.Tensor)
        with pytest.raises(AttributeError, match="no attribute 'cuda'"):
            moved.cuda()


def test_a_dataset_of_torch_has_no_length_and_says_why(any_url: str) -> None:
    """Schedules and random_split() ask for one, but Keras and others must not find one."""
    produce(any_url, "train", 40)
    with penstock.Loader(
        "train", group="g", batch_size=8, url=any_url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as loader:
        dataset: Any = penstock.torch.dataset(loader)  # type: ignore[attr-defined]
        asked: list[Callable[[Any], Any]] = [len, lambda whole: random_split(whole, [0.9, 0.1])]
        for ask in asked:
            with pytest.raises(TypeError, match=r"has no length, because .* order='canonical'.*--split train:0\.9"):
                ask(dataset)
        assert not hasattr(dataset, "__len__")
        assert bool(dataset)
        for name, words in {"shuffle": r"loader\.shuffle\(samples=10_000\)", "to": "prefetch_to_device"}.items():
            with pytest.raises(AttributeError, match=words):
                getattr(dataset, name)
        assert len(list(dataset)) == 5


def test_a_device_that_is_not_there_is_named(any_url: str) -> None:
    """Torch's message names streams, or seventeen devices."""
    produce(any_url, "train", 40)
    with penstock.Loader(
        "train", group="g", batch_size=8, url=any_url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as loader:
        dataset = penstock.torch.dataset(loader)  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="device is 'gpu', expected one such as 'cuda', 'cuda:1' or 'cpu'"):
            penstock.torch.prefetch_to_device(dataset, "gpu")  # type: ignore[attr-defined]
        if not torch.cuda.is_available():
            with pytest.raises(ValueError, match=r"device is 'cuda', and torch finds no CUDA here.*write 'cpu'"):
                penstock.torch.prefetch_to_device(dataset, "cuda")  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="needs device: where the step runs"):
            penstock.torch.prefetch_to_device(dataset)  # type: ignore[attr-defined]


def test_the_callbacks_of_keras_say_what_they_take() -> None:
    """Keras's own ModelCheckpoint takes the file first."""
    keras: Any = importlib.import_module("penstock.keras")
    attempts: list[Callable[[], Any]] = [
        lambda: keras.ModelCheckpoint("model.keras"),
        lambda: keras.ModelCheckpoint("model.keras", 1),
    ]
    for attempt in attempts:
        with pytest.raises(TypeError, match=r"expected the loader of the dataset: write ModelCheckpoint\(loader, 'mod"):
            attempt()
    with pytest.raises(TypeError, match=r"write Acknowledge\(loader\)"):
        keras.Acknowledge("x")


def test_what_jax_is_given_is_checked(any_url: str) -> None:
    """`map` is called far from the place where it was given."""
    produce(any_url, "train", 40)
    jax = importlib.import_module("penstock.jax")
    with penstock.Loader(
        "train", group="g", batch_size=8, url=any_url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as loader:
        with pytest.raises(TypeError, match=r"map is 5, an int; expected a function such as map=lambda batch"):
            jax.dataset(loader, map=5)
        with pytest.raises(TypeError, match="map's function gave an int, expected a dict of arrays by name"):
            next(iter(jax.dataset(loader, map=lambda _: 5)))
        with pytest.raises(TypeError, match="a Dataset has no items by number"):
            jax.dataset(loader)[0]
        with pytest.raises(AttributeError, match=r"write loader\.shuffle\(samples=10_000\) on the loader"):
            jax.dataset(loader).shuffle(3)


def test_a_second_batch_is_told_that_there_are_batches_already(
    any_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """tf.data accepts it, and a model trains on batches of batches or fails much later."""
    produce(any_url, "train", 160)
    adapter = importlib.import_module("penstock.tensorflow")
    with penstock.Loader(
        "train", group="g", batch_size=8, url=any_url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as loader:
        dataset = adapter.dataset(loader, select=("x", "y"))
        next(iter(dataset.batch(4)))
        assert "gives batches of 8 already, and .batch(4) makes batches of batches" in capsys.readouterr().err
        next(iter(dataset.unbatch().batch(4)))
        assert "batches of batches" not in capsys.readouterr().err


def test_fit_on_a_loader_or_on_dicts_is_told_what_fit_takes(any_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keras's own errors name types and layers, but neither the cause nor the remedy."""
    keras = importlib.import_module("keras")
    adapter = importlib.import_module("penstock.tensorflow")
    produce(any_url, "train", 160)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(loss="mse")
    with penstock.Loader(
        "train", group="g", batch_size=8, url=any_url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as loader:
        with pytest.raises((TypeError, AttributeError), match=r"model\.fit takes penstock\.tensorflow"):
            model.fit(loader)
        with pytest.raises(Exception):  # noqa: B017, PT011 - Keras's own, of several kinds
            model.fit(adapter.dataset(loader), verbose=0)
        assert "Keras is given dicts of 'x', 'y', which it takes for inputs without" in capsys.readouterr().err

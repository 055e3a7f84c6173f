"""What newcomers write from habit on a framework's batches: each is answered by what to write instead."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_convert

import penstock
from tests.contracts.feed import produce

FRAMEWORKS = ("torch", "tensorflow", "jax")


def taken_apart(dataset: Any) -> None:
    """As most tutorials write it."""
    for _x, _y in dataset:
        break


def taken_apart_by_number(dataset: Any) -> None:
    """With the step's number."""
    for _step, (_x, _y) in enumerate(dataset):
        break


def named(dataset: Any) -> set[str]:
    """As the loop is meant, with another number of loops before it."""
    for element in dataset:
        _x, _y = element["x"], element["y"]
        for _pair, _other in zip(element, element, strict=True):
            pass
        return {name for _, name in enumerate(element)}
    return set()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_loop_that_takes_dicts_apart_is_told_how_to_get_tuples(framework: str, any_url: str) -> None:
    """It got the names of the tensors in silence, and failed far from there."""
    produce(any_url, "train", 40)
    adapter = importlib.import_module(f"penstock.{framework}")
    verb = rf"penstock\.{framework}\.dataset\(loader, select=\('x', 'y'\)\)"
    with penstock.Loader("train", group="g", batch_size=8, url=any_url, notify=lambda _: None) as loader:
        dataset = adapter.dataset(loader)
        loops: list[Callable[[Any], None]] = [taken_apart, taken_apart_by_number]
        for loop in loops:
            with pytest.raises(TypeError, match=verb):
                loop(dataset)
        assert named(dataset) == {"x", "y"}
        taken_apart(adapter.dataset(loader, select=("x", "y")))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("given", ["train", None, [1], {"x": 1}])
def test_an_adapter_says_what_it_takes(framework: str, given: Any) -> None:
    """A stream's name is what everything else takes first."""
    name = repr(given) if given == "train" else "'train'"
    with pytest.raises(TypeError, match=rf"expected a loader: write dataset\(penstock\.Loader\({name}, group="):
        importlib.import_module(f"penstock.{framework}").dataset(given)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_adapter_asks_for_the_loader_of_a_view(framework: str, any_url: str) -> None:
    """A view's verbs are the adapter's arguments."""
    with penstock.Loader("train", group="g", batch_size=8, url=any_url, notify=lambda _: None) as loader:
        with pytest.raises(TypeError, match=r"got a View, expected its loader: write dataset\(loader, select="):
            importlib.import_module(f"penstock.{framework}").dataset(loader.view())
        with pytest.raises(TypeError, match=r"dataset\(\) has no argument 'batch_size'"):
            importlib.import_module(f"penstock.{framework}").dataset(loader, batch_size=8)


def test_batches_of_torch_say_what_to_write(any_url: str) -> None:
    """They were bare dicts: "KeyError: 'image'" names neither the tensors nor the way."""
    produce(any_url, "train", 40)
    with penstock.Loader("train", group="g", batch_size=8, url=any_url, notify=lambda _: None) as loader:
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

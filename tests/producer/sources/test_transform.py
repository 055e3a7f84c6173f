"""The user's function on every sample: how it is called, and how its failures are reported."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import SampleError, SourceError
from penstock_producer.sources.seeding import sample_rng
from penstock_producer.sources.transform import Transform
from tests.producer.sources.conftest import UserModule

RNG = sample_rng(0, 0, 0, 0)


def plain(sample: Any) -> Any:
    """One argument."""
    return {"x": sample}


def with_option(sample: Any, strength: float = 2.0) -> Any:
    """One argument and an option."""
    return {"x": sample * strength}


def with_rng(sample: Any, rng: np.random.Generator) -> Any:
    """Two arguments."""
    return {"x": sample, "r": rng.random()}


def with_optional_rng(sample: Any, rng: np.random.Generator | None = None) -> Any:
    """Works without Penstock too."""
    return {"x": sample, "r": rng is not None}


class Callable:
    """An object with settings."""

    def __call__(self, sample: Any, generator: np.random.Generator) -> Any:
        """Apply the transform as a method."""
        return {"x": sample, "r": generator.random()}


@pytest.mark.parametrize(
    "function", [plain, with_option, functools.partial(with_option, strength=3.0), float, lambda *a: len(a)]
)
def test_functions_of_a_sample_get_the_sample_alone(function: Any) -> None:
    """A second parameter with a default is an option of the user's, not a place for the generator."""
    transform = Transform.of(function)
    assert not transform.takes_rng
    assert "x" in transform(1, RNG, "a.png")


@pytest.mark.parametrize("function", [with_rng, with_optional_rng, Callable()])
def test_functions_of_two_arguments_get_a_generator(function: Any) -> None:
    """Random augmentation that can be repeated needs a generator from outside."""
    transform = Transform.of(function)
    assert transform.takes_rng
    assert transform(1, RNG, "a.png")["r"]


def needs_three(a: Any, b: Any, c: Any) -> None:
    """Too many."""


def needs_none() -> None:
    """Too few."""


def keyword_only(sample: Any, *, rng: Any) -> None:
    """Not by position."""


@pytest.mark.parametrize("function", [needs_three, needs_none, keyword_only])
def test_other_signatures_are_refused_before_the_first_sample(function: Any) -> None:
    """Else every single sample would be quarantined."""
    with pytest.raises(
        SourceError, match=rf"{function.__name__}\(.*\) cannot be called; expected f\(sample\) or f\(sample, rng\)"
    ):
        Transform.of(function)


def test_a_failure_names_sample_exception_and_the_users_line(user_module: UserModule) -> None:
    """The user knows their own file, not Penstock's or numpy's."""
    name = user_module(
        """
        import numpy as np
        def broken(sample):
            inner = sample["x"]
            return {"x": np.concatenate([inner, np.zeros((2, 2))])}
        def nothing(sample):
            sample["x"] = 1
        """
    )
    with pytest.raises(
        SampleError, match=rf"^cat/1\.png: transform {name}:broken failed: ValueError: .* \({name}\.py:5\)$"
    ):
        Transform.load(f"{name}:broken")({"x": np.zeros(3)}, RNG, "cat/1.png")
    with pytest.raises(SampleError, match=rf"^cat/1\.png: transform {name}:nothing returned None; expected a dict"):
        Transform.load(f"{name}:nothing")({"x": 0}, RNG, "cat/1.png")


@pytest.mark.parametrize("made", [[{"x": 1}, {"x": 2}], (part for part in ({"x": 1}, {"x": 2}))])
def test_a_transform_of_several_samples_is_refused_in_words(made: object) -> None:
    """The message named a tensor 'x' that the user did not make."""
    with pytest.raises(SampleError, match=r"returned a (list|generator); .* makes exactly one sample: a source of the"):
        Transform.of(lambda _: made)(1, RNG, "a.png")


def test_a_sample_may_be_refused_on_purpose() -> None:
    """A transform that finds a sample unfit says why, and it is quarantined under its name."""

    def refuse(sample: Any) -> Any:
        raise SampleError("too dark")

    with pytest.raises(SampleError, match=r"^a\.png: too dark$"):
        Transform.of(refuse)(1, RNG, "a.png")


def test_several_lines_of_a_message_become_one() -> None:
    """Reports hold one line per bad sample."""

    def fails(sample: Any) -> Any:
        raise ValueError("one\n  two")

    with pytest.raises(SampleError, match="ValueError: one two"):
        Transform.of(fails)(1, RNG, "a.png")


def test_what_is_no_function_is_refused() -> None:
    """A notebook may pass anything."""
    with pytest.raises(SourceError, match="transform int is a int; expected a function"):
        Transform.of(3)  # type: ignore[arg-type]

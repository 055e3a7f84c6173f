"""Generators: one pass in order, alone or in pairs, endless or not, with bad items that do not end the pass."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import SampleError, SourceError
from penstock_producer.sources.config import GeneratorConfig, LocalConfig, SourceConfig
from penstock_producer.sources.generator import BrokenIterable, GeneratorSource
from penstock_producer.sources.names import register
from penstock_producer.sources.open import open_source
from penstock_producer.sources.protocol import IterSource
from penstock_producer.sources.seeding import sample_rng
from tests.contracts.iterable import IterableContract, open_items
from tests.producer.sources.conftest import UserModule

CODE = """
import itertools
import numpy as np
def five():
    yield from range(5)
def three():
    return iter("abc")
def endless():
    return itertools.count()
def none():
    return []
def fails():
    yield 0
    yield 1 / 0
def pairs():
    for first in range(0, 20, 4):
        yield np.arange(first, first + 4), np.zeros((4, 2, 2))
half = iter(range(3))
def named(number):
    return {"x": number, "y": number % 2}
def square(number, rng):
    if number == 2:
        raise ValueError("odd two")
    return number * number, int(rng.integers(100))
class Rows:
    def __len__(self):
        return 3
    def __getitem__(self, number):
        return number
rows = Rows()
"""


@pytest.fixture
def name(user_module: UserModule) -> str:
    """The module above."""
    return user_module(CODE)


def passed(source: IterSource) -> list[Any]:
    """One pass: samples, or the text of what was wrong with them."""
    made: list[Any] = []
    for position, item in enumerate(source):
        try:
            made.append(source.make(item, position, sample_rng(0, 0, 0, position)))
        except SampleError as error:
            made.append(str(error))
    return made


class TestGenerator(IterableContract):
    """An iterable keeps every promise of one, whichever way it is named."""

    @pytest.fixture(params=["by name", "with a transform", "in pairs", "in batches", "of a notebook"])
    def config(self, name: str, request: pytest.FixtureRequest) -> GeneratorConfig | LocalConfig:
        """Return what a job would carry; for a notebook the worker's process has the object."""
        match request.param:
            case "in pairs":
                return GeneratorConfig(pairs={"x": f"{name}:five", "y": f"{name}:endless"}, limit=5)
            case "in batches":
                return GeneratorConfig(name=f"{name}:pairs", batched=True)
            case "of a notebook":
                return LocalConfig(token=register(lambda: range(5)))
            case "with a transform":
                return GeneratorConfig(name=f"{name}:five", transform=f"{name}:named")
        return GeneratorConfig(name=f"{name}:five")

    def others(self, config: Any) -> list[SourceConfig]:
        """Return the same source with other options. A notebook has no options, and gives another object."""
        if isinstance(config, LocalConfig):
            return [LocalConfig(token=register(lambda: range(2))), LocalConfig(token=register(lambda: range(3)))]
        return super().others(config)

    @pytest.fixture
    def failing(self, name: str) -> GeneratorConfig:
        """One that raises."""
        return GeneratorConfig(name=f"{name}:fails")

    @pytest.fixture
    def empty(self, name: str) -> GeneratorConfig:
        """One without items."""
        return GeneratorConfig(name=f"{name}:none")


class TestEndless(IterableContract):
    """An endless generator keeps them, too, and is read no further than needed."""

    @pytest.fixture
    def config(self, name: str) -> GeneratorConfig:
        """Return the configuration of a feed."""
        return GeneratorConfig(name=f"{name}:endless", endless=True)

    @pytest.fixture
    def failing(self, name: str) -> GeneratorConfig:
        """A camera that is unplugged."""
        return GeneratorConfig(name=f"{name}:fails", endless=True)

    @pytest.fixture
    def empty(self, name: str) -> GeneratorConfig:
        """One that never began."""
        return GeneratorConfig(name=f"{name}:none", endless=True)

    def test_it_is_asked_for_an_item_when_that_is_wanted(self) -> None:
        """A camera's frames are of now: one that is taken ahead is old when it is written, or lost with its process."""
        asked = itertools.count()
        items = iter(open_items(LocalConfig(token=register(lambda: asked))))
        assert [next(items) for _ in range(1000)] == list(range(1000))
        assert next(asked) == 1000


def test_a_bad_item_does_not_end_the_pass(name: str) -> None:
    """A generator that has raised is over, so making the sample is a step of its own."""
    source = open_items(GeneratorConfig(name=f"{name}:five", transform=f"{name}:square"))
    made = passed(source)
    assert [sample["x"] for sample in made if isinstance(sample, dict)] == [0, 1, 9, 16]
    assert made[2] == f"{name}:five[2]: transform {name}:square failed: ValueError: odd two ({name}.py:23)"
    assert passed(source) == made


def test_pairs_are_walked_in_step(name: str) -> None:
    """Images from one generator, masks from another."""
    pairs = {"x": f"{name}:five", "y": f"{name}:endless"}
    source = open_items(GeneratorConfig(pairs=pairs, limit=5))
    assert passed(source) == [{"x": number, "y": number} for number in range(5)]


def test_pairs_that_end_apart_say_which(name: str) -> None:
    """A silent end would hide that images and masks do not belong together."""
    source = open_items(GeneratorConfig(pairs={"x": f"{name}:five", "text": f"{name}:three"}))
    made = iter(source)
    assert [item["text"] for item in itertools.islice(made, 3)] == ["a", "b", "c"]
    with pytest.raises(SourceError, match="'text' ended after 3 items while 'x' went on; pairs end together"):
        next(made)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("fails", r"failed at item 1: ZeroDivisionError: division by zero \(user_\w+\.py:14\)"),
        ("square", "gave nothing to iterate: TypeError"),
    ],
)
def test_an_iterable_that_fails_says_where(name: str, attribute: str, message: str) -> None:
    """The line to look at, in the user's own code."""
    with pytest.raises(SourceError, match=message):
        passed(open_items(GeneratorConfig(name=f"{name}:{attribute}")))


@pytest.mark.parametrize("batch", [(np.zeros(4), np.zeros(3)), (np.zeros(()),), (), 7], ids=str)
def test_a_batch_whose_tensors_disagree_is_a_bad_item(batch: Any) -> None:
    """It is unknown which rows belong together, so the pass continues with the next batch."""
    source = GeneratorSource(lambda: [batch, (np.zeros(4),)], "mine", batched=True)
    bad, good = passed(source)
    assert "[0]: tensors disagree on the number of samples: " in bad
    assert good["x"].shape == (4,)


@pytest.mark.parametrize("attribute", ["Rows", "rows"])
def test_what_has_a_length_and_items_and_no_iterator_is_refused(name: str, attribute: str) -> None:
    """Python would walk it by numbers until an IndexError, which few datasets raise: an epoch without end."""
    source = open_items(GeneratorConfig(name=f"{name}:{attribute}"))
    with pytest.raises(SourceError, match="but is no iterable: read it with the source kind dataset"):
        list(source)


def test_an_iterator_is_walked_once(name: str) -> None:
    """Its second epoch would be empty in silence."""
    source = open_items(GeneratorConfig(name=f"{name}:half"))
    assert len(passed(source)) == 3
    with pytest.raises(SourceError, match="is an iterator and was read already; give the function that makes it"):
        iter(source)


def test_an_iterator_that_was_used_up_says_what_to_give_instead() -> None:
    """A notebook's cell is run twice, and the second run was only told that there are no items."""
    used = (item for item in range(3))
    list(used)
    source = open_items(LocalConfig(token=register(used)))
    with pytest.raises(BrokenIterable, match="gave no items: an iterator can be read once; give the function that"):
        list(source)


@pytest.mark.parametrize(
    ("error", "is_broken"), [(NameError, True), (TypeError, True), (OSError, False), (ValueError, False)]
)
def test_an_error_that_code_makes_each_time_is_told_from_one_that_may_pass(
    error: type[Exception], is_broken: bool
) -> None:
    """A job is tried again for a lost connection, and not for a name that nobody defined."""

    def fails() -> Any:
        raise error("x")
        yield

    for factory in (fails, lambda: next(fails())):
        with pytest.raises(SourceError) as caught:
            list(GeneratorSource(factory, "mine"))
        assert isinstance(caught.value, BrokenIterable) is is_broken


def test_objects_of_a_notebook_are_read_as_what_they_are() -> None:
    """produce(dataset) should not need to be told."""
    kinds = {unit: open_source(LocalConfig(token=register(value))).unit for unit, value in NOTEBOOK.items()}
    assert kinds == {unit: unit for unit in NOTEBOOK}
    with pytest.raises(SourceError, match="an int cannot be read; expected items by index"):
        open_source(LocalConfig(token=register(7)))


NOTEBOOK: dict[str, Any] = {"sample": [1, 2], "item": {1, 2}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "images"}, "images.path: Field required"),
        ({"kind": "pictures"}, "source: Input tag 'pictures'"),
        ({"kind": "images", "path": "a", "sise": 3}, "images.sise: Extra inputs are not permitted; found 3"),
        ({"kind": "images", "path": "a", "resize": 0}, "images.resize"),
        ({"kind": "images", "path": "a", "label": "a:b", "labels": "c"}, "exclude each other"),
        (
            {"kind": "images", "path": "a", "resize": [8, 9], "crop": [9, 9]},
            r"crop \(9, 9\) is larger than resize \(8, 9\)",
        ),
        ({"kind": "images", "path": "a", "resize": 8, "crop": 9}, r"crop \(9, 9\) is larger"),
        ({"kind": "generator"}, "give either name"),
        ({"kind": "keras", "name": "a:b", "sizes": [0, 1]}, r"keras\.sizes\.0"),
    ],
)
def test_a_wrong_config_names_the_field(fields: dict[str, Any], message: str) -> None:
    """Configs come from the command line and from jobs written by another version."""
    from penstock_producer.sources.config import parse_config

    with pytest.raises(SourceError, match=message) as caught:
        parse_config(fields)
    assert "\n" not in str(caught.value)

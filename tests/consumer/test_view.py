"""Views: batches for a plain loop, and what is acknowledged of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_common.tuning import Tuning
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.selection import nested
from penstock_producer.write.writer import Writer
from tests.contracts.feed import loader_of, numbers, produce
from tests.contracts.ordered import plan, rank_of


def delivered(client: Client) -> int:
    """Return the samples in the group's ledgers."""
    return audit_stream(client, "t").delivered.get("g", 0)


def halved(batch: Batch) -> dict[str, Any]:
    """Return floats made on the reader's side."""
    return {**batch, "half": batch["y"] / np.float32(2)}


def test_a_mapped_batch_is_a_batch_still(any_url: str, any_client: Client) -> None:
    """It can be acknowledged by the loop, and has the names of its samples."""
    produce(any_url, "t", 40)
    with loader_of(any_url, acknowledge="manual") as loader:
        for number, batch in enumerate(loader.view().map(halved)):
            assert batch["half"].tolist() == [y / 2 for y in batch["y"].tolist()]
            assert [offset for _, _, offset in batch.identities()] == batch["y"].tolist()
            if number % 2:
                loader.acknowledge(batch)
    assert delivered(any_client) == 16


def test_selected_tensors_come_as_tuples_or_bare(any_url: str) -> None:
    """A training step takes them in this form, and select= gives the same form in every adapter."""
    produce(any_url, "t", 20, epochs=2)
    with loader_of(any_url) as loader:
        found = list(loader.view().map(halved).select("half", "y"))
        assert all(type(pair) is tuple and (pair[0] * 2 == pair[1]).all() for pair in found)
        assert [row for y in loader.view().select("y") for row in y.tolist()] == list(range(20))


def test_a_name_that_is_not_there_is_answered_with_those_that_are(any_url: str) -> None:
    """A typo is found at the first batch, in one line."""
    produce(any_url, "t", 20)
    with loader_of(any_url) as loader, pytest.raises(ValueError, match="the stream has x, y"):
        next(iter(loader.view().select("x", "label")))


def test_names_with_slashes_become_dicts_in_dicts(any_url: str) -> None:
    """A sample's structure is kept, though tensors are stored flat."""
    spec = {"image/left": ("uint8", (2,)), "image/right": ("uint8", (2,)), "y": ("int64", ())}
    with Writer("t", url=any_url, spec=spec, tuning=Tuning(notify=lambda _: None)) as writer, writer.epoch() as epoch:
        epoch.write({"image/left": np.zeros(2, np.uint8), "image/right": np.ones(2, np.uint8), "y": 5})
    with loader_of(any_url) as loader:
        (batch,) = loader.view().nested()
    assert batch["image"]["right"].tolist() == [[1, 1]]
    assert batch["y"].tolist() == [5]
    for clash in ({"a": 1, "a/b": 2}, {"a/b": 2, "a": 1}):
        with pytest.raises(ValueError, match="cannot be nested"):
            nested(clash)


def test_single_samples_are_acknowledged_with_the_last_of_their_batch(any_url: str, any_client: Client) -> None:
    """One acknowledgement for each sample would be most of the work."""
    produce(any_url, "t", 20)
    with loader_of(any_url, remainder="pad") as loader:
        samples = iter(loader.view().samples())
        for number in range(20):
            sample = next(samples)
            assert sample["x"].shape == (4,)
            assert sample["y"] == number
            loader._acknowledger.flush()
            assert delivered(any_client) == number // 8 * 8
        assert next(samples, None) is None  # padding of the last batch is not a sample
    assert delivered(any_client) == 20


def test_what_was_not_taken_is_not_acknowledged_and_comes_in_the_next_pass(any_url: str, any_client: Client) -> None:
    """A short pass is a look at the data, and must not lose the rest."""
    produce(any_url, "t", 40)
    with loader_of(any_url) as loader:
        first = loader.view().take(2)
        assert numbers(first) == list(range(16))
        loader._acknowledger.flush()
        assert delivered(any_client) == 8  # the second stays in hand until the next pass, or the end
        assert numbers(first) == list(range(16, 32))
    assert delivered(any_client) == 32
    with loader_of(any_url) as loader:
        assert numbers(loader) == list(range(32, 40))


def test_skipped_batches_count_as_trained_on(any_url: str, any_client: Client) -> None:
    """Otherwise the epoch would not close, and they would come again."""
    produce(any_url, "t", 40)
    with loader_of(any_url) as loader:
        assert numbers(loader.view().skip(3)) == list(range(24, 40))
    assert delivered(any_client) == 40


def test_views_know_their_length_where_the_loader_does(any_url: str) -> None:
    """Progress bars and schedules need it."""
    plan(any_url, [40])
    with rank_of(any_url) as loader:
        assert [len(view) for view in (loader.view(), loader.view().map(halved).take(3), loader.view().take(9))] == [
            5, 3, 5,
        ]  # fmt: skip
        for view in (loader.view().samples(), loader.view().skip(1)):
            with pytest.raises(TypeError):
                len(view)


def test_a_state_taken_of_a_view_is_the_loaders(any_url: str) -> None:
    """Whatever a batch was converted to, it was one batch."""
    plan(any_url, [40])
    with rank_of(any_url, acknowledge="on_checkpoint") as loader:
        view = loader.view().map(halved).select("y")
        batches = iter(view)
        next(batches), next(batches)
        state = view.state_dict()
    with rank_of(any_url) as loader:
        view = loader.view().collate(lambda batch: sum(batch["y"].tolist()))
        view.load_state_dict(state)
        assert list(view) == [sum(range(at, at + 8)) for at in (16, 24, 32)]


def test_a_view_that_hides_the_batches_refuses_to_acknowledge_by_hand(any_url: str) -> None:
    """Without the batches, a user could not name what to acknowledge."""
    produce(any_url, "t", 20)
    with loader_of(any_url, acknowledge="manual") as loader:
        for verb in ("samples", "nested"):
            with pytest.raises(ValueError, match="needs the batches"):
                getattr(loader.view(), verb)()
        with pytest.raises(ValueError, match="needs the batches"):
            loader.view().select("y")


def test_a_map_that_gives_no_dict_is_told_what_takes_anything(any_url: str) -> None:
    """The error names the likely next step, in one line."""
    produce(any_url, "t", 20)
    with loader_of(any_url) as loader, pytest.raises(ValueError, match=r"collate\(\) takes anything"):
        next(iter(loader.view().map(lambda batch: batch["y"])))

"""Mixtures of streams: which loader gives which step, what is acknowledged, and exact resuming."""

from __future__ import annotations

import importlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from penstock_common.errors import GroupFinished, PenstockError, ServerUnavailable, SpecMismatch, StateMismatch
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_common.stream.streams import load_stream, set_plan
from penstock_consumer.adapters.step_tracking import StepTracker
from penstock_consumer.read.ack import Acknowledger
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.mixture import Mixture, choice, mix
from penstock_consumer.stages.batch import Batch
from tests.contracts.feed import produce
from tests.contracts.processes import child
from tests.tuned import tuned

SIZES = {"a": 160, "b": 80}
WEIGHTS = {"a": 0.7, "b": 0.3}
Step = tuple[str, int, tuple[int, ...]]


def streams(url: str, epochs: int = 1) -> None:
    """Write the streams a and b."""
    for name, count in SIZES.items():
        produce(url, name, count, epochs=epochs, block_samples=7)


@contextmanager
def mixture(
    url: str, *, ordered: bool = True, seed: int = 3, ends: Any = "last", group: str = "g", **settings: Any
) -> Iterator[Mixture]:
    """Return a mixture of both streams, with seven of ten batches from a."""
    settings = {"notify": lambda _: None, "timeout_s": 20, **settings}
    if ordered:
        settings["order"] = "canonical"
    loaders = {name: Loader(name, group=group, batch_size=8, url=url, **tuned("Loader", settings)) for name in SIZES}
    with mix({name: (loader, WEIGHTS[name]) for name, loader in loaders.items()}, seed=seed, ends=ends) as mixed:
        yield mixed


def step(batch: Batch) -> Step:
    """Return values that identify a batch."""
    return batch.source, batch.epoch, tuple(batch["y"].tolist())


def delivered(client: Client, group: str = "g") -> dict[str, int]:
    """Return the acknowledged samples of each stream."""
    return {name: audit_stream(client, name).delivered.get(group, 0) for name in SIZES}


def test_a_choice_is_the_same_for_ever() -> None:
    """A user who resumes with another version of numpy, or of Penstock, gets the same mixture."""
    orders = ["".join(choice({"a": 0.5, "b": 0.3, "c": 0.2}, 7, number)) for number in range(8)]
    assert orders == ["cba", "abc", "acb", "acb", "abc", "abc", "bac", "acb"]


def test_choices_follow_the_weights_and_the_seed() -> None:
    """Weights need not sum to one."""
    counted = Counter(next(choice({"a": 7, "b": 2, "c": 1}, 5, number)) for number in range(10_000))
    assert abs(counted["a"] - 7000) < 200
    assert abs(counted["c"] - 1000) < 120
    one, other = ([next(choice(WEIGHTS, seed, number)) for number in range(64)] for seed in (1, 2))
    assert one != other


@pytest.mark.parametrize("ordered", [True, False])
def test_an_iteration_is_each_streams_next_epoch_whole(ordered: bool, any_url: str, any_client: Client) -> None:
    """Weights decide when a sample comes, not whether: nothing of a smaller stream is repeated, and nothing left
    out.
    """
    streams(any_url, epochs=2)
    with mixture(any_url, ordered=ordered) as mixed:
        for epoch in range(2):
            found = [step(batch) for batch in mixed]
            assert {number for _, number, _ in found} == {epoch}
            for name, count in SIZES.items():
                assert sorted(n for source, _, row in found if source == name for n in row) == list(range(count))
            assert 2 < sum(source == "b" for source, _, _ in found[:25]) < 13
    assert delivered(any_client) == {name: 2 * count for name, count in SIZES.items()}
    assert all(audit_stream(any_client, name).is_clean for name in SIZES)


def test_ending_with_the_first_leaves_the_rest_for_the_next_iteration(any_url: str) -> None:
    """This suits users who want the right mixture more than every sample in each pass."""
    streams(any_url, epochs=2)
    with mixture(any_url, ends="first") as mixed:
        first = [step(batch) for batch in mixed]
        second = [step(batch) for batch in mixed]
    for name, size in SIZES.items():
        rows = [row for source, epoch, row in first + second if source == name and epoch == 0]
        assert rows == [tuple(range(at, at + 8)) for at in range(0, len(rows) * 8, 8)]
        counted = Counter(epoch for source, epoch, _ in first + second if source == name)
        assert counted[0] <= size // 8
    whole = [name for name in SIZES if sum(source == name for source, _, _ in first) == SIZES[name] // 8]
    assert whole
    assert {epoch for source, epoch, _ in second if source == whole[0]} == {1}
    assert len(first) < 30


def test_ending_with_the_first_reaches_every_sample_of_the_last_epochs(any_url: str, any_client: Client) -> None:
    """The first loader that had read all its epochs ended the mixture, and the rest of the others never came."""
    streams(any_url, epochs=2)
    for name in SIZES:
        set_plan(any_client, load_stream(any_client, name), 2)
    passes = []
    with mixture(any_url, ends="first") as mixed, pytest.raises(GroupFinished):
        while True:
            passes.append(sum(1 for _ in mixed))
    assert passes[-1] == 0
    assert sum(passes) == sum(2 * size // 8 for size in SIZES.values())
    assert delivered(any_client) == {name: 2 * count for name, count in SIZES.items()}


def test_a_batch_is_acknowledged_when_the_next_is_asked_for_whoever_gives_it(any_url: str, any_client: Client) -> None:
    """Its own loader may have its turn much later, and a writer may wait for the space."""
    streams(any_url)
    with mixture(any_url) as mixed:
        counted: Counter[str] = Counter({"a": 0, "b": 0})
        before = None
        for number, batch in enumerate(mixed):
            if before is not None:
                counted[before] += 8
            for loader in mixed._loaders.values():
                loader._acknowledger.flush()
            if number in (1, 5, 6, 7, 8):
                assert delivered(any_client) == counted
            before = batch.source


@pytest.mark.parametrize("ends", ["last", "first"])
@pytest.mark.parametrize("at", [0, 1, 7, 13, 22, 29, 30])
def test_a_resumed_mixture_goes_on_with_exactly_the_batches_that_were_to_come(at: int, ends: Any, any_url: str) -> None:
    """This also holds if one stream's epoch was over by then, and across the end of the pass."""
    streams(any_url, epochs=2)
    with mixture(any_url, group="whole", ends=ends) as mixed:
        first, second = [step(batch) for batch in mixed], [step(batch) for batch in mixed]
    at = min(at, len(first))
    with mixture(any_url, acknowledge="on_checkpoint", ends=ends) as mixed:
        batches = iter(mixed)
        assert [step(next(batches)) for _ in range(at)] == first[:at]
        state = mixed.state_dict()
        for _ in range(min(3, len(first) - at)):
            next(batches)
    with mixture(any_url, acknowledge="on_checkpoint", ends=ends) as mixed:
        mixed.load_state_dict(state)
        if at < len(first):
            assert [step(batch) for batch in mixed] == first[at:]
        assert [step(batch) for batch in mixed] == second


def train(url: str, stop_at: str) -> None:
    """Print batches, save the state after every fifth, and stop to be killed."""
    with mixture(url, acknowledge="on_checkpoint") as mixed:
        for number, batch in enumerate(mixed, 1):
            print(json.dumps(step(batch)), flush=True)
            if number % 5 == 0:
                state = mixed.state_dict()
                mixed.checkpointed(state)
                print(json.dumps(state), flush=True)
            if number == int(stop_at):
                print("null", flush=True)
                time.sleep(60)


@pytest.mark.parametrize("stop_at", [9, 23])
def test_a_killed_mixture_goes_on_from_its_last_checkpoint(stop_at: int, any_url: str, any_client: Client) -> None:
    """SIGKILL: each stream returns to the checkpoint, and so does the order in which they are mixed."""
    streams(any_url)
    with mixture(any_url, group="whole") as mixed:
        whole = [step(batch) for batch in mixed]
    with child(train, any_url, stop_at) as trainer:
        state: dict[str, Any] = {}
        while (said := json.loads(trainer.line())) is not None:
            state = said if isinstance(said, dict) else state
        trainer.kill()
    with mixture(any_url, acknowledge="on_checkpoint", lease_s=2) as mixed:
        mixed.load_state_dict(state)
        rest = [step(batch) for batch in mixed]
        mixed.checkpointed()
    assert rest == whole[stop_at // 5 * 5 :]
    assert delivered(any_client) == SIZES


def test_behind_a_framework_a_state_is_what_was_trained_on_not_what_was_pulled(any_url: str) -> None:
    """Frameworks read ahead of the step, and adapters use a mixture like a loader."""
    streams(any_url)
    with mixture(any_url, group="whole") as mixed:
        whole = [step(batch) for batch in mixed]
    with mixture(any_url) as mixed:
        tracker = StepTracker.of(mixed)
        passes = tracker.passes(is_ordered=True, is_drained=True)
        next(passes)
        pulled = tracker.batches()
        ahead = [next(pulled) for _ in range(12)]
        for _, token in ahead[:7]:
            tracker.arrive([token])  # the seventh is in the step
        state = mixed.state_dict()
        passes.close()
    with mixture(any_url) as mixed:
        mixed.load_state_dict(state)
        assert [step(batch) for batch in mixed] == whole[7:]


def test_what_was_pulled_and_not_trained_on_comes_again_in_its_turn(any_url: str, any_client: Client) -> None:
    """An interrupted pass, as by fit's steps_per_epoch, has batches of both streams under way."""
    streams(any_url)
    with mixture(any_url, group="whole") as mixed:
        whole = [step(batch) for batch in mixed]
    with mixture(any_url) as mixed:
        tracker = StepTracker.of(mixed)
        passes = tracker.passes(is_ordered=True, is_drained=True)
        next(passes)
        pulled = tracker.batches()
        for _, token in [next(pulled) for _ in range(12)][:7]:
            tracker.arrive([token])
        passes.close()
        found: list[Step] = []
        for _ in tracker.passes(is_ordered=True, is_drained=True):
            for batch, token in tracker.batches():
                found.append((batch.source, batch.epoch, tuple(batch["y"].tolist())))
                tracker.arrive([token])
        assert found == whole[7:]
    assert delivered(any_client) == SIZES


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_adapters_take_a_mixture_for_a_loader(framework: str, any_url: str, any_client: Client) -> None:
    """A user who trains on one stream today can mix two tomorrow, without other changes."""
    pytest.importorskip(framework)
    adapter = importlib.import_module(f"penstock.{framework}")
    streams(any_url, epochs=2)
    with mixture(any_url, group="whole") as mixed:
        whole = [[list(row) for _, _, row in map(step, mixed)] for _ in range(2)]
    with mixture(any_url) as mixed:
        batches = adapter.dataset(mixed)
        found = [[np.asarray(batch["y"]).tolist() for batch in batches] for _ in range(2)]
    assert found == whole
    assert delivered(any_client) == {name: 2 * count for name, count in SIZES.items()}


def test_a_state_of_another_mixture_is_refused(any_url: str) -> None:
    """Other weights or another seed would silently give other batches."""
    streams(any_url)
    with mixture(any_url) as mixed:
        state = mixed.state_dict()
    with mixture(any_url, seed=4) as mixed, pytest.raises(StateMismatch, match="same names with the same weights"):
        mixed.load_state_dict(state)


def test_streams_of_different_samples_are_named_where_one_spec_is_wanted(any_url: str) -> None:
    """An adapter builds one element of it, and a plain loop would fail in the middle of an epoch."""
    streams(any_url)
    produce(any_url, "c", 10, spec={"x": ("float32", (4,)), "y": ("int32", ())})
    settings: dict[str, Any] = {"group": "g", "batch_size": 8, "url": any_url, "notify": lambda _: None}
    loaders = {name: (Loader(name, **tuned("Loader", settings)), 1.0) for name in ("a", "c")}
    with mix(loaders) as mixed:
        for ask in (lambda: mixed.spec, lambda: next(iter(mixed))):
            with pytest.raises(SpecMismatch, match="mix streams whose tensors are the same"):
                ask()


def test_a_state_behind_a_framework_that_has_pulled_everything_is_of_the_step_alone(any_url: str) -> None:
    """A framework may hold both whole streams before its step has had a batch of the second."""
    streams(any_url, epochs=2)
    with mixture(any_url, group="whole") as mixed:
        whole = [step(batch) for batch in mixed]
    seen = next(at for at, (source, _, _) in enumerate(whole) if source != whole[0][0])
    for arrived in (0, seen, len(whole) - 1):
        with mixture(any_url, group=f"g{arrived}", acknowledge="on_checkpoint") as mixed:
            tracker = StepTracker.of(mixed)
            passes = tracker.passes(is_ordered=True, is_drained=True)
            next(passes)
            pulled = list(tracker.batches())
            assert len(pulled) == len(whole)
            for _, token in pulled[:arrived]:
                tracker.arrive([token])
            state = mixed.state_dict()
            passes.close()
        with mixture(any_url, group=f"g{arrived}", acknowledge="on_checkpoint") as mixed:
            mixed.load_state_dict(state)
            assert [step(batch) for batch in mixed] == whole[arrived:]


def test_a_state_loaded_in_the_middle_of_a_pass_ends_it_and_one_that_is_refused_moves_nothing(any_url: str) -> None:
    """A half restored mixture would be another mixture."""
    streams(any_url)
    with mixture(any_url, group="whole") as mixed:
        whole = [step(batch) for batch in mixed]
    with mixture(any_url) as mixed:
        found: list[Step] = []
        for batch in mixed:
            found.append(step(batch))
            if len(found) == 4:
                state = mixed.state_dict()
            if len(found) == 9:
                other = {**state["loaders"]["b"], "stream_id": "another"}
                with pytest.raises(StateMismatch, match="stream_id"):
                    mixed.load_state_dict({**state, "loaders": {**state["loaders"], "b": other}})
            if len(found) == 20:
                mixed.load_state_dict(state)
        assert found == whole[:20]
        assert [step(batch) for batch in mixed] == whole[4:]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("how", ["close", "with"])
def test_a_loader_that_fails_to_close_leaves_no_other_one_open(any_url: str, name: str, how: str) -> None:
    """A server of one stream may be away. The loader of another one stayed a member, and kept its batches."""
    streams(any_url)
    with mixture(any_url) as mixed:
        next(iter(mixed))
        other = next(loader for stream, loader in mixed._loaders.items() if stream != name)
        acknowledger = mixed._loaders[name]._acknowledger
        away = patch.object(acknowledger, "close", side_effect=ServerUnavailable("away"))
        with away, pytest.raises(ServerUnavailable):
            mixed.close() if how == "close" else mixed.__exit__(None, None, None)
        with pytest.raises(PenstockError, match="closed"):
            next(iter(other))


def test_what_was_trained_on_is_acknowledged_though_another_loader_fails_to_close(any_url: str) -> None:
    """An error of one loader went to the exit of the other one, which then came back with its last batch."""
    streams(any_url)
    close = Acknowledger.close

    def close_one(self: Acknowledger) -> None:
        if self._stream == "b":
            raise ServerUnavailable("away")
        close(self)

    away = patch.object(Acknowledger, "close", close_one)
    with suppress(ServerUnavailable), away, mixture(any_url) as mixed:
        batches = [batch for _, batch in zip(range(8), mixed, strict=False)]
    trained = [batch for batch in batches if batch.source == "a"]
    with mixture(any_url) as mixed:
        assert mixed._loaders["a"].state_dict()["position"] == 8 * len(trained)


def test_no_loader_moves_if_one_refuses_its_state_for_an_older_server(any_url: str) -> None:
    """The state of the other one looks right, and was loaded before."""
    streams(any_url)
    with mixture(any_url) as mixed:
        batches = iter(mixed)
        states = [mixed.state_dict() for _, _ in zip(range(6), batches, strict=False)]
        for name in SIZES:
            states[3]["loaders"][name]["manifest"] = "made again" if name == "b" else None
        with pytest.raises(StateMismatch, match="manifest"):
            mixed.load_state_dict(states[3])
        assert mixed.state_dict()["loaders"] == states[-1]["loaders"]
        assert step(next(batches)) is not None

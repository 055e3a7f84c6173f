"""The promises of every framework's adapter. A subclass makes its dataset, iterates over it and reads ahead in it."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest

from penstock_common.errors import StateMismatch
from penstock_common.stream.audit import AuditReport, audit_stream
from penstock_common.stream.client import connect
from penstock_common.tuning import Tuning
from penstock_common.wire.spec import SpecLike
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.mixture import Mixture, mix
from penstock_producer.write.writer import Writer
from tests.contracts.feed import produce
from tests.contracts.processes import child
from tests.tuned import tuned

STREAM, GROUP, MEMBER = "train", "net", "first"
SAMPLES, BATCH = 100, 8
MANY = 16
"""The batches that are read ahead, more than an epoch has."""

EVERY_DTYPE: SpecLike = {
    name: (name, (2,))
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "bfloat16", "complex64", "complex128",
    )
}  # fmt: skip


@contextmanager
def loader_of(url: str, **settings: Any) -> Iterator[Loader]:
    """Return a loader of the group that waits at most ten seconds."""
    settings = {"group": GROUP, **settings}
    with Loader(
        STREAM, batch_size=BATCH, url=url, **tuned("Loader", settings, Tuning(timeout_s=10, notify=lambda _: None))
    ) as loader:
        yield loader


@contextmanager
def ordered(url: str, group: str = GROUP, **settings: Any) -> Iterator[Loader]:
    """Return a single rank of its group."""
    with loader_of(url, group=group, order="canonical", **settings) as loader:
        yield loader


@contextmanager
def mixture(url: str, group: str = GROUP) -> Iterator[Mixture]:
    """Yield a mixture of the streams a and b."""
    settings: dict[str, Any] = {"batch_size": BATCH, "url": url, "timeout_s": 10, "notify": lambda _: None}
    loaders = {name: Loader(name, group=group, order="canonical", **tuned("Loader", settings)) for name in ("a", "b")}
    with mix({"a": (loaders["a"], 0.4), "b": (loaders["b"], 0.6)}, seed=3) as mixed:
        yield mixed


def audit(url: str, stream: str = STREAM) -> AuditReport:
    """Return the stream's audit."""
    client = connect(url)
    try:
        return audit_stream(client, stream)
    finally:
        client.close()


def delivered(url: str) -> list[int]:
    """Return the acknowledged samples of the group, per epoch."""
    return [epoch.groups[GROUP].delivered if GROUP in epoch.groups else 0 for epoch in audit(url).epochs]


def acknowledged(url: str) -> bool:
    """Return whether no sample is lost, duplicated or unacknowledged."""
    report = audit(url)
    return report.is_clean and not report.pending and not report.unread


def report_until_killed(steps: Iterable[list[int]]) -> None:
    """Print the labels of each step as a line. It pauses in the fifth step to be killed."""
    for number, labels in enumerate(steps, 1):
        sys.stdout.write(" ".join(map(str, labels)) + "\n")
        sys.stdout.flush()
        if number == 5:
            signal.pause()


class AdapterContract:
    """The promises. Inherit them as ``class TestX(AdapterContract)``."""

    def dataset(self, loader: Loader | Mixture, **settings: Any) -> Any:
        """Return the framework's object.

        Iterating over it gives batches as dicts, unless ``settings`` say otherwise.
        """
        raise NotImplementedError

    def stateful(self, batches: Any) -> Any:
        """Return the part of `dataset`'s result that has state_dict and load_state_dict."""
        return batches

    def read_ahead(self, batches: Any, count: int) -> Any:
        """Iterate like the dataset, but fetch ``batches`` batches in advance."""
        raise NotImplementedError

    def as_numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Return a tensor's values."""
        raise NotImplementedError

    train_until_killed: ClassVar[Callable[..., None]]
    """A function of the test's module, as staticmethod. It reads ``url``'s stream as member MEMBER, reading ahead, and
    gives each step's y to `report_until_killed`."""

    def labels(self, batches: Iterable[Any]) -> list[int]:
        """Return the samples' numbers."""
        return [number for batch in batches for number in self.as_numpy(batch["y"]).tolist()]

    def test_each_pass_is_the_next_epoch_and_acknowledges_it(self, url: str) -> None:
        """After the usual loop, all is acknowledged."""
        produce(url, STREAM, SAMPLES, epochs=3)
        with loader_of(url) as loader:
            batches = self.dataset(loader)
            for _ in range(3):
                assert sorted(self.labels(batches)) == list(range(SAMPLES))
        assert delivered(url) == [SAMPLES] * 3
        assert acknowledged(url)

    def test_what_is_only_read_ahead_is_not_acknowledged(self, any_url: str) -> None:
        """A crash must not lose batches that no step has seen."""
        produce(any_url, STREAM, SAMPLES)
        with loader_of(any_url) as loader:
            pulled = iter(self.read_ahead(self.dataset(loader), MANY))
            for steps in range(1, 6):
                next(pulled)
                hooks_of(loader).acknowledger.flush()
                assert delivered(any_url) == [(steps - 1) * BATCH]

    def test_what_a_broken_off_pass_had_read_ahead_comes_in_the_next(self, any_url: str) -> None:
        """`break` is a common statement, and the remaining data still belongs to the epoch."""
        produce(any_url, STREAM, SAMPLES)
        with loader_of(any_url) as loader:
            batches = self.read_ahead(self.dataset(loader), MANY)
            first = self.labels([next(iter(batches))])
            rest = self.labels(batches)
        assert sorted(first + rest) == list(range(SAMPLES))
        assert acknowledged(any_url)

    def test_what_a_killed_trainer_had_not_trained_on_is_handed_out_again(self, any_url: str) -> None:
        """SIGKILL in the middle of an epoch with batches under way: trained and redelivered samples together are
        all.
        """
        produce(any_url, STREAM, SAMPLES)
        with child(self.train_until_killed, any_url) as trainer:
            trained = [int(number) for _ in range(3) for number in trainer.line().split()]
            trained += [int(number) for line in trainer.kill() for number in line.split()]
        with loader_of(any_url, member=MEMBER) as loader:
            again = self.labels(self.dataset(loader))
        assert set(trained) | set(again) == set(range(SAMPLES))
        assert len(trained) >= 3 * BATCH
        assert len(again) >= SAMPLES - len(trained)
        assert acknowledged(any_url)

    def test_kept_batches_stay_as_they_were(self, any_url: str) -> None:
        """Memory is used again only if nothing refers to it, including the framework's tensors."""
        produce(any_url, STREAM, SAMPLES)
        with loader_of(any_url, prefetch_bytes=1) as loader:
            kept = list(self.dataset(loader))
        assert sorted(self.labels(kept)) == list(range(SAMPLES))
        for batch in kept:
            x, y = self.as_numpy(batch["x"]), self.as_numpy(batch["y"])
            assert np.array_equal(x, np.repeat(y.astype(np.float32)[:, None], 4, axis=1))

    def test_every_dtype_arrives_bit_for_bit(self, any_url: str) -> None:
        """This includes bfloat16 and unsigned types: no dtype is converted to a framework's default."""
        sent: dict[str, np.ndarray[Any, Any]] = {}
        with (
            Writer(STREAM, url=any_url, spec=EVERY_DTYPE, tuning=Tuning(notify=lambda _: None)) as writer,
            writer.epoch() as epoch,
        ):
            for tensor in writer.stream.spec or ():
                kind = np.dtype(tensor.dtype) if tensor.dtype != "bfloat16" else _bfloat16()
                sent[tensor.name] = np.arange(BATCH * 2).reshape(BATCH, 2).astype(kind)
            epoch.write_batch(sent)
        with loader_of(any_url) as loader:
            (batch,) = list(self.dataset(loader))
        for name, values in sent.items():
            got = self.as_numpy(batch[name])
            assert (got.dtype, got.tobytes()) == (values.dtype, values.tobytes())

    def test_a_state_goes_on_exactly_where_the_step_was(self, any_url: str) -> None:
        """However far was read ahead, and whichever process continues, the batches are those of an uninterrupted
        run.
        """
        produce(any_url, STREAM, SAMPLES, epochs=3)
        with ordered(any_url, group="whole") as loader:
            whole = [batch["y"].tolist() for _ in range(2) for batch in loader]
        states, given = [], []
        with ordered(any_url, acknowledge="on_checkpoint") as loader:
            made = self.dataset(loader)
            states.append(self.stateful(made).state_dict())
            for batch in self.read_ahead(made, MANY):
                given.append(self.labels([batch]))
                states.append(json.loads(json.dumps(self.stateful(made).state_dict())))
        assert given == whole[: len(given)]
        for steps in (0, 1, 5, len(given)):
            assert len(json.dumps(states[steps])) < 4096
            with ordered(any_url, acknowledge="on_checkpoint") as loader:
                made = self.dataset(loader)
                self.stateful(made).load_state_dict(states[steps])
                rest: list[list[int]] = []
                while len(rest) < len(whole) - steps:  # the pass after its last batch may be an empty one
                    rest += [self.labels([batch]) for batch in self.read_ahead(made, MANY)]
                assert (steps, rest) == (steps, whole[steps:])

    def test_a_state_loaded_in_the_middle_of_a_pass_ends_it(self, any_url: str) -> None:
        """Batches that were read ahead belong to another position, so the step must get no more of them."""
        produce(any_url, STREAM, SAMPLES)
        with ordered(any_url) as loader:
            made = self.dataset(loader)
            running = iter(self.read_ahead(made, 4))
            seen = [self.labels([next(running)]) for _ in range(2)]
            state = self.stateful(made).state_dict()
            seen += [self.labels([next(running)]) for _ in range(4)]
            self.stateful(made).load_state_dict(state)
            assert list(running) == []
            again = [self.labels([batch]) for batch in made]
            assert seen[2:] == again[:4]
            assert [number for labels in seen[:2] + again for number in labels] == list(range(SAMPLES))
            with pytest.raises(StateMismatch, match="stream_id"):
                self.stateful(made).load_state_dict({**state, "stream_id": "another"})

    def test_a_mixture_goes_on_exactly_where_the_step_was(self, any_url: str) -> None:
        """Each batch comes from the right stream, and each stream continues at its position."""
        produce(any_url, "a", SAMPLES)
        produce(any_url, "b", 2 * SAMPLES)
        with mixture(any_url, "whole") as mixed:
            whole = [batch["y"].tolist() for batch in mixed]
        with mixture(any_url) as mixed:
            made = self.dataset(mixed)
            running = iter(self.read_ahead(made, MANY))
            seen = [self.labels([next(running)]) for _ in range(9)]
            state = json.loads(json.dumps(self.stateful(made).state_dict()))
        assert len(json.dumps(state)) < 4096
        with mixture(any_url) as mixed:
            made = self.dataset(mixed)
            self.stateful(made).load_state_dict(state)
            assert seen + [self.labels([batch]) for batch in made] == whole
        assert [audit(any_url, name).delivered for name in ("a", "b")] == [
            {GROUP: size, "whole": size} for size in (SAMPLES, 2 * SAMPLES)
        ]

    def test_the_number_of_steps_is_known_where_ranks_have_equal_ones(self, any_url: str) -> None:
        """Progress bars and schedules need it, and a wrong one would be worse than none."""
        produce(any_url, STREAM, SAMPLES)
        with ordered(any_url) as loader:
            assert len(self.dataset(loader)) == -(-SAMPLES // BATCH)
        with loader_of(any_url, group="shared") as loader, pytest.raises(TypeError):
            len(self.dataset(loader))

    def test_a_samples_structure_is_kept(self, any_url: str) -> None:
        """Dicts of names, tuples for `fit`, bare tensors, and on request names like a/b as dicts within dicts."""
        spec: SpecLike = {"eye/left": ("float32", (2,)), "eye/right": ("float32", (2,)), "y": ("int64", ())}
        with Writer(STREAM, url=any_url, spec=spec, tuning=Tuning(notify=lambda _: None)) as writer:
            for _ in range(5):
                with writer.epoch() as epoch:
                    epoch.write({"eye/left": [1, 2], "eye/right": [3, 4], "y": 5})
        with loader_of(any_url) as loader:

            def one(**settings: Any) -> Any:
                (element,) = list(self.dataset(loader, **settings))
                return element

            flat, deep = one(), one(nested=True)
            assert set(flat) == {"eye/left", "eye/right", "y"}
            assert {name: set(deep[name]) for name in ("eye",)} == {"eye": {"left", "right"}}
            assert self.as_numpy(deep["eye"]["right"]).tolist() == [[3, 4]]
            y, left = one(select=("y", "eye/left"))
            assert (self.as_numpy(y).tolist(), self.as_numpy(left).tolist()) == ([5], [[1, 2]])
            eye, y = one(select=("eye", "y"))
            assert {name: self.as_numpy(value).tolist() for name, value in eye.items()} == {
                "left": [[1, 2]], "right": [[3, 4]],
            }  # fmt: skip
            assert self.as_numpy(one(select="y")).tolist() == [5]
            with pytest.raises(ValueError, match="the stream has eye/left, eye/right, y"):
                self.dataset(loader, select="ey")

    def test_a_loader_that_acknowledges_by_hand_is_refused(self, any_url: str) -> None:
        """A user could not acknowledge a batch that the framework does not show."""
        produce(any_url, STREAM, SAMPLES)
        with loader_of(any_url, acknowledge="manual") as loader, pytest.raises(ValueError, match="on_next"):
            self.dataset(loader)


def _bfloat16() -> np.dtype[Any]:
    import ml_dtypes

    kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return kind

"""First mistakes in Python: each ends in one line with what was found, why, and what to write."""

from __future__ import annotations

import operator
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import penstock
from penstock_common.errors import (
    BadOption,
    BadSpec,
    GroupNotFound,
    PenstockError,
    ServerUnavailable,
    ShardMismatch,
    SourceError,
    SpecMismatch,
    StateMismatch,
    StreamConflict,
    StreamNotFound,
)
from penstock_common.stream.client import connect
from penstock_common.stream.keys import BadName
from penstock_common.stream.manifest import ABANDONED, retained_epochs
from penstock_common.stream.streams import load_stream
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec
from penstock_consumer.stages.batch import Batch
from penstock_producer.sources.open import reads_as
from tests.contracts.feed import SPEC, produce, sample
from tests.contracts.source import in_fork
from tests.tuned import tuned

X = np.zeros(4, np.float32)
BATCH = Batch({"x": np.zeros((8, 4), np.float32), "y": np.arange(8)})


tuning: Any = penstock.Tuning
RAGGED = Ragged(np.zeros(3), np.array([[1], [2]]))


def loader(*stream: Any, **changed: Any) -> Any:
    """Make a loader as in the README, with these arguments changed. The server is asked last, and there is none."""
    return penstock.Loader(
        *stream or ("train",), **{"group": "g", "batch_size": 8, "url": "redis://[::1]:1", **changed}
    )


def writer(**changed: Any) -> Any:
    """Make a writer with these arguments changed."""
    return penstock.Writer("train", **{"url": "redis://[::1]:1", **changed})


def replay(**changed: Any) -> Any:
    """Make a replay of a kept epoch with these arguments changed."""
    return penstock.Replay("train", **{"epoch": 0, "batch_size": 8, "url": "redis://[::1]:1", **changed})


class Unsized:
    """A map-style dataset whose author forgot its length."""

    def __getitem__(self, index: int) -> int:
        return index


def loader_unread() -> Any:
    """Return a loader that asks no server."""
    return penstock.Loader.__new__(penstock.Loader)


def unpacked(batch: Any) -> Any:
    """Unpack a batch as `for x, y in loader` does."""
    x, y = batch
    return x, y


OFFLINE: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # arguments of other libraries
    (lambda: loader(batchsize=8), TypeError, "no argument 'batchsize'; did you mean 'batch_size'?"),
    (
        lambda: loader(num_workers=4),
        TypeError,
        "no argument 'num_workers': the producer has the workers (`penstock produce",
    ),
    (lambda: loader(shuffle=True), TypeError, "producers shuffle each epoch already; loader.shuffle(samples=10_000)"),
    (lambda: loader(pin_memory=True), TypeError, 'penstock.torch.prefetch_to_device(dataset, "cuda") pins and copies'),
    (
        lambda: loader(drop_last=True),
        TypeError,
        "no argument 'drop_last': write order=penstock.Canonical(drop_",
    ),
    (lambda: replay(drop_last=True), TypeError, "its last batch may be smaller, and batch.size says how large it is"),
    (lambda: replay(group="g"), TypeError, "Replay() has no argument 'group': it reads without a group"),
    (lambda: penstock.produce([1], num_workers=2), TypeError, "did you mean 'workers'?"),  # type: ignore[call-arg]
    (lambda: replay(fast=True), TypeError, "Replay() has no argument 'fast': there is one way to the server, the fast"),
    (lambda: writer(fast=None), TypeError, "Writer() has no argument 'fast': there is one way to the server, the fast"),
    (
        lambda: writer(maxlen=5),
        TypeError,
        "Writer() has no argument 'maxlen': write budget_bytes=2 << 30: writers wait",
    ),
    (lambda: writer(shards=5), TypeError, "Writer() has no argument 'shards'; it takes stream, url, spec, partitions"),
    (
        lambda: np.asarray(loader_unread()),
        TypeError,
        "a Loader is no array, it gives batches: `for batch in loader`; mod",
    ),
    (lambda: reads_as(Unsized()), SourceError, "has items by index but no length: give it __len__, the number of it"),
    (
        lambda: loader(tuning=penstock.Tuning(lease_s=0)),
        ValueError,
        "lease_s is 0, expected seconds, 0.1 or more (30 if left out)",
    ),
    (lambda: penstock.mix([1], weights=[1]), TypeError, "each loader has its weight beside it: mix({'a': (loader_a"),  # type: ignore[call-arg, arg-type]
    (
        lambda: penstock.produce([1], tuning=penstock.Tuning(budget_bytes="1gb")),  # type: ignore[arg-type]
        TypeError,
        "budget_bytes is '1gb', a str; expected a whole nu",
    ),
    (
        lambda: penstock.produce([1], tuning=penstock.Tuning(seed="0")),  # type: ignore[arg-type]
        TypeError,
        "seed is '0', a str; expected a whole number: write seed=0",
    ),
    (lambda: loader(host="localhost"), TypeError, "no argument 'host': write url='redis://host:6379'"),
    (lambda: loader(device="cuda"), TypeError, "no argument 'device': penstock.torch.prefetch_to_device(dataset"),
    # # arguments that are missing, or given by position
    (lambda: penstock.mix(1, 2), TypeError, "{'a': (loader_a, 0.7), 'b': (loader_b, 0.3)}"),  # type: ignore[call-arg, arg-type]
    (lambda: penstock.produce([1], [2]), TypeError, "write produce(dataset); dataset: an object with a length"),  # type: ignore[call-arg, arg-type]
    (lambda: penstock.Loader("train", batch_size=8), TypeError, "needs group: a name for this training job"),  # type: ignore[call-arg]
    (lambda: penstock.Loader("train", "g", 8), TypeError, "write Loader(stream, group=..., batch_size=...)"),  # type: ignore[call-arg]
    # wrong types and values
    (
        lambda: loader(batch_size="64"),
        TypeError,
        "batch_size is '64', a str; expected a whole number: write batch_size=64",
    ),
    (lambda: loader(batch_size=8.0), TypeError, "batch_size is 8.0, a float; expected a whole number"),
    (lambda: loader(batch_size=0), ValueError, "batch_size is 0, expected at least 1"),
    (lambda: loader(tuning=tuning(timeout_s="5")), TypeError, "timeout_s is '5', a str; expected seconds as a number"),
    (
        lambda: loader(tuning=tuning(notify="x")),
        TypeError,
        "notify is 'x', a str; expected a function such as notify=print",
    ),
    (lambda: loader(start="begin"), ValueError, "expected 'resume', 'remaining', 'earliest' or an epoch's number"),
    (lambda: loader(start="latest"), ValueError, "the last number of `penstock epochs list`, plus 1"),
    (lambda: tuning(creat=True), TypeError, "Tuning() has no argument 'creat'; did you mean 'create'?"),
    (lambda: penstock.Canonical(rnk=0), TypeError, "Canonical() has no argument 'rnk'; did you mean 'rank'?"),  # type: ignore[call-arg]
    (lambda: loader(order="random"), ValueError, "order is 'random', expected penstock.Canonical(rank="),
    (
        lambda: loader(rank=1, world_size=2),
        ValueError,
        "belong to order=penstock.Canonical(rank=..., world_size=",
    ),
    (lambda: loader(group=None), BadName, "group name None: use 1 to 100 letters"),
    (
        lambda: loader(["a", "b"]),
        BadName,
        "a Loader reads one stream; for several make one Loader each, and penstock.mi",
    ),
    (lambda: loader("my photos"), BadName, "stream name 'my photos': use 1 to 100 letters"),
    (
        lambda: writer(budget_bytes="1gb"),
        TypeError,
        "budget_bytes is '1gb', a str; expected a whole number of bytes: write budget_bytes=1 << 30",
    ),
    (lambda: replay(epoch="0"), TypeError, "epoch is '0', a str; expected a whole number: write epoch=0"),
    (lambda: replay(shuffle=True), ValueError, "shuffle is True, expected a seed, 0 or more"),
    # wrong specs and samples
    (lambda: Spec.of(["x", "y"]), BadSpec, 'one looks like {"x": ("uint8", (224, 224, 3))'),  # type: ignore[arg-type]
    (lambda: Spec.of({"x": ("f4", (4,))}), BadSpec, "bfloat16, bytes; write 'float32'"),
    (lambda: Spec.of({"x": ("float23", (4,))}), BadSpec, "dtype 'float23' cannot travel; one of bool, int8"),
    (lambda: Spec.of({"obs": {"pixels": ("uint8", (3,))}}), BadSpec, "by its path: write 'obs/pixels'"),  # type: ignore[dict-item]
    (lambda: Spec.infer([1, 2, 3]), TypeError, "a sample is a list, expected a dict of tensors by name: {'x': ..."),  # type: ignore[arg-type]
    (lambda: Spec.infer({}), BadSpec, "a sample has 1 to 256 tensors of different names, as in {'x': ..., 'y': ...}"),
    (lambda: Spec.infer({"y": "cat"}), BadSpec, "a str (<U3) cannot travel; encode text to bytes"),
    # no server, or no address
    (loader, ServerUnavailable, "start one with `penstock server`, or set PENSTOCK_URL"),
    (lambda: loader(url="localhost:6379"), ServerUnavailable, "is no Redis URL"),
    (lambda: loader(url=6379), ServerUnavailable, "6379 is no Redis URL: write redis://host:6379/0"),
    # batches, files, mixtures
    (lambda: BATCH["image"], KeyError, "no tensor 'image' here; there are: x, y"),
    (lambda: Batch({"x": X})["y"], KeyError, "there are: x; images have y where sub-folders are their classes"),
    (lambda: BATCH["X"], KeyError, "no tensor 'X' here; there are: x, y; did you mean 'x'?"),
    (lambda: BATCH[0], KeyError, "tensors are found by name, rows within a tensor: batch[name][0]"),  # type: ignore[index]
    (lambda: BATCH[:4], KeyError, "tensors are found by name"),  # type: ignore[index]
    (lambda: BATCH.image, AttributeError, "no attribute 'image', and no tensor 'image' here; there are: x, y"),
    (lambda: RAGGED.shape, AttributeError, "ragged.padded() for one array; --resize or a transform makes images alike"),
    (lambda: BATCH.x, AttributeError, "its tensors are items, batch['x']"),
    (lambda: BATCH.to("cuda"), AttributeError, "its tensors are numpy arrays: write torch.from_numpy(batch['x']).to("),
    (lambda: BATCH.cuda(), AttributeError, 'penstock.torch.prefetch_to_device(penstock.torch.dataset(loader), "cuda"'),
    (lambda: BATCH.numpy(), AttributeError, "its tensors are numpy arrays already: batch['x']"),
    (lambda: BATCH.shape, AttributeError, "batch['x'].shape; batch.size is the number of samples"),
    (lambda: unpacked(BATCH), TypeError, "`for x, y in loader.view().select('x', 'y')` gives tuples"),
    (lambda: penstock.mix([1]), ValueError, "mix() takes {name: (loader, weight above 0), ...}"),  # type: ignore[arg-type]
    (lambda: penstock.produce("photos/"), SourceError, "for a folder of images use `penstock produce images DIR`"),
    (lambda: penstock.produce([1], epochs=0), ValueError, "epochs is 0, expected at least 1"),
    (
        lambda: exec("from penstock import DataLoader"),
        ImportError,
        "penstock has no 'DataLoader' to import; it has Batch, Can",
    ),
    (lambda: penstock.mix({"a": ("train", 1.0)}), ValueError, "got {'a': ('train', 1.0)}, ends='last'; mix() takes {"),  # type: ignore[dict-item]
    (
        lambda: writer(info="lab 3"),
        TypeError,
        "info is 'lab 3'; expected a dict of what JSON holds, {'source': 'lab 3'}",
    ),
    (lambda: writer(info={"a": object()}), TypeError, "Object of type object is not JSON serializable"),
    (
        lambda: penstock.Files("/dev/null", batch_size=8),
        PenstockError,
        "is no export: it has no export.json; `penstock",
    ),
    (lambda: penstock.produce(Unsized), TypeError, "dataset is the class Unsized, expected an object: write Unsized()"),
    (
        lambda: penstock.produce([1], transform={"x": 1}),  # type: ignore[arg-type]
        TypeError,
        "transform is a dict; expected a function f(sample) or f(sample, rng), not what it returned",
    ),
    (
        lambda: penstock.produce([1], tuning=tuning(block_transform=5)),
        TypeError,
        "block_transform is an int; expected a function f(block) or f(block, rng)",
    ),
    (lambda: penstock.produce([1], tuning=tuning(shuffle="no")), TypeError, "shuffle is 'no', a str; expected True or"),
    (lambda: penstock.produce([1], tuning=tuning(compression=5)), BadSpec, "compression is 5, expected one of zstd"),
    (lambda: penstock.produce([1], spec=[1]), BadSpec, "[1] is not a spec; one looks like"),  # type: ignore[arg-type]
    (lambda: penstock.produce([1], spec="x"), BadSpec, "'x' is not a spec; one looks like"),  # type: ignore[arg-type]
    (
        lambda: penstock.produce([1], tuning=tuning(on_error="ignore")),
        ValueError,
        "on_error is 'ignore', expected 'quarantine', 'skip' or 'fail'",
    ),
    (lambda: penstock.produce([1], tuning=tuning(retention=5)), ValueError, "retention is 5, expected a valid string"),
    (
        lambda: penstock.produce([1], tuning=tuning(block_samples=1 << 20)),
        ValueError,
        "block_samples is 1048576, expected less than or equal to 65536",
    ),
    (lambda: penstock.produce([1], stream=None), TypeError, "stream is None, a NoneType; expected a stream's name"),  # type: ignore[arg-type]
    (lambda: operator.attrgetter("loader")(penstock), AttributeError, "did you mean 'Loader'?"),
    (
        lambda: penstock.Files(Path("/nowhere"), batch_size=8),
        PenstockError,
        "there is no folder /nowhere: name the one",
    ),
]


@pytest.mark.parametrize(("attempt", "kind", "words"), OFFLINE, ids=[words[:40] for *_, words in OFFLINE])
def test_a_mistake_is_explained_before_a_server_is_asked(
    attempt: Callable[[], Any], kind: type[Exception], words: str
) -> None:
    """Python's own message names neither the missing argument nor its documentation."""
    with pytest.raises(kind) as caught:
        attempt()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


class Session(NamedTuple):
    """The objects of a new user after the README: a stream, its loader, and one batch."""

    url: str
    loader: Any
    batch: Any
    name: str
    """The name of a stream for writing."""

    def writer(self, **changed: Any) -> Any:
        """Make a writer of the session's own stream."""
        return penstock.Writer(
            self.name, url=self.url, tuning=penstock.Tuning(notify=lambda _: None), **{"spec": SPEC, **changed}
        )

    def writes(self, value: Any, verb: str = "write", **changed: Any) -> None:
        """Write a sample into an epoch."""
        with self.writer(**changed) as other, other.epoch() as epoch:
            getattr(epoch, verb)(value)

    def feeds(self, value: Any) -> None:
        """Write a sample into the feed of a stream that has a spec."""
        with self.writer() as other:
            other.write(value)

    def writes_apart(self, *values: Any, **tensors: Any) -> None:
        """Write the tensors of a sample as arguments."""
        with self.writer() as other, other.epoch() as epoch:
            epoch.write(*values, **tensors)

    def feeds_apart(self, *values: Any, **tensors: Any) -> None:
        """Write the tensors of a sample as arguments into the feed."""
        with self.writer() as other:
            other.write(*values, **tensors)

    def after(self, verb: str) -> None:
        """Use an object after its close."""
        with self.writer() as other:
            with other.epoch() as epoch:
                epoch.write(sample(0))
            if verb == "epoch.write":
                epoch.write(sample(1))
        if verb == "write":
            other.write(sample(1))
        other.epoch()

    def shard_after(self) -> None:
        """Use a shard after its close."""
        with self.writer() as other, other.epoch(0) as epoch:
            with epoch.shard(0) as shard:
                shard.write(sample(0))
            shard.write(sample(1))

    def planned(self, shard: int) -> None:
        """Open a shard of an epoch of one."""
        with self.writer() as other:
            other.epoch(sizes=[5]).shard(shard)

    def again(self, **changed: Any) -> Any:
        """Make another loader."""
        return penstock.Loader(
            "train", **tuned("Loader", {"group": "h", "batch_size": 8, "url": self.url, "timeout_s": 5, **changed})
        )

    def replay(self) -> Any:
        """Make another replay of the kept epoch."""
        return penstock.Replay("train", epoch=0, batch_size=8, url=self.url)

    def closed(self) -> None:
        """Read from a closed loader."""
        with self.again(notify=lambda _: None) as other:
            pass
        list(other)


ONLINE: list[tuple[Callable[[Session], Any], type[Exception], str]] = [
    # wrong names
    (lambda s: s.again(create=False), GroupNotFound, "no group 'h'; groups there: g"),
    (lambda s: penstock.Replay("tain", epoch=0, batch_size=8, url=s.url), StreamNotFound, "did you mean 'train'?"),
    (lambda s: list(s.loader.view().select("z")), ValueError, "select='z': the stream has x, y"),
    # what other libraries' objects do
    (lambda s: s.loader[0], TypeError, "a Loader has no items by number: write `for batch in loader`, or next(iter("),
    (lambda s: next(s.loader), TypeError, "a Loader is no iterator: write batches = iter(loader) once, then next(bat"),
    (lambda s: s.loader.map(len), AttributeError, "no attribute 'map': write loader.view().map(function)"),
    (lambda s: s.loader.repeat(3), AttributeError, "no attribute 'repeat': each iteration is the next epoch: `for _"),
    (lambda s: s.loader.prefetch(2), AttributeError, "no attribute 'prefetch': it reads ahead in a thread already"),
    (lambda s: s.loader.cuda(), AttributeError, 'prefetch_to_device(penstock.torch.dataset(loader), "cuda")'),
    (lambda s: s.loader.view()[0], TypeError, "a View has no items by number: write `for batch in loader`"),
    (
        lambda s: s.loader.view().batch(4),
        AttributeError,
        "a View has no attribute 'batch': its batches are of the loa",
    ),
    (lambda s: s.loader.ack(s.batch), AttributeError, "no attribute 'ack': write loader.acknowledge(batch), with Load"),
    (lambda s: s.loader.chekpointed(), AttributeError, "no attribute 'chekpointed'; did you mean 'checkpointed'?"),
    (lambda s: s.loader.zzz, AttributeError, "a Loader has no attribute 'zzz'; it has acknowledge, batch_size, checkp"),
    (lambda s: setattr(s.loader, "batch_size", 4), AttributeError, "batch_size changes nothing now: make another one"),
    (lambda s: pickle.dumps(s.loader), TypeError, "a Loader cannot go to another process: make one there"),
    (lambda s: pickle.dumps(s.writer()), TypeError, "a Writer cannot go to another process: make one there"),
    (lambda s: list(s.writer()), TypeError, "a Writer gives no samples: penstock.Loader or penstock.Replay reads"),
    (
        lambda s: s.loader.view().map(lambda x, y: x),
        TypeError,
        "map()'s function takes x, y, expected one argument, the batch, a dict of tensors; select('x', 'y').collate(",
    ),
    (
        lambda s: penstock.mix({"a": (s.loader, 1), "b": (s.loader, 1)}),
        ValueError,
        "mix() got one loader under two names: make a penstock.Loader for each",
    ),
    (
        lambda s: s.writes({"x": X}, spec={"x": ("float32", (None, *X.shape))}),
        SpecMismatch,
        "a spec is of one sample, without the dimension of the batch",
    ),
    (lambda s: s.loader.acknowledge(), TypeError, "acknowledge() needs batch: the batch that was trained on"),
    (lambda s: next(s.replay()), TypeError, "a Replay is no iterator"),
    (lambda s: s.replay().view(), AttributeError, "penstock.torch.dataset(replay, select=('x', 'y')) tuples"),
    (
        lambda s: s.replay().state_dict(),
        AttributeError,
        "each iteration is the whole epoch again; a Loader has a state",
    ),
    (lambda s: s.replay().acknowledge(s.batch), AttributeError, "it reads without a group, so nothing is acknowledged"),
    (
        lambda s: next(iter(s.again(group="h", notify=lambda _: None).filter(lambda b: b["y"] > 1 and b["y"] < 5))),
        ValueError,
        "write & for and, | for or, ~ for not, as in lambda batch: (batch['y'] > 1) & (batch['y'] < 5)",
    ),
    (lambda s: s.replay().shuffle(), AttributeError, "write Replay(..., shuffle=0), which takes a seed"),
    (lambda s: s.loader.epochs, AttributeError, "`for _ in range(epochs): for batch in loader: ...`"),
    (
        lambda s: list(s.loader.view().select(0)),
        TypeError,
        "select is 0, an int; expected names, select=('x', 'y') or sel",
    ),
    (lambda s: s.replay()[0], TypeError, "a Replay has no items by number"),
    (lambda s: s.feeds_apart(x=X, y=1), TypeError, "as one dict of tensors by name, as in write({'x': ...})"),
    (lambda s: s.writes_apart(x=X, y=1), TypeError, "as one dict of tensors by name, as in write({'x': ...})"),
    (lambda s: s.feeds_apart(X, 1), TypeError, "as one dict of tensors by name, as in write({'x': ..., 'y': ...})"),
    (lambda s: s.writes_apart(X, 1), TypeError, "as one dict of tensors by name, as in write({'x': ..., 'y': ...})"),
    (lambda s: s.writer().add({"x": X}), AttributeError, "a Writer has no attribute 'add': its verb is write({'x'"),
    # samples
    (
        lambda s: s.writes([1, 2, 3]),
        TypeError,
        "a sample is a list, expected a dict of tensors by name: {'x': ..., 'y'",
    ),
    (lambda s: s.writes([1, 2, 3], spec=None), TypeError, "expected a dict of tensors by name"),
    (lambda s: s.feeds((X, 1)), TypeError, "a sample is a tuple, expected a dict of tensors by name"),
    (lambda s: s.feeds(None), TypeError, "a sample is a NoneType, expected a dict of tensors by name"),
    (lambda s: s.writes([1, 2], "write_batch"), TypeError, "expected a dict of tensors by name"),
    (lambda s: s.writes({"x": X, "y": 1}, "write_batch"), SpecMismatch, "found an int, expected n rows"),
    (
        lambda s: s.writes({"x": np.zeros(4), "y": 1}),
        SpecMismatch,
        "expected dtype float32; convert it (`.astype('float32')`)",
    ),
    (
        lambda s: s.writes({"x": np.zeros(5, np.float32), "y": 1}),
        SpecMismatch,
        "a size that differs is None in the spec",
    ),
    (
        lambda s: s.writes({"x": np.zeros((8, 4), np.float32), "y": 1}),
        SpecMismatch,
        "write_batch() writes a batch, one",
    ),
    (lambda s: s.writes({"x": X, "y": None}), SpecMismatch, "tensor 'y': found a NoneType, expected dtype int64"),
    (lambda s: s.writes({}), SpecMismatch, "the sample has nothing"),
    (lambda s: s.writes({"image": X, "y": 1}), SpecMismatch, "tensor 'x': found nothing, expected a tensor"),
    (lambda s: s.writes({"x": X, "y": "cat"}), SpecMismatch, "number the classes"),
    # streams
    (
        lambda s: penstock.Writer("train", url=s.url, spec={"x": ("int8", ())}),
        StreamConflict,
        ", in Python spec={'x': ['float32', [4]], 'y': ['int64', []]}",
    ),
    (lambda s: s.writer(retention="forever"), BadOption, "is not one of: budget (keep all until space is needed)"),
    # the order of calls
    (lambda s: s.after("epoch.write"), PenstockError, "epoch 0 is closed: writer.epoch() opens the next one"),
    (lambda s: s.after("write"), PenstockError, "is closed: make another, or write in its `with`"),
    (lambda s: s.after("epoch"), PenstockError, "is closed: make another, or write in its `with`"),
    (Session.shard_after, ShardMismatch, "shard 0 is closed"),
    (Session.closed, PenstockError, "this loader of 'train' is closed: make another"),
    (lambda s: s.planned(9), ShardMismatch, "epoch 0 is planned in 1 shards, found 9"),
    (lambda s: s.writer().epoch(sizes=100), TypeError, "expected the samples of each shard, sizes=[100, 100]"),
    (lambda s: s.writer().epoch("0"), TypeError, "number is '0', a str; expected a whole number: write number=0"),
    (lambda s: s.loader.shuffle(samples=9), ValueError, "it comes before its first batch"),
    (lambda s: s.loader.shuffle(9), TypeError, "write shuffle(samples=..., bytes=..., seed=...)"),
    (lambda s: s.loader.view().map(None), TypeError, "expected a function such as function=lambda batch"),
    (lambda s: s.loader.view().take("3"), TypeError, "count is '3', a str; expected a whole number"),
    (lambda s: s.loader.checkpointed(), ValueError, "belongs to acknowledge='on_checkpoint'"),
    (lambda s: s.loader.acknowledge({"x": X}), TypeError, "expected one that this loader gave"),
    (lambda s: s.loader.acknowledge(Batch(dict(s.batch))), TypeError, "expected one that this loader gave"),
    (lambda s: s.loader.load_state_dict({}), StateMismatch, "pass what state_dict() returned"),
    (lambda s: len(s.loader), TypeError, 'a Loader with order="canonical" has a length'),
    (lambda s: [x for x, y in s.loader], TypeError, "`for x, y in loader.view().select('x', 'y')` gives tuples"),
    (lambda s: s.loader.spec["z"], KeyError, "no tensor 'z' here; there are: x, y"),
]


def test_a_mistake_with_a_server_is_explained_too(any_url: str) -> None:
    """Mistakes that show only on a running server are explained like those in an argument."""
    produce(any_url, "train", 40)
    wrong: list[str] = []
    with penstock.Loader(
        "train", group="g", batch_size=8, url=any_url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as first:
        session = Session(any_url, first, next(iter(first)), "")
        for number, (attempt, kind, words) in enumerate(ONLINE):
            try:
                found: object = attempt(session._replace(name=f"other{number}"))
            except Exception as error:
                if isinstance(error, kind) and words in str(error) and "\n" not in str(error):
                    continue
                found = error
            wrong.append(f"{number}: {found!r}, expected {kind.__name__} with {words!r}")
    assert wrong == []


def test_what_one_has_in_hand_says_what_it_is_in_one_line(any_url: str) -> None:
    """A notebook user types the variable's name first, and `if loader:` second."""
    produce(any_url, "train", 40)
    silent = penstock.Tuning(notify=lambda _: None)
    quiet: Any = {"url": any_url, "tuning": silent}
    at = f"at redis://127.0.0.1:{any_url.rpartition(':')[2]}"
    with penstock.Loader("train", group="g", batch_size=8, url=any_url, tuning=replace(silent, member="m")) as shared:
        assert repr(shared) == f"<Loader of 'train' {at}: group 'g', member 'm', batch_size 8>"
        assert all([shared, shared.view(), penstock.mix({"a": (shared, 1.0)})])
    with penstock.Loader("train", group="o", batch_size=8, order=penstock.Canonical(world_size=2), **quiet) as rank:
        assert (
            repr(rank) == f"<Loader of 'train' {at}: group 'o', member 'rank-0' of 2 in canonical order, batch_size 8>"
        )
        assert rank
    with penstock.Writer("new", **quiet) as new:
        assert repr(new) == f"<Writer of 'new' {at}: spec not known yet>"
    with penstock.Writer("train", **quiet) as old, old.epoch() as epoch:
        assert repr(old) == f"<Writer of 'train' {at}: x: float32[4], y: int64>"
        assert repr(epoch) == "<EpochWriter of epoch 1 of 'train': of any size>"
        assert repr(old.epoch(7, sizes=[3, 2])) == "<EpochWriter of epoch 7 of 'train': 5 samples in 2 shards>"


class Log:
    """A program's own object, whose method is named write."""

    def write(self, line: str) -> None:
        """Write a line."""


def test_an_error_of_another_write_in_the_block_of_a_writer_is_left_as_it_is(any_url: str) -> None:
    """It was explained as if the writer had got two samples."""
    log: Any = Log()
    with (
        pytest.raises(TypeError, match=r"^Log\.write\(\) takes 2 positional arguments but 3 were given$"),
        penstock.Writer("t", url=any_url, spec=SPEC) as writer,
        writer.epoch(),
    ):
        log.write("one", "two")


def test_a_sample_that_names_other_tensors_is_answered_by_one_error(any_url: str) -> None:
    """Our own KeyError above it would be read first."""
    session = Session(any_url, None, None, "other")
    with pytest.raises(SpecMismatch) as caught:
        session.writes({"image": X, "label": 1})
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("first", "is_asked"),
    [
        ({"x": np.zeros((8, 3, 4, 4), np.uint8), "y": np.arange(8)}, True),
        ({"x": np.zeros((8, 4), np.float32), "y": np.arange(8)}, True),
        ({"x": np.zeros((3, 4, 4), np.uint8), "y": 1}, False),
        ({"tokens": np.arange(8), "mask": np.ones(8, bool)}, False),
        ({"x": np.zeros((8, 3, 4, 4), np.uint8), "y": np.arange(7)}, False),
        ({"x": np.zeros((1, 4), np.float32), "y": np.arange(1)}, False),
    ],
    ids=["images", "rows", "sample", "tokens", "sizes", "one"],
)
def test_a_first_sample_that_looks_like_a_batch_is_asked_about(first: Any, is_asked: bool, any_url: str) -> None:
    """A stream of 64-fold samples would show only in the loss, if ever."""
    told: list[str] = []
    with (
        penstock.Writer("train", url=any_url, tuning=penstock.Tuning(notify=told.append)) as writer,
        writer.epoch() as epoch,
    ):
        epoch.write(first)
    assert [
        "if its 8 rows are 8 samples, `penstock delete` the stream and write them with write_batch()" in line
        for line in told
    ] == [is_asked]


def test_what_was_written_and_never_sent_is_told_when_the_program_ends(any_url: str) -> None:
    """Without a `with`, the rest of a block is not sent, and would silently be missing in the stream."""
    lines = """
import sys, penstock
def main():
    epoch = penstock.Writer("one", url=sys.argv[1]).epoch()
    epoch.write({"y": 1})
main()
writer = penstock.Writer("two", url=sys.argv[1])
writer.write({"y": 1})
writer.write({"y": 2})
closed = penstock.Writer("three", url=sys.argv[1])
closed.write({"y": 1})
closed.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", lines, any_url], capture_output=True, text=True, check=True, timeout=60
    )
    told = [line for line in done.stderr.splitlines() if "spec" not in line]
    assert [line[:46] for line in told] == [
        "penstock: 1 sample of 'one' may be lost, becau",
        "penstock: 2 samples of 'two' may be lost, beca",
    ]
    assert "write in `with penstock.Writer(...) as writer`" in told[0]


def test_a_writer_that_is_written_to_beside_its_empty_epoch_says_so(any_url: str) -> None:
    """`writer.write` instead of `epoch.write` fills the feed, and the epoch ends empty."""
    told: list[str] = []
    with penstock.Writer("train", url=any_url, spec=SPEC, tuning=penstock.Tuning(notify=told.append)) as writer:
        with writer.epoch() as epoch:
            epoch.write(sample(0))
            writer.write(sample(1))
        assert told == []
        writer.flush()
    with (
        penstock.Writer("train", url=any_url, tuning=penstock.Tuning(notify=told.append)) as writer,
        writer.epoch() as epoch,
    ):
        writer.write(sample(2))
        writer.write(sample(3))
    assert [line for line in told if "stays empty" in line] == told
    assert len(told) == 1
    assert "call the write() of what writer.epoch() returned" in told[0]


def test_a_loader_by_hand_says_what_was_never_acknowledged(any_url: str) -> None:
    """A user who forgets to acknowledge would read everything again without knowing why."""
    produce(any_url, "train", 40)
    told: list[str] = []
    wanted: Any = {"group": "g", "batch_size": 8, "url": any_url, "acknowledge": "manual"}
    wanted["tuning"] = penstock.Tuning(notify=told.append)
    with penstock.Loader("train", **wanted) as by_hand:
        for number, batch in enumerate(by_hand):
            if number < 2:
                by_hand.acknowledge(batch)
    assert "24 samples were handed out and not acknowledged" in told[-1]
    with penstock.Loader("train", **wanted) as by_hand:
        for batch in by_hand:
            by_hand.acknowledge(batch)
    assert "not acknowledged" not in told[-1]


def test_two_loops_on_one_loader_are_refused(any_url: str) -> None:
    """A request for the next batch of one loop acknowledges the other's, which may still be trained on."""
    produce(any_url, "train", 400)
    with penstock.Loader(
        "train", group="g", batch_size=8, url=any_url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as one:
        first, second = iter(one), iter(one)
        next(first)
        next(second)
        with pytest.raises(PenstockError, match=r"make a penstock\.Loader in each thread"):
            next(first)
        seen = 1 + len(list(second))
    assert seen == 49  # the first loop had one
    with penstock.Loader(
        "train", group="t", batch_size=1, url=any_url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as one:
        ended: list[str] = []

        def loop() -> None:
            try:
                ended.append(str(sum(1 for _ in one)))
            except PenstockError as error:
                ended.append(str(error))

        threads = [threading.Thread(target=loop) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sum("read by another loop or thread" in end for end in ended) >= len(ended) - 1 == 1


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("manual", "40 samples were handed out and not acknowledged: they are handed out again; loader.acknowledge(ba"),
        ("on_checkpoint", "40 samples were trained on since the last checkpoint: they are handed out again; loader.ch"),
        ("on_next", ""),
    ],
)
def test_a_loader_that_nobody_closes_says_what_was_not_acknowledged(policy: str, words: str, any_url: str) -> None:
    """First scripts often have no `with`."""
    produce(any_url, "train", 40)
    lines = f"""
import sys, penstock
for batch in penstock.Loader("train", group="g", batch_size=8, url=sys.argv[1], acknowledge="{policy}"):
    pass
"""
    done = subprocess.run(
        [sys.executable, "-c", lines, any_url], capture_output=True, text=True, check=True, timeout=60
    )
    told = [line for line in done.stderr.splitlines() if "samples were" in line]
    assert [words in line for line in told] == ([True] if words else [])


def test_a_production_that_nobody_waits_for_says_what_is_missing(any_url: str) -> None:
    """The script ends at once, most of its samples are not made, and its trainer starves elsewhere."""
    lines = """
import sys, time, penstock
class Rows:
    def __len__(self): return 400
    def __getitem__(self, index):
        time.sleep(0.05)
        return {"y": index}
production = penstock.produce(Rows(), url=sys.argv[1], stream="slow")
if sys.argv[2] == "with":
    with production:
        pass
elif sys.argv[2] == "stop":
    production.stop()
"""
    for way, words in (("", "samples: call its wait() before the program"), ("with", "wait=True"), ("stop", "")):
        command = [sys.executable, "-c", lines, any_url, way]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        told = [line for line in done.stderr.splitlines() if "was stopped at" in line]
        assert [words in line for line in told] == ([True] if words else []), done.stderr
        with connect(any_url) as client:
            assert {*retained_epochs(client, load_stream(client, "slow")).values()} == {ABANDONED}


def as_text(attempt: Callable[[], object]) -> Callable[[], str]:
    """Return the error as text, for `in_fork`."""
    return lambda: repr(attempt())


def test_a_forked_process_is_told_to_make_its_own_loader_and_writer(any_url: str) -> None:
    """Its copies have no threads and share a connection: they hung, lost samples, or wrote the parent's again."""
    produce(any_url, "train", 40)
    with penstock.Loader(
        "train", group="g", batch_size=8, url=any_url, tuning=penstock.Tuning(notify=lambda _: None)
    ) as mine:
        batches = iter(mine)
        next(batches)
        readings: list[Callable[[], object]] = [lambda: next(batches), lambda: next(iter(mine))]
        for reading in readings:
            assert "make a penstock.Loader in each process" in in_fork(as_text(reading))
        assert len(list(batches)) == 4
    with penstock.Writer("other", url=any_url, spec=SPEC) as writer, writer.epoch() as epoch:
        begun: list[Callable[[], object]] = [lambda: writer.write(sample(9)), lambda: epoch.write(sample(9))]
        for attempt in begun:
            assert "make a penstock.Writer in each process" in in_fork(as_text(attempt))
        epoch.write(sample(0))
        batch = {name: np.stack([value]) for name, value in sample(9).items()}
        for attempt in [*begun, lambda: epoch.write_batch(batch), epoch.flush, epoch.close]:
            assert "make a penstock.Writer in each process" in in_fork(as_text(attempt))
        epoch.write(sample(1))
    with penstock.Replay("other", epoch=0, batch_size=8, url=any_url) as kept:
        assert [len(each["y"]) for each in kept] == [2]


def test_a_process_that_is_forked_while_a_thread_asks_is_told_of_the_fork(any_url: str) -> None:
    """It has no such thread, and was told that another one reads the loader."""
    with (
        penstock.Writer("t", url=any_url, spec=SPEC) as writer,
        penstock.Loader("t", group="g", batch_size=1, url=any_url) as loader,
    ):
        asking = threading.Thread(target=lambda: next(iter(loader)))
        asking.start()
        time.sleep(0.5)  # then it waits for an epoch
        assert "make a penstock.Loader in each process" in in_fork(as_text(lambda: next(iter(loader))))
        with writer.epoch() as epoch:
            epoch.write(sample(0))
        asking.join()


def test_an_epoch_that_the_options_leave_nothing_of_is_told(any_url: str) -> None:
    """A loop that never runs prints nothing, and the group has read the epoch."""
    produce(any_url, "train", 20)
    told: list[str] = []
    tuning = penstock.Tuning(remainder="drop", timeout_s=1.0, notify=told.append)
    with (
        penstock.Loader("train", group="a", batch_size=64, url=any_url, tuning=tuning) as dropping,
        pytest.raises(penstock.errors.WaitTimeout),
    ):
        list(dropping)
    assert "gave no batch: its 20 samples do not fill one step of 64, and remainder='drop' leaves the rest" in told[0]
    told.clear()
    tuning = penstock.Tuning(timeout_s=1.0, notify=told.append)
    with (
        penstock.Loader("train", group="b", batch_size=8, url=any_url, tuning=tuning) as filtering,
        pytest.raises(penstock.errors.WaitTimeout),
    ):
        list(filtering.filter(lambda batch: batch["y"] < 0))
    assert "gave no batch: filter() kept none of the samples that this loader received" in told[1]


def test_a_production_of_a_program_names_its_bad_samples(any_url: str) -> None:
    """It returns as if all were well, and a user who counts the samples later looks elsewhere for them."""
    told: list[str] = []

    class Data:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> dict[str, object]:
            if index % 5 == 4:
                raise ValueError("no such row")
            return {"x": np.zeros(3, np.float32)}

    tuning = penstock.Tuning(notify=told.append, on_error="skip")
    penstock.produce(Data(), stream="holes", url=any_url, workers=1, wait=True, tuning=tuning)
    assert "2 of 10 samples of 'holes' could not be made and are left out: `penstock bad list holes` says why" in told


def test_threads_that_share_a_writer_are_told(any_url: str) -> None:
    """Their samples would overwrite each other's, and the epoch would end as if all of them existed."""
    refused: list[str] = []
    written = [0] * 4
    with penstock.Writer("threads", url=any_url, spec={"x": ("int64", ())}) as writer, writer.epoch() as epoch:

        def write(place: int) -> None:
            try:
                for number in range(500):
                    epoch.write({"x": number})
                    written[place] += 1
            except PenstockError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=write, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with penstock.Replay("threads", url=any_url, epoch=0, batch_size=100) as replay:
        assert sum(batch.size for batch in replay) == sum(written)
    assert len(refused) == sum(count < 500 for count in written)
    assert all("two threads write through one writer at once: make a penstock.Writer" in line for line in refused)


def test_programs_that_write_one_epoch_are_told(any_url: str) -> None:
    """Both expected 20 samples each, and the epoch has 20."""
    spec = {"x": ("int64", ())}
    with (
        penstock.Writer("one", url=any_url, spec=spec) as first,
        penstock.Writer("one", url=any_url, spec=spec) as second,
        first.epoch(0) as early,
    ):
        late = second.epoch(0)
        for epoch in (early, late):
            for number in range(20):
                epoch.write({"x": number})
        early.flush()
        with pytest.raises(ShardMismatch, match=r"20 samples .* were left out, because another program wrote the same"):
            late.close()

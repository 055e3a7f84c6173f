"""`penstock.jax`: the adapters' promises, and JAX's special subjects: shared memory, shardings, 64 bits, donation."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import SpecMismatch, StateMismatch, WaitTimeout
from penstock_common.tuning import Canonical, Tuning
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.mixture import Mixture
from penstock_consumer.stages.batch import Batch
from penstock_producer.write.writer import Writer
from tests.contracts.adapter import (
    BATCH,
    GROUP,
    MEMBER,
    SAMPLES,
    STREAM,
    AdapterContract,
    acknowledged,
    delivered,
    loader_of,
    report_until_killed,
)
from tests.contracts.feed import produce
from tests.contracts.processes import child
from tests.tuned import tuned

jax = pytest.importorskip("jax")

from penstock.jax import dataset  # noqa: E402 - only where JAX is

BATCHES = -(-SAMPLES // BATCH)
DEVICES = 4


def train_until_killed(url: str) -> None:
    """Train, with batches read ahead."""
    loader = Loader(STREAM, group=GROUP, batch_size=BATCH, url=url, tuning=Tuning(member=MEMBER))
    report_until_killed(batch["y"].tolist() for batch in dataset(loader, prefetch=6))


class TestJax(AdapterContract):
    """The contract with jax.Array batches."""

    def dataset(self, loader: Loader | Mixture, **settings: Any) -> Any:
        """Return a dataset with dicts as elements."""
        return dataset(loader, **settings)

    def read_ahead(self, batches: Any, count: int) -> Any:
        """Put batches on the device in advance."""
        return dataset(batches._loader, prefetch=count)

    def as_numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Return an array without a copy."""
        return np.asarray(tensor)

    train_until_killed = staticmethod(train_until_killed)

    def test_every_dtype_arrives_bit_for_bit(self, any_url: str) -> None:
        """With x64 mode, because JAX has 64-bit types only in that mode."""
        with jax.enable_x64(True):
            super().test_every_dtype_arrives_bit_for_bit(any_url)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_an_array_is_the_batchs_own_memory_on_cpu(any_url: str) -> None:
    """A copy would be half of a loader's cost, and JAX takes 64-byte aligned memory as it is."""
    produce(any_url, STREAM, SAMPLES)
    there: list[int] = []
    with loader_of(any_url) as loader:
        batches = dataset(loader, select="x", prefetch=0, map=lambda batch: _noting(batch, there))
        assert [x.unsafe_buffer_pointer() for x in batches] == there


def test_arrays_kept_over_many_batches_stay_while_others_memory_is_used_again(any_url: str) -> None:
    """Sharing memory is safe only if memory that JAX still refers to is never used again."""
    produce(any_url, STREAM, 50 * SAMPLES, epochs=2)
    there: list[int] = []
    kept: list[tuple[Any, Any]] = []
    with loader_of(any_url, prefetch_bytes=1) as loader:
        batches = dataset(loader, map=lambda batch: _noting(batch, there))
        for _ in range(2):
            kept += [(batch["x"][1:], batch["x"]) for step, batch in enumerate(batches) if step % 25 == 0]
    assert len(set(there)) < len(there) / 4  # memory is used again
    assert len({whole.unsafe_buffer_pointer() for _, whole in kept}) == len(kept)
    for step, (part, whole) in enumerate(kept):
        first = step % (len(kept) // 2) * 25 * BATCH
        expected = np.repeat(np.arange(first, first + BATCH, dtype=np.float32)[:, None], 4, axis=1)
        assert np.array_equal(whole, expected)
        assert np.array_equal(part, expected[1:])


def test_a_step_that_still_computes_reads_its_own_batch(any_url: str) -> None:
    """JAX returns before it has computed: the loop may be batches ahead, without a name for the array that is read."""
    produce(any_url, STREAM, 20 * SAMPLES)

    @jax.jit
    def slow(x: Any) -> Any:
        tall = jax.numpy.tile(x, (64, 1))
        square = tall @ tall.T
        for _ in range(3):
            square = square @ square / (1 + jax.numpy.abs(square).max())
        return x.sum() + 0 * square.sum()

    with loader_of(any_url, prefetch_bytes=1) as loader:
        sums = [slow(batch) for batch in dataset(loader, select="x")]
    assert [float(value) for value in sums] == [
        4.0 * sum(range(first, first + BATCH)) for first in range(0, 20 * SAMPLES, BATCH)
    ]


def test_a_donated_batch_is_not_written_into(any_url: str) -> None:
    """`donate_argnums` lets XLA write its result into an argument's memory, which is the loader's."""
    produce(any_url, STREAM, SAMPLES)
    kept: list[np.ndarray[Any, Any]] = []
    add = jax.jit(lambda x: x + 1000, donate_argnums=0)
    own = jax.numpy.zeros((BATCH, 4))
    place = own.unsafe_buffer_pointer()
    assert add(own).unsafe_buffer_pointer() == place  # donation has an effect here

    def keep(batch: Any) -> Any:
        kept.append(batch["x"])
        return dict(batch)

    with loader_of(any_url) as loader:
        for step, x in enumerate(dataset(loader, select="x", map=keep)):
            first = step * BATCH
            assert np.asarray(add(x))[:, 0].tolist() == [1000 + n for n in range(first, min(first + BATCH, SAMPLES))]
            assert x.is_deleted()
    assert [n for x in kept for n in x[:, 3].tolist()] == list(range(SAMPLES))


def _noting(batch: Any, there: list[int]) -> Any:
    there.append(batch["x"].ctypes.data)
    return dict(batch)


# --- reading ahead, and its end ---------------------------------------------------------------------------------------


def test_what_has_arrived_is_put_on_the_device_ahead_and_not_more(any_url: str) -> None:
    """A transfer should run during a step, but the loop must not wait for batches that a step does not need yet."""
    produce(any_url, STREAM, SAMPLES)
    pulled: list[int] = []
    with loader_of(any_url) as loader:
        batches = iter(dataset(loader, prefetch=3, map=lambda batch: _noting(batch, pulled)))
        next(batches)
        run = hooks_of(loader).member.run
        assert run is not None
        run.thread.join(20)  # all has arrived
        next(batches)
        assert len(pulled) == 2 + 3


def test_a_step_is_acknowledged_before_the_loop_waits_for_the_next_batch(any_url: str) -> None:
    """A writer may be waiting for the space of that batch."""
    with (
        Writer(STREAM, url=any_url, tuning=Tuning(notify=lambda _: None)) as writer,
        Loader(
            STREAM, group=GROUP, batch_size=BATCH, url=any_url, tuning=Tuning(timeout_s=1, notify=lambda _: None)
        ) as loader,
        writer.epoch() as epoch,
    ):
        epoch.write_batch({"y": np.arange(BATCH)})
        epoch.flush()
        batches = iter(dataset(loader))
        next(batches)
        with pytest.raises(WaitTimeout):
            next(batches)
        hooks_of(loader).acknowledger.flush()
        assert delivered(any_url) == [BATCH]


def test_of_two_iterations_the_older_ends(any_url: str) -> None:
    """The newer one gets what the older had read ahead. If both got it, it would be trained on twice."""
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url) as loader:
        older = iter(dataset(loader, select="y"))
        seen = next(older).tolist()
        newer = iter(dataset(loader, select="y"))
        seen += next(newer).tolist()
        assert list(older) == []
        seen += [number for y in newer for number in y.tolist()]
    assert sorted(seen) == list(range(SAMPLES))
    assert acknowledged(any_url)


# --- 64 bits ----------------------------------------------------------------------------------------------------------


def test_labels_of_64_bits_become_32_without_a_word(any_url: str) -> None:
    """It is JAX's default and the usual case, so users would only switch off a warning at each batch."""
    produce(any_url, STREAM, BATCH)
    with loader_of(any_url) as loader:
        (y,) = dataset(loader, select="y")
    assert (y.dtype, y.tolist()) == (np.int32, list(range(BATCH)))


@pytest.mark.parametrize(("kind", "value"), [("int64", -(2**31) - 1), ("uint64", 2**32)])
def test_numbers_that_do_not_fit_into_32_bits_are_refused(kind: str, value: int, any_url: str) -> None:
    """JAX itself would cut them off silently: an id would become another id."""
    with (
        Writer(STREAM, url=any_url, spec={"id": (kind, ())}, tuning=Tuning(notify=lambda _: None)) as writer,
        writer.epoch() as epoch,
    ):
        epoch.write({"id": value})
    with loader_of(any_url) as loader:
        with pytest.raises(SpecMismatch, match=f"'id'.*{value}.*JAX_ENABLE_X64"):
            next(iter(dataset(loader)))
        with jax.enable_x64(True):
            assert [batch["id"].tolist() for batch in dataset(loader)] == [[value]]


@pytest.mark.parametrize("value", [1e39, -1e300])
def test_numbers_beyond_float32_are_refused(value: float, any_url: str) -> None:
    """They would become infinite, and the loss with them."""
    spec = {"x": ("float64", (2,))}
    with (
        Writer(STREAM, url=any_url, spec=spec, tuning=Tuning(notify=lambda _: None)) as writer,
        writer.epoch() as epoch,
    ):
        epoch.write({"x": np.array([np.inf, 3e38])})
        epoch.write({"x": np.array([np.nan, value])})
    with loader_of(any_url) as loader:
        with pytest.raises(SpecMismatch, match=rf"'x'.*{re.escape(f'{value:g}')}.*float32.*JAX_ENABLE_X64"):
            next(iter(dataset(loader)))
        with jax.enable_x64(True):
            assert [batch["x"].tolist()[0] for batch in dataset(loader)] == [[np.inf, 3e38]]


# --- what is given ----------------------------------------------------------------------------------------------------


def test_ragged_tensors_are_refused_with_what_to_write_and_that_works(any_url: str) -> None:
    """JAX only has rectangular arrays, and the user must choose the length for padding."""
    spec = {"t": ("int32", (None,)), "y": ("int32", ())}
    with Writer(STREAM, url=any_url, spec=spec, tuning=Tuning(notify=lambda _: None)) as writer:
        for _ in range(2):
            with writer.epoch() as epoch:
                for length in (3, 1, 2):
                    epoch.write({"t": np.arange(length, dtype=np.int32), "y": length})
    with loader_of(any_url) as loader:
        with pytest.raises(ValueError, match=r"'t: int32\[\?\]' is ragged.*padded\(\).*select=") as refused:
            dataset(loader)
        assert len(str(refused.value).splitlines()) == 1
        (padded,) = dataset(loader, map=lambda batch: {**batch, "t": batch["t"].padded()})
        assert padded["t"].tolist() == [[0, 1, 2], [0, 0, 0], [0, 1, 0]]
        with pytest.raises(SpecMismatch, match="a Ragged"):
            next(iter(dataset(loader, map=dict)))
        assert [y.tolist() for y in dataset(loader, select="y")] == [[3, 1, 2]]


def test_select_and_map_shape_the_elements(any_url: str) -> None:
    """Samples arrive as uint8, and floats are made here. A step takes (x, y)."""
    produce(any_url, STREAM, BATCH)
    with loader_of(any_url) as loader:
        with pytest.raises(ValueError, match="the stream has x, y"):
            dataset(loader, select=("x", "z"))
        ((half, x),) = dataset(loader, select=("half", "x"), map=lambda batch: {**batch, "half": batch["x"] / 2})
    assert isinstance(half, jax.Array)
    assert np.array_equal(half * 2, x)


@pytest.mark.parametrize(("remainder", "sizes"), [("keep", [4]), ("pad", [8]), ("drop", [])])
def test_a_smaller_last_batch_is_as_asked_for_and_acknowledged(remainder: Any, sizes: list[int], any_url: str) -> None:
    """Another shape needs another compilation, or fits no sharding. In each case the epoch ends."""
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url) as loader:
        batches = [y.tolist() for y in dataset(loader, select="y", remainder=remainder)]
    assert [len(y) for y in batches] == [BATCH] * (SAMPLES // BATCH) + sizes
    if remainder == "pad":
        assert batches[-1] == [96, 97, 98, 99] * 2
    assert acknowledged(any_url)


# --- state ------------------------------------------------------------------------------------------------------------


@contextmanager
def ordered(url: str, group: str) -> Iterator[Loader]:
    """Return a single rank of its group."""
    with Loader(
        STREAM,
        group=group,
        batch_size=BATCH,
        url=url,
        tuning=Tuning(timeout_s=10, notify=lambda _: None),
        order="canonical",
    ) as loader:
        yield loader


def test_a_state_is_of_what_the_loop_had_and_goes_on_exactly_there(any_url: str) -> None:
    """Batches that are ready on the device were not trained on: including them would leave a hole in the epoch."""
    produce(any_url, STREAM, SAMPLES, epochs=2)
    with ordered(any_url, GROUP) as loader:
        batches = dataset(loader, select="y", prefetch=4)
        assert len(batches) == BATCHES
        running = iter(batches)
        for _ in range(5):
            next(running)
        state = batches.state_dict()
        whole = [y.tolist() for y in running]
        batches.load_state_dict(state)
        again = iter(batches)
        assert [next(again).tolist() for _ in range(2)] == whole[:2]
        batches.load_state_dict(state)
        assert list(again) == []  # an earlier iteration ends
        assert [y.tolist() for y in batches] == whole
        with pytest.raises(StateMismatch):
            batches.load_state_dict({**state, "stream_id": "another"})


def test_a_checkpoint_covers_what_the_loop_had(any_url: str) -> None:
    """With on_checkpoint, a batch that was only on the device comes again after a crash."""
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url, acknowledge="on_checkpoint") as loader:
        batches = iter(dataset(loader, prefetch=4))
        for _ in range(3):
            next(batches)
        loader.checkpointed()
        assert delivered(any_url) == [3 * BATCH]
        next(batches)
    with loader_of(any_url) as loader:
        assert sum(len(y) for y in dataset(loader, select="y")) == SAMPLES - 3 * BATCH
    assert acknowledged(any_url)


# --- shardings --------------------------------------------------------------------------------------------------------


def train_on_several_devices(url: str) -> None:
    """Train data-parallel over the CPU devices of the environment. It asserts everything, and prints the result."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    assert jax.device_count() == DEVICES
    cut = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    whole = NamedSharding(cut.mesh, PartitionSpec())
    add = jax.jit(lambda x: x.sum(axis=1))
    seen: list[int] = []
    with Loader(
        STREAM, group=GROUP, batch_size=BATCH, url=url, tuning=Tuning(timeout_s=10, notify=lambda _: None)
    ) as loader:
        with pytest.raises(ValueError, match=r"'y' of shape \(8,\).*batch_size"):
            dataset(loader, sharding=NamedSharding(cut.mesh, PartitionSpec(None, ("data",))), select=("x", "y"))
        for batch in dataset(loader, sharding=cut):
            assert batch["x"].sharding == batch["y"].sharding == cut
            assert [piece.data.shape for piece in batch["x"].addressable_shards] == [(BATCH // DEVICES, 4)] * DEVICES
            assert np.array_equal(add(batch["x"]), 4 * np.asarray(batch["y"]))
            seen += batch["y"].tolist()
        for batch in dataset(loader, sharding={"x": cut, "y": whole}):
            assert (batch["x"].sharding, batch["y"].sharding) == (cut, whole)
        with pytest.raises(ValueError, match="nothing for tensor 'y'"):
            dataset(loader, sharding={"x": cut})
    padding = BATCH - SAMPLES % BATCH
    assert sorted(seen[:-padding]) == list(range(SAMPLES))
    assert len(seen) % BATCH == 0
    sys.stdout.write("sharded\n")


def test_batches_are_cut_for_several_devices_and_the_last_is_made_whole(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller last batch would end a data-parallel training after an hour."""
    produce(any_url, STREAM, SAMPLES, epochs=2)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES}")
    with child(train_on_several_devices, any_url) as trainer:
        assert trainer.finish(90) == ["sharded"], trainer.errors()
    assert delivered(any_url) == [SAMPLES] * 2
    assert acknowledged(any_url)


def train_as_one_of_two_processes(url: str, coordinator: str, rank: str) -> None:
    """Run one of the two processes of a JAX job.

    It prints its own rows of each step's global array, and the sum over all.
    """
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, num_processes=2, process_id=int(rank))
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    total = jax.jit(lambda y: y.sum(), out_shardings=NamedSharding(rows.mesh, PartitionSpec()))
    settings: dict[str, Any] = {"batch_size": BATCH, "url": url, "timeout_s": 20, "notify": lambda _: None}
    with (
        Loader(STREAM, group="shared", **tuned("Loader", settings)) as shared,
        pytest.raises(ValueError, match=r"order=penstock\.Canonical\(jax\.process_index"),
    ):
        dataset(shared, sharding=rows)
    with Loader(
        STREAM, group=GROUP, order=Canonical(rank=int(rank), world_size=2), **tuned("Loader", settings)
    ) as loader:
        for y in dataset(loader, select="y", sharding=rows):
            assert y.shape == (2 * BATCH,)
            own = [number for piece in y.addressable_shards for number in np.asarray(piece.data).tolist()]
            sys.stdout.write(f"step {total(y)} {own}\n")


def test_processes_give_their_parts_of_one_global_array(any_url: str) -> None:
    """In a training over several hosts, each rank reads its own part, and all have the same steps."""
    produce(any_url, STREAM, SAMPLES)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    with (
        child(train_as_one_of_two_processes, any_url, coordinator, 0) as first,
        child(train_as_one_of_two_processes, any_url, coordinator, 1) as second,
    ):
        lines = [one.rest(90) for one in (first, second)]
    ends = [[line.split(" ", 2)[1:] for line in told if line.startswith("step ")] for told in lines]  # Gloo prints, too
    steps = -(-SAMPLES // (2 * BATCH))
    assert [len(told) for told in ends] == [steps] * 2
    for step, ((total, own), (other_total, others)) in enumerate(zip(*ends, strict=True)):
        together = json.loads(own) + json.loads(others)
        assert int(total) == int(other_total) == sum(together)
        assert together == [n % SAMPLES for n in range(step * 2 * BATCH, (step + 1) * 2 * BATCH)]
    assert delivered(any_url) == [SAMPLES]


def test_a_batch_is_a_pytree_that_is_compiled_once() -> None:
    """`jax.tree.map` and `jit` take dicts.

    If a batch's identities were in the structure, every step would be compiled.
    """
    compiled = []

    @jax.jit
    def doubled(batch: Any) -> Any:
        compiled.append(batch)
        return jax.tree.map(lambda value: 2 * value, batch)

    for epoch in range(3):
        found = doubled(Batch({"y": np.full(4, epoch, np.int32), "x": np.ones((4, 2), np.float32)}, epoch))
        assert isinstance(found, Batch)
        assert (found.size, found["y"].tolist()) == (4, [2 * epoch] * 4)
    assert len(compiled) == 1
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(found)]
    assert paths == ["['x']", "['y']"]  # sorted, as of every dict

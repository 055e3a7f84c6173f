"""Processes forked from one that has threads and a framework: they leave alone what they inherit."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock_producer.jobs.endless import EndlessProduction
from penstock_producer.jobs.forking import forked
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.sources.config import GeneratorConfig, LocalConfig
from penstock_producer.sources.names import register
from tests.contracts.processes import child
from tests.producer.made import SAMPLES
from tests.producer.reading import read_epoch
from tests.producer.test_jobs import dataset, options_of, produce


class Framework:
    """An object of a framework: it crashes a forked process that destroys it, as TensorFlow's functions do."""

    def __init__(self) -> None:
        self.itself = self
        self.owner = os.getpid()

    def __del__(self) -> None:
        """The threads that it needs are not in a forked process."""
        if os.getpid() != self.owner:
            os.kill(os.getpid(), signal.SIGSEGV)


@pytest.fixture
def garbage() -> Iterator[None]:
    """Leave an object of a framework that nothing refers to and that was not collected yet."""
    gc.disable()
    Framework()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.usefixtures("garbage")
def test_workers_do_not_collect_their_parents_garbage(any_url: str) -> None:
    """A notebook has trained a model before it starts a production. The spec's process and the workers must live."""
    summary = produce(any_url, dataset("collects"))
    assert (summary.samples, summary.bad) == (SAMPLES, 0)


@pytest.mark.usefixtures("garbage")
def test_a_process_that_feeds_does_not_collect_its_parents_garbage(any_url: str) -> None:
    """An iterable is read in one forked process, which no other would replace."""
    plan = ProductionPlan(stream="train", source=GeneratorConfig(name="tests.producer.made:collected"))
    with EndlessProduction(plan, options_of(any_url)) as production:
        assert [look.done for look in production.run()][-1] == 5


def test_transforms_use_torch_after_their_parent_used_it(any_url: str) -> None:
    """A notebook tries its model on a batch first. The threads of torch that this started are not in forked workers."""
    with child(_produce_through_torch, any_url) as process:
        assert process.rest(60) == [f"{SAMPLES} samples, 0 bad, by workers with 1 thread"], process.errors()


def _produce_through_torch(url: str) -> None:
    """Use a model of torch, in this process of its own and then in workers."""
    import torch

    torch.set_num_threads(2)  # one core has no thread to wait for
    model, batch = torch.nn.Linear(256, 4), torch.ones(256, 256)
    model(batch)

    def applied(number: int) -> dict[str, Any]:
        return {"x": model(batch).detach().numpy(), "threads": np.int64(torch.get_num_threads())}

    source = LocalConfig(token=register(range(SAMPLES)), transform=register(applied))
    made = produce(url, source, sample_limit_s=10.0)
    (threads,) = {int(sample["threads"]) for sample in read_epoch(url).values()}
    print(f"{made.samples} samples, {made.bad} bad, by workers with {threads} thread", flush=True)


@pytest.mark.usefixtures("garbage")
@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_forked_process_collects_its_own_garbage_as_its_parent_would(is_enabled: bool) -> None:
    """Only what it inherits is left alone."""
    if is_enabled:
        gc.enable()
    process = forked(_collect, is_enabled)
    process.join()
    assert process.exitcode == 0
    assert gc.isenabled() is is_enabled


def _collect(is_enabled: bool) -> None:
    assert gc.isenabled() is is_enabled
    own: list[object] = []
    own.append(own)
    del own
    assert gc.collect() > 0

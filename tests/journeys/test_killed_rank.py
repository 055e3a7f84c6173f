"""A rank of an ordered group that is killed: it goes on at its first unacknowledged batch, and nothing else moves."""

from __future__ import annotations

import json
import time

import pytest

from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.positions import known_positions
from penstock_common.tuning import Canonical, Tuning
from penstock_consumer.read.ack import Acknowledge
from penstock_consumer.read.loader import Loader
from tests.contracts.feed import open_stream
from tests.contracts.ordered import expected, interleaved, plan
from tests.contracts.processes import Child, child

SIZES, BAD = (200,) * 4, frozenset(range(5, 800, 14))


def train(url: str, rank: str, world: str, stop: str, state: str = "", policy: Acknowledge = "on_next") -> None:
    """Prints each batch after its step, and the state then; hangs in the middle of step ``stop``, if not -1."""
    with Loader(
        "t",
        group="g",
        batch_size=10,
        url=url,
        order=Canonical(rank=int(rank), world_size=int(world)),
        tuning=Tuning(timeout_s=30, lease_s=6, prefetch_bytes=4000),
        acknowledge=policy,
    ) as loader:
        if state:
            loader.load_state_dict(json.loads(state))
        for step, batch in enumerate(loader):
            if step == int(stop):
                print("middle", flush=True)
                time.sleep(60)
            print(json.dumps([batch["y"].tolist(), loader.state_dict()]), flush=True)
            if policy == "on_checkpoint" and step % 4 == 3:
                loader.checkpointed()


def batches_of(lines: list[str]) -> list[list[int]]:
    """Return the batches that a rank trained on."""
    return [json.loads(line)[0] for line in lines if line.startswith("[")]


def until_middle(trainer: Child) -> list[str]:
    """Return the lines that a rank printed until it hung."""
    lines: list[str] = []
    while (line := trainer.line()) != "middle":
        assert line, trainer.errors()
        lines.append(line)
    return lines


def test_a_killed_rank_goes_on_at_its_first_unacknowledged_batch(url: str, client: Client) -> None:
    """The other rank never notices: it has all its steps, and together they have every position once."""
    plan(url, SIZES, BAD, partitions=3)
    with child(train, url, 0, 2, -1) as other:
        with child(train, url, 1, 2, 11) as killed:
            before = until_middle(killed)
            killed.kill()
        acknowledged = known_positions(client, open_stream(client, "t"), 0, "g").of(1) // 20
        assert 11 - 8 <= acknowledged <= 11  # reports under way at the kill are lost, and their batches come again
        with child(train, url, 1, 2, -1) as again:
            after = batches_of(again.rest())
        zero = batches_of(other.rest())
    one = batches_of(before)[:acknowledged] + after
    assert batches_of(before)[acknowledged:] == after[: 11 - acknowledged]
    assert interleaved([zero, one]) == expected(800, BAD, 0, 800)
    assert audit_stream(client, "t").is_clean


@pytest.mark.parametrize("stop", [4, 20, 36])
def test_a_run_that_was_killed_resumes_as_if_it_had_not_been(any_url: str, stop: int) -> None:
    """At 10, 50 and 90 % of an epoch, with two ranks before and three after: the batches of an uninterrupted run."""
    plan(any_url, SIZES, BAD, partitions=3)
    with child(train, any_url, 0, 2, stop, "", "on_checkpoint") as zero, child(
        train, any_url, 1, 2, stop, "", "on_checkpoint"
    ) as one:  # fmt: skip
        lines = [until_middle(zero), until_middle(one)]
        for trainer in (zero, one):
            trainer.kill()
    saved = stop - stop % 4  # the last checkpoint that was durable
    states = [json.dumps(json.loads(line[saved - 1])[1]) for line in lines]
    assert {json.loads(state)["position"] for state in states} == {saved * 20}
    with child(train, any_url, 0, 3, -1, states[0], "on_checkpoint") as a, child(
        train, any_url, 1, 3, -1, states[0], "on_checkpoint"
    ) as b, child(train, any_url, 2, 3, -1, states[0], "on_checkpoint") as c:  # fmt: skip
        resumed = [batches_of(trainer.rest()) for trainer in (a, b, c)]
    trained = interleaved([batches_of(line)[:saved] for line in lines]) + interleaved(resumed)
    steps = -(-(800 - saved * 20) // 30)
    assert trained == expected(800, BAD, 0, saved * 20 + steps * 30)

"""Kill -9 under each acknowledgement policy: exactly what the policy says was not trained on is delivered again."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.read.loader import Loader
from tests.contracts.feed import loader_of, produce
from tests.contracts.processes import child
from tests.tuned import tuned

COUNT, EPOCHS = 100, 2
Identity = tuple[int, int]


def way(order: str) -> dict[str, Any]:
    """A member with a name of its own, so that no lease has to lapse; a rank has one anyway."""
    return {"order": order} if order != "shared" else {"member": "m"}


def train(url: str, policy: str, every: str, stop_at: str, order: str) -> None:
    """A trainer with a given policy, which prints each batch before its step, and a line when it is acknowledged."""
    settings: dict[str, Any] = {"acknowledge": policy, "lease_s": 600, **way(order)}
    loader = Loader("t", group="g", batch_size=10, url=url, **tuned("Loader", settings))
    step = 0
    for _ in range(EPOCHS):
        for batch in loader:
            step += 1
            print("step", *(f"{epoch}:{offset}" for epoch, _, offset in batch.identities()), flush=True)
            if step == int(stop_at):
                hooks_of(loader).acknowledger.flush()  # what was acknowledged is on the server, whatever comes
                print("middle", flush=True)
                time.sleep(60)
            if policy == "manual" and step % int(every):
                loader.acknowledge(batch)
                print("acknowledged", step, flush=True)
            elif policy == "on_checkpoint" and step % int(every) == 0:
                loader.checkpointed()
                print("checkpoint", step, flush=True)


def acknowledged_steps(policy: str, steps: int, lines: list[str]) -> set[int]:
    """Which steps (from 1) the policy counts as trained on, of a trainer killed in step ``steps``."""
    if policy == "on_next":
        return set(range(1, steps))
    said = [int(line.split()[1]) for line in lines if not line.startswith("step")]
    return set(said) if policy == "manual" else set(range(1, max(said, default=0) + 1))


@pytest.mark.parametrize(
    ("policy", "every", "stop_at", "order"),
    [
        ("on_next", 1, 1, "shared"),
        ("on_next", 1, 14, "shared"),
        ("manual", 3, 8, "shared"),
        ("manual", 3, 17, "shared"),
        ("on_checkpoint", 100, 14, "shared"),  # no checkpoint yet
        ("on_checkpoint", 4, 7, "shared"),
        ("on_checkpoint", 8, 14, "shared"),  # the last one is in the epoch before
        ("on_checkpoint", 5, 20, "shared"),
        ("on_next", 1, 14, "canonical"),
        ("on_checkpoint", 100, 14, "canonical"),
        ("on_checkpoint", 8, 14, "canonical"),
        ("on_checkpoint", 4, 15, "canonical"),
    ],
)
def test_exactly_what_the_policy_left_unacknowledged_comes_again(
    policy: str, every: int, stop_at: int, order: str, any_url: str, any_client: Client
) -> None:
    """Kill -9 in a step, with entries that span batches: nothing more and nothing less than the policy promises."""
    produce(any_url, "t", COUNT, epochs=EPOCHS, block_samples=7)
    lines: list[str] = []
    with child(train, any_url, policy, every, stop_at, order) as trainer:
        while (line := trainer.line()) != "middle":
            assert line, trainer.errors()
            lines.append(line)
        assert trainer.kill() == []
    steps = [[_identity(word) for word in line.split()[1:]] for line in lines if line.startswith("step")]
    counted = acknowledged_steps(policy, len(steps), lines)
    expected = {(epoch, offset) for epoch in range(EPOCHS) for offset in range(COUNT)}
    expected -= {identity for number in counted for identity in steps[number - 1]}
    again: Counter[Identity] = Counter()
    with loader_of(any_url, batch_size=10, **way(order)) as loader:
        for _ in {epoch for epoch, _ in expected}:
            again.update((epoch, offset) for batch in loader for epoch, _, offset in batch.identities())
    assert again == Counter(expected)
    report = audit_stream(any_client, "t")
    assert report.is_clean
    assert report.delivered == {"g": COUNT * EPOCHS}


def _identity(word: str) -> Identity:
    epoch, _, offset = word.partition(":")
    return int(epoch), int(offset)

"""The rule of admission: recorded waits are decided as they were, and no quota is exceeded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_producer.write import admission
from penstock_producer.write.admission import AdmissionControl
from penstock_producer.write.quota import LACKING, Admission, QuotaState, decide_admission, find_refusal
from penstock_producer.write.target import ShardTarget

RECORDED = json.loads((Path(__file__).parent / "admission_cases.json").read_text())
"""Decisions of real runs with full budgets, full servers and full folders, one list for each shard that was written."""


class Step(NamedTuple):
    """One decision: what was asked, what the server and the cleaner answered, and what came of it."""

    op: str
    now_s: float
    block: int
    held: int
    is_server_full: bool
    is_folder_full: bool
    left: list[int | None]
    is_used_up: bool
    freed: int
    is_next: bool
    outcome: list[Any] | None = None


class Answers:
    """Stands for the server and the cleaner of one shard: answers as the step says."""

    def __init__(self) -> None:
        self.step = Step("", 0.0, 0, 0, False, False, [None], False, 0, False)
        self.left: list[int | None] = []

    def take(self, step: Step) -> None:
        """Answer as this step says from now on."""
        self.step, self.left = step, list(step.left)

    def left_bytes(self, wanted_bytes: int, *, anew: bool) -> int | None:
        """Return what the server's memory leaves."""
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def is_used_up(self) -> bool:
        """Return whether the server is at its maxmemory."""
        return self.step.is_used_up

    def spend(self, nbytes: int) -> None:
        """Forget it: the next step says what is left."""

    def free_bytes(self, partition: Any, need_bytes: int) -> int:
        """Return the bytes that were freed."""
        return self.step.freed

    def is_next(self, epoch: int, shard: int) -> bool:
        """Return whether the shard is next."""
        return self.step.is_next


def decided(control: AdmissionControl, answers: Answers, steps: list[Step]) -> list[list[Any]]:
    """Return each step's outcome: the answer, what is lacking after a refusal, and the pause."""
    found = []
    for step in steps:
        answers.take(step)
        if step.is_server_full:
            control.note_full_server()
        if step.is_folder_full:
            control.note_full_folder("/full")
        is_admitted = getattr(control, step.op)(step.block, step.held)
        why = "" if is_admitted or step.op == "admit_next" else LACKING[control._decision]
        found.append([is_admitted, why, control.pause_s()])
    return found


@pytest.fixture(autouse=True)
def no_roster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no notes: there is no server."""
    monkeypatch.setattr(admission, "note_wait", lambda *_, **__: None)


def control_of(budget: int, payload: str, answers: Any) -> AdmissionControl:
    """Return a shard's control whose cleaner, server and clock are the answers."""
    partition = SimpleNamespace(number=0)
    stream: Any = SimpleNamespace(
        name="t", partition_of=lambda _: partition, partitions=[partition], partition_budget=budget, payload=payload
    )
    resources: Any = SimpleNamespace(
        cleaner=answers, server_memory=answers, order=answers, partition_budget=budget, read_budget=lambda: None
    )
    manifest: Any = SimpleNamespace(epoch=0)
    return AdmissionControl(ShardTarget(answers, stream, manifest, 0), lambda: answers.step.now_s, resources)


@pytest.mark.parametrize("case", range(len(RECORDED)))
def test_recorded_waits_are_decided_as_they_were(case: int) -> None:
    """They come from runs whose budget, server or folder was full: a decision that differs stalls or overfills one."""
    one = RECORDED[case]
    steps = [Step(*step) for step in one["steps"]]
    answers = Answers()
    found = decided(control_of(one["budget"], one["payload"], answers), answers, steps)
    for step, (is_admitted, why, pause_s) in zip(steps, found, strict=True):
        assert step.outcome is not None
        assert [is_admitted, why, pytest.approx(pause_s, abs=1e-4)] == step.outcome, step


STATES = st.builds(
    QuotaState,
    held_bytes=st.integers(0, 1100),
    block_bytes=st.integers(0, 250),
    budget_bytes=st.just(1000),
    is_next=st.booleans(),
    waited_s=st.one_of(st.none(), st.floats(0, 3)),
    left_bytes=st.one_of(st.none(), st.integers(-50, 1200)),
)


@given(STATES)
def test_no_block_is_admitted_beyond_the_budget_or_the_memory(state: QuotaState) -> None:
    """A full server loses what it cannot hold, and shards that are ahead must not take the last quarter."""
    decision = decide_admission(state)
    if decision is Admission.ADMITTED:
        after = state.held_bytes + state.block_bytes
        assert after <= (1000 if state.is_next else 750)
        assert state.left_bytes is None or state.block_bytes <= state.left_bytes or not state.block_bytes
    if decision is Admission.RESERVED:
        assert decide_admission(replace(state, is_next=True)) is Admission.ADMITTED
    if decision is Admission.MEMORY_SHORT:
        assert decide_admission(replace(state, left_bytes=None)) is Admission.ADMITTED


@given(STATES, st.integers(0, 1100))
def test_freeing_bytes_never_refuses_a_block_that_was_admitted(state: QuotaState, freed: int) -> None:
    """Otherwise a writer could wait for ever while readers acknowledge."""
    less = replace(state, held_bytes=max(0, state.held_bytes - freed), left_bytes=None)
    if decide_admission(replace(state, left_bytes=None)) is Admission.ADMITTED:
        assert decide_admission(less) is Admission.ADMITTED


@given(STATES)
def test_a_refused_block_waits_whatever_the_quota_says(state: QuotaState) -> None:
    """It would be refused again and again; of two refusals the folder is named, since freeing memory helps it not."""
    folder, server = find_refusal("/full", is_server_full=True), find_refusal("", is_server_full=True)
    assert decide_admission(state, folder) is Admission.FOLDER_FULL
    assert decide_admission(state, server) is Admission.SERVER_FULL
    assert find_refusal("", is_server_full=False) is None

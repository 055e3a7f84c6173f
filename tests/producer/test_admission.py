"""The rule of admission: recorded and generated waits are decided as they always were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_producer.write import admission
from penstock_producer.write.admission import AdmissionControl
from tests.producer import old_admission
from tests.producer.old_admission import OldAdmissionControl

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
        self.notes: list[tuple[str, bool]] = []

    def take(self, step: Step) -> None:
        """Answer as this step says from now on."""
        self.step, self.left = step, list(step.left)

    def of(self, shard: int) -> Answers:
        """Return the cleaner."""
        return self

    def left_bytes(self, wanted_bytes: int, *, anew: bool) -> int | None:
        """Return what the server's memory leaves."""
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def is_used_up(self) -> bool:
        """Return whether the server is at its maxmemory."""
        return self.step.is_used_up

    def spend(self, nbytes: int) -> None:
        """Forget it: the next step says what is left."""

    def free_bytes(self, need_bytes: int) -> int:
        """Return the bytes that were freed."""
        return self.step.freed

    def is_next(self, epoch: int, shard: int) -> bool:
        """Return whether the shard is next."""
        return self.step.is_next

    def note_wait(self, *_: Any, why: str, is_next: bool, **__: Any) -> None:
        """Keep a note of the roster."""
        self.notes.append((why, is_next))


def decided(control: Any, answers: Answers, steps: list[Step], lacking: Callable[[Any], str]) -> list[list[Any]]:
    """Return each step's outcome: the answer, what is lacking after a refusal, the pause, and the notes so far."""
    found = []
    for step in steps:
        answers.take(step)
        for is_full, note, name, args in (
            (step.is_server_full, "note_full_server", "server_is_full", []),
            (step.is_folder_full, "note_full_folder", "full_folder", ["/full"]),
        ):
            if is_full and hasattr(control, note):
                getattr(control, note)(*args)
            elif is_full:
                setattr(control, name, args[0] if args else True)
        is_admitted = getattr(control, step.op)(step.block, step.held)
        why = "" if is_admitted or step.op == "admit_next" else lacking(control)
        found.append([is_admitted, why, round(control.pause_s(), 6), len(answers.notes)])
    return found


@pytest.fixture(autouse=True)
def no_roster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have notes go to the answers."""
    for module in (admission, old_admission):
        monkeypatch.setattr(module, "note_wait", lambda answers, *args, **kwargs: answers.note_wait(*args, **kwargs))


def control_of(kind: Any, budget: int, payload: str, answers: Answers) -> Any:
    """Return a shard's control whose client, cleaner, server and clock are the answers."""
    partition = SimpleNamespace(number=0)
    stream = SimpleNamespace(
        name="t", partition_of=lambda _: partition, partitions=[partition], partition_budget=budget, payload=payload
    )
    resources = SimpleNamespace(cleaners=answers, server_memory=answers, order=answers)
    manifest = SimpleNamespace(epoch=0)
    return kind(answers, stream, manifest, 0, lambda: answers.step.now_s, resources)


def new(budget: int, payload: str, steps: list[Step]) -> list[list[Any]]:
    """Return what the control decides in these steps."""
    answers = Answers()
    control = control_of(AdmissionControl, budget, payload, answers)
    return decided(control, answers, steps, lambda it: admission.LACKING[it._decision])


def old(budget: int, payload: str, steps: list[Step]) -> list[list[Any]]:
    """Return what the old control decided."""
    answers = Answers()
    control = control_of(OldAdmissionControl, budget, payload, answers)
    return decided(control, answers, steps, lambda it: str(it._lacking))


@pytest.mark.parametrize("case", range(len(RECORDED)))
def test_recorded_waits_are_decided_as_they_were(case: int) -> None:
    """They come from runs whose budget, server or folder was full: a decision that differs stalls or overfills one."""
    one = RECORDED[case]
    steps = [Step(*step) for step in one["steps"]]
    found = new(one["budget"], one["payload"], steps)
    for step, (is_admitted, why, pause_s, _) in zip(steps, found, strict=True):
        assert step.outcome is not None
        assert [is_admitted, why, pytest.approx(pause_s, abs=1e-4)] == step.outcome, step


STEPS = st.lists(
    st.builds(
        Step,
        op=st.sampled_from(["admit", "admit", "admit_next"]),
        now_s=st.sampled_from([0.0, 0.02, 0.2, 0.6, 1.5]),
        block=st.integers(0, 250),
        held=st.integers(0, 1100),
        is_server_full=st.sampled_from([False, False, False, True]),
        is_folder_full=st.sampled_from([False, False, False, True]),
        left=st.lists(st.one_of(st.none(), st.integers(-50, 1200)), min_size=1, max_size=2),
        is_used_up=st.booleans(),
        freed=st.sampled_from([0, 0, 50, 400]),
        is_next=st.booleans(),
        outcome=st.none(),
    ),
    max_size=25,
)


@settings(max_examples=2000, deadline=None)
@given(STEPS, st.sampled_from(["inline", "segments:/dev/shm"]))
def test_old_and_new_agree(steps: list[Step], payload: str) -> None:
    """Times add up, so that waits have lengths."""
    now, timed = 0.0, []
    for step in steps:
        now += step.now_s
        timed.append(step._replace(now_s=now))
    assert new(1000, payload, timed) == old(1000, payload, timed)

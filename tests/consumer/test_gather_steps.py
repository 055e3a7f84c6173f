"""A pure rule decides for how many steps a rank waits together."""

from __future__ import annotations

from penstock_consumer.read.fetch_plan import BUDGET_SHARE, STEPS_AT_ONCE, WITHIN_S, StepPlanner

STEP, SAMPLE_BYTES = 1000, 1000
STEP_BYTES = STEP * SAMPLE_BYTES


def rank_of(world: int, each_s: float, budget_bytes: int = 1 << 30) -> StepPlanner:
    """Return a rank that has seen ten steps, one after another."""
    gathering = StepPlanner(world, STEP, budget_bytes)
    gathering.received(10 * SAMPLE_BYTES, 10)
    for number in range(10):
        gathering.reached(number * STEP, number * each_s)
    return gathering


def test_a_rank_among_others_waits_for_a_few_steps_together() -> None:
    """Each step wakes all ranks, and a process that is woken among many finds its caches cold."""
    assert rank_of(8, each_s=0.001).steps() == STEPS_AT_ONCE


def test_no_step_waits_for_others_for_more_than_a_tenth_of_a_second() -> None:
    """A training that waits for its producers must continue with the steps that exist."""
    assert rank_of(8, each_s=0.9 * WITHIN_S / 2).steps() == 2
    assert rank_of(8, each_s=1.1 * WITHIN_S / 2).steps() == 1
    assert rank_of(8, each_s=60.0).steps() == 1


def test_steps_that_wait_are_a_small_part_of_the_budget() -> None:
    """Writers must continue during that: otherwise all would wait for quota, and each step for a timeout."""
    assert rank_of(8, each_s=0.001, budget_bytes=2 * BUDGET_SHARE * STEP_BYTES).steps() == 2
    assert rank_of(8, each_s=0.001, budget_bytes=2 * BUDGET_SHARE * STEP_BYTES - 1).steps() == 1
    assert rank_of(8, each_s=0.001, budget_bytes=1).steps() == 1


def test_a_rank_alone_or_one_that_knows_nothing_yet_waits_for_one_step() -> None:
    """Its caches are warm, and the whole training waits for the first step."""
    assert rank_of(1, each_s=0.001).steps() == 1
    new = StepPlanner(8, STEP, 1 << 30)
    assert new.steps() == 1
    new.received(10 * SAMPLE_BYTES, 10)
    new.reached(0, 0.0)
    assert new.steps() == 1


def test_a_flow_that_slows_down_is_noticed_at_once() -> None:
    """A timeout with one step less than expected must not be followed by another."""
    gathering = rank_of(8, each_s=0.001)
    gathering.reached(9 * STEP, 0.02)  # no new step
    assert gathering.steps() == STEPS_AT_ONCE
    gathering.reached(10 * STEP, 0.3)
    assert gathering.steps() == 1


def test_the_time_of_a_step_is_that_of_its_share_of_what_was_committed() -> None:
    """Blocks are committed at any positions, and a rank that takes every n-th step counts only its own."""
    for reached, each_s in (
        ([(0, 0.0), (500, 1.0)], 2.0),
        ([(0, 0.0), (500, 1.0), (2500, 2.0)], 1.25),
        ([(0, 0.0), (500, 1.0), (500, 1.5), (400, 1.6), (2500, 2.0)], 1.25),  # nothing new in between
        ([(0, 0.0), (0, 3.0)], 0.0),
    ):
        planner = StepPlanner(2, STEP, 1 << 30)
        for position, now_s in reached:
            planner.reached(position, now_s)
        assert planner._each_s == each_s


def test_an_entry_of_holes_only_has_a_size() -> None:
    """It has no sample to divide by."""
    planner = rank_of(2, each_s=0.001)
    planner.received(BUDGET_SHARE << 30, 0)
    assert planner.steps() == 1


def test_an_entry_of_one_sample_tells_the_size_of_a_sample() -> None:
    """Large samples have entries of their own."""
    planner = rank_of(2, each_s=0.001, budget_bytes=2 * BUDGET_SHARE * STEP_BYTES)
    for nbytes, steps in ((SAMPLE_BYTES, 2), (SAMPLE_BYTES + 1, 1)):
        planner.received(nbytes, 1)
        assert planner.steps() == steps

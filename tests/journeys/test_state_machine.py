"""Random steps of writers, groups and ledger on a real server, compared with a model of dictionaries.

Long: ``make fuzz TARGET=model SECONDS=600``. What breaks shrinks to a few steps that read as a program.
"""

from __future__ import annotations

import pytest
import redis
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from penstock_common.stream.servers.embedded import EmbeddedServer
from tests.fuzz import walks
from tests.fuzz.machine import Machine

SEEN = ("written", "delivered", "killed", "removed", "replayed")
"""Events that must have happened in some walk, or this test would prove little."""


def test_whatever_writers_and_trainers_do_each_group_acknowledges_exactly_what_was_committed(
    any_server: EmbeddedServer, any_client: redis.Redis
) -> None:
    """The promises hold in every order of steps, also in those that no test names."""
    Machine.url = any_server.url
    Machine.steps.clear()
    for chance in range(10):  # which walks a seed gives changes with the code: some see little
        run_state_machine_as_test(
            seed(chance)(Machine),
            settings=settings(
                max_examples=6, stateful_step_count=30, deadline=None, database=None, print_blob=True,
                suppress_health_check=list(HealthCheck), phases=[Phase.generate],
            ),
        )  # fmt: skip
        if all(Machine.steps[done] for done in SEEN):
            return
    raise AssertionError(f"these walks saw too little: {Machine.steps}")


@pytest.mark.parametrize("number", range(walks.KEPT))
def test_a_stored_walk_commits_and_acknowledges_as_when_it_was_stored(number: int, any_server: EmbeddedServer) -> None:
    """Chance draws other walks as the code changes; these stay the same after every commit."""
    walks.replay(walks.stored()[number], any_server.url)

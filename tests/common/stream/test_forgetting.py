"""Groups that are dropped or reset: none of their acknowledgements stay, whichever caller drops them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.__main__ import main
from penstock_common.stream.commands import run_script
from penstock_common.stream.groups import forgetting
from penstock_common.stream.groups.forgetting import drop_group, reset_group
from penstock_common.stream.groups.roster import load_roster
from tests.contracts.feed import loader_of, numbers, open_stream, produce


def test_a_group_made_anew_under_a_dropped_ones_name_reads_everything(any_url: str, any_client: Any) -> None:
    """One call drops it all: a caller that forgot the ledgers would lose an epoch for the next group of that name."""
    produce(any_url, "t", 100)
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(100))
    assert drop_group(any_client, open_stream(any_client, "t"), "g")
    assert not [key for key in any_client.keys("*") if b":ledger:" in key or b":dead:" in key]
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(100))


def test_a_group_that_is_reset_reads_everything_again(any_url: str, any_client: Any) -> None:
    """A reset by start= must not leave out samples that were acknowledged before."""
    produce(any_url, "t", 100)
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(100))
    reset_group(any_client, open_stream(any_client, "t"), "g", 0)
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(100))


def test_a_group_that_no_member_has_joined_whole_is_reset_after_its_trainer_started(
    any_url: str, any_client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first member died between two partitions. The command printed the words of a script, without a name."""
    produce(any_url, "t", 10, partitions=2)
    assert main(["groups", "declare", "t", "g", "--url", any_url]) == 0
    any_client.hdel(open_stream(any_client, "t").partitions[1].roster, "g:g")
    assert main(["groups", "reset", "t", "g", "0", "--url", any_url]) == 1
    assert "partition 1 of 't' has no group 'g'" in capsys.readouterr().err
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(10))
    assert main(["groups", "reset", "t", "g", "0", "--url", any_url]) == 0
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(10))


def test_a_drop_that_was_broken_off_is_simply_asked_for_again(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half dropped group held data in one partition, and could no longer be named in order to drop it."""
    produce(any_url, "t", 10, partitions=2)
    assert main(["groups", "declare", "t", "g", "--url", any_url]) == 0
    stream, asked = open_stream(any_client, "t"), list[str]()

    def break_off(client: Any, script: str, *given: Any) -> Any:
        asked.append(script)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return run_script(client, script, *given)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(forgetting, "run_script", break_off)
        drop_group(any_client, stream, "g")
    assert main(["groups", "drop", "t", "g", "--url", any_url]) == 0
    assert [list(load_roster(any_client, partition).groups) for partition in stream.partitions] == [[], []]


def test_a_member_that_leaves_is_no_consumer_any_more(any_url: str, any_client: Any) -> None:
    """Each restarted process would leave another consumer, and a group of months would have thousands."""
    produce(any_url, "t", 20)
    key = open_stream(any_client, "t").partitions[0].entries(0)
    with loader_of(any_url) as loader:
        batches = iter(loader)
        next(batches)
        assert len(any_client.xinfo_consumers(key, "g")) == 1
    assert [one for one in any_client.xinfo_consumers(key, "g") if one["pending"] == 0] == []

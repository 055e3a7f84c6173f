"""Pins and alarms: a pinned epoch stays, and a wait for an inactive group says so and names the fix."""

from __future__ import annotations

import json
import re
import time

import pytest

from penstock.__main__ import main
from penstock_common.errors import BudgetFull, EpochNotFound, EpochsReleased, ReplayTruncated
from penstock_common.explain.sentences import explain_holds
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import index_records, trim_entries
from penstock_common.stream.groups.roster import Membership, Roster, join_group, load_roster, pin_epoch, unpin_epoch
from penstock_common.stream.manifest import retained_epochs
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.stream.streams import load_stream
from penstock_producer.write import cleaner
from penstock_producer.write.cleaner import clean_up
from tests.contracts.processes import child
from tests.producer.test_retention import group, loader_of, read, roster_of, write_epoch, writer_of
from tests.producer.test_retention_policies import acknowledged_epochs

MINUTE_MS = 60_000


class TestPins:
    """Epochs that are kept on purpose."""

    @pytest.mark.parametrize("partitions", [1, 2])
    def test_a_pinned_epoch_outlives_every_policy_and_every_need(
        self, url: str, client: Client, partitions: int
    ) -> None:
        """The epoch a paper's figure rests on must be there next month, however small the budget."""
        with (
            writer_of(url, partitions=partitions, budget_bytes=partitions * 100 * 1008, retention="epochs:0") as writer,
            loader_of(url, "g") as loader,
        ):
            for epoch in range(9):
                write_epoch(writer, 20)
                assert read(loader) == list(range(20))
                if epoch == 1:
                    assert pin_epoch(client, writer.stream, 1)
                    assert not pin_epoch(client, writer.stream, 1)
            clean_up(client, writer.stream, lambda _: None)
            assert list(retained_epochs(client, writer.stream)) == [1]
            assert unpin_epoch(client, writer.stream, 1)
            assert not unpin_epoch(client, writer.stream, 1)
            clean_up(client, writer.stream, lambda _: None)
            assert list(retained_epochs(client, writer.stream)) == []

    def test_a_pin_stops_a_removal_that_was_planned_before_it(self, any_url: str, any_client: Client) -> None:
        """A cleaner that looked a moment earlier must not win."""
        acknowledged_epochs(any_url, 1)
        stream = load_stream(any_client, "t")
        partition = stream.partitions[0]
        generation = load_roster(any_client, partition).generation
        records = list(index_records(any_client, partition, 0, 0))
        pin_epoch(any_client, stream, 0)
        assert not release_epoch(any_client, stream, 0, generation)
        assert trim_entries(any_client, partition, generation, 0, records) is None
        assert list(retained_epochs(any_client, stream)) == [0]

    def test_a_group_that_joins_stops_a_removal_that_was_planned_before_it(
        self, any_url: str, any_client: Client
    ) -> None:
        """The script promised it all epochs from epoch 0."""
        acknowledged_epochs(any_url, 1)
        stream = load_stream(any_client, "t")
        partition = stream.partitions[0]
        generation = load_roster(any_client, partition).generation
        records = list(index_records(any_client, partition, 0, 0))
        assert join_group(any_client, Membership(stream, "late", "m", "1")) == 0
        assert not release_epoch(any_client, stream, 0, generation)
        assert trim_entries(any_client, partition, generation, 0, records) is None
        assert list(retained_epochs(any_client, stream)) == [0]

    def test_what_is_not_whole_any_more_cannot_be_pinned(self, any_url: str, any_client: Client) -> None:
        """A pin promises a replay; of a trimmed or released epoch there is none."""
        acknowledged_epochs(any_url, 2, partitions=2)
        stream = load_stream(any_client, "t")
        first, second = stream.partitions
        any_client.hset(second.roster, "t:0", "1")
        with pytest.raises(ReplayTruncated, match=r"epoch 0 of 't' is trimmed already.*nothing whole to pin"):
            pin_epoch(any_client, stream, 0)
        assert not load_roster(any_client, first).pinned
        release_epoch(any_client, stream, 0)
        with pytest.raises(EpochNotFound, match="retained epochs: 1"):
            pin_epoch(any_client, stream, 0)

    def test_a_writer_that_waits_because_of_a_pin_says_so(self, any_url: str, any_client: Client) -> None:
        """A pin counts against the budget: who set it and forgot it must find it in the message."""
        with writer_of(any_url, room_wait_s=0.1) as writer, loader_of(any_url, "g") as loader:
            for epoch in range(3):
                write_epoch(writer, 25)
                read(loader)
                pin_epoch(any_client, writer.stream, epoch)
            with pytest.raises(BudgetFull, match=r"epochs 0, 1, 2 are pinned.*`penstock epochs unpin t 0`"):
                write_epoch(writer, 50)
            unpin_epoch(any_client, writer.stream, 0)
            unpin_epoch(any_client, writer.stream, 1)
            write_epoch(writer, 25)

    def test_the_commands_pin_show_and_unpin(
        self, any_url: str, any_client: Client, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """From any shell, for people and for programs."""
        acknowledged_epochs(any_url, 3)

        def say(*words: str) -> str:
            assert main(["epochs", *words, "--url", any_url]) == 0
            return capsys.readouterr().out

        assert "epoch 1 of 't' is pinned: it is kept whole" in say("pin", "t", "1")
        assert json.loads(say("pin", "t", "1", "--json")) == {
            "stream": "t", "epoch": 1, "pinned": True, "changed": False,
        }  # fmt: skip
        assert re.search(r"^ *1 +produced.*pinned$", say("list", "t"), re.MULTILINE)
        assert [epoch["pinned"] for epoch in json.loads(say("list", "t", "--json"))] == [False, True, False]
        assert "(it was budget)" in say("retain", "t", "epochs:0")
        assert main(["trim", "t", "--json", "--url", any_url]) == 0
        assert json.loads(capsys.readouterr().out)["released_epochs"] == [0, 2]
        assert "left to retention again" in say("unpin", "t", "1")
        assert main(["trim", "t", "--url", any_url]) == 0
        assert "released epoch 1 of 't' (retention epochs:0): 480 bytes freed" in capsys.readouterr().out
        assert main(["epochs", "retain", "t", "epochs:some", "--url", any_url]) == 2
        assert "retention 'epochs:some' is not one of: budget" in capsys.readouterr().err


class TestAlarm:
    """Groups without a member."""

    def test_a_group_whose_trainers_are_gone_is_named_with_the_time_and_the_command(self) -> None:
        """Without the name a user does not know which of ten experiments it is."""
        silent = roster_of({"a": group(), "b": group()}, members={("b", "m"): 10 * MINUTE_MS})
        text = explain_holds("train", silent, ["a", "b"], 10 * MINUTE_MS + 5000, 10 * MINUTE_MS)
        assert text == (
            "no trainer of group 'a' was seen for 10 min (it lets go after 10 min): start one, or give the group up "
            "with `penstock groups drop train a`"
        )
        assert explain_holds("train", silent, ["b"], 10 * MINUTE_MS + 5000, 10 * MINUTE_MS) == ""

    def test_a_pin_of_an_epoch_that_holds_nothing_is_not_blamed(self) -> None:
        """Only what takes space is in the way."""
        roster = Roster("1", pinned=frozenset({1, 2}), epochs={1: "a", 2: "b"}, epoch_bytes={1: 0, 2: 2048})
        assert "epochs 1, 2 are pinned, with 2 KiB" in explain_holds("t", roster, [], 0, 0)
        assert explain_holds("t", Roster("1", pinned=frozenset({1}), epochs={1: "a"}), [], 0, 0) == ""

    def test_a_declared_group_without_a_trainer_is_named_to_who_waits(self, any_url: str, any_client: Client) -> None:
        """It never expires. An operator starts its trainer, or drops it."""
        with writer_of(any_url, room_wait_s=0.1) as writer, loader_of(any_url, "day") as day:
            join_group(any_client, Membership(writer.stream, "night", "", ""), declared=True)
            with pytest.raises(BudgetFull) as refused:
                for _ in range(6):
                    write_epoch(writer, 20)
                    read(day)
            assert re.search(
                r"because of group night.*no trainer of group 'night' was seen for \d+ s \(it is declared, so data is "
                r"kept for it\): start one, or give the group up with `penstock groups drop t night`",
                str(refused.value),
            )
            assert main(["groups", "drop", "t", "night", "--url", any_url]) == 0
            write_epoch(writer, 20)


def half_read(url: str) -> None:
    """A trainer that stands still after its first batch."""
    with loader_of(url, "dead") as loader:
        for _ in loader:
            print("training", flush=True)
            time.sleep(600)


def test_a_trainer_killed_for_good_is_named_while_it_holds_data_and_then_lets_go(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Production must not stop for ever because of a machine that was switched off, nor go on without a word."""
    monkeypatch.setattr(cleaner, "GROUP_SILENT_MS", 10**9)
    told: list[str] = []
    with writer_of(any_url, room_wait_s=1.0) as writer:
        monkeypatch.setattr(cleaner, "CLEAN_UP_EVERY_S", 0.05)  # not for the timer: it would expire the group first
        write_epoch(writer, 20)
        with child(half_read, any_url) as trainer:
            assert trainer.line() == "training"
            trainer.kill()
        deadline = time.monotonic() + 20
        while not any("no trainer of group 'dead' was seen for" in text for text in told):
            assert time.monotonic() < deadline, told
            try:
                write_epoch(writer, 20)
            except BudgetFull as error:
                told.append(str(error))
        assert "because of group dead" in told[-1]
        assert "`penstock groups drop t dead`" in told[-1]
        monkeypatch.setattr(cleaner, "GROUP_SILENT_MS", 1000)
        monkeypatch.setattr(cleaner, "LOOK_AGAIN_S", 0.1)
        while load_roster(any_client, writer.stream.partitions[0]).groups["dead"].holds:
            assert time.monotonic() < deadline
            clean_up(any_client, writer.stream, told.append)
        assert any("group 'dead' was not seen for" in text for text in told)
        with loader_of(any_url, "alive", start="earliest") as alive:
            while 0 in retained_epochs(any_client, writer.stream):
                assert read(alive) != []
                write_epoch(writer, 20)
        with pytest.raises(EpochsReleased, match="'dead' had stopped holding data"), loader_of(any_url, "dead"):
            pass

"""The chaos checker against planted faults: a run could never find what the checker lets pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chaos.inquest import told_epochs
from chaos.journal import Journal
from chaos.lives import FAILED, KILLED, LEFT, Diary, Handed, Life, read_diary
from chaos.options import POLICIES, Options
from chaos.order import first_word, shards
from chaos.payload import is_bad, prove, sample
from chaos.ranks import PlannedEpoch, batches_of, judge_ranks
from chaos.rule import Rule
from chaos.schedule import CLUSTER_WEIGHTS, NETWORK_WEIGHTS, SERVER, WEIGHTS, faults
from chaos.stored import chosen, stored
from chaos.verdict import Expected, GroupVerdict, judge
from penstock_producer.jobs.plan import EpochOrder
from penstock_producer.sources.dataset import DatasetSource
from penstock_producer.sources.seeding import sample_rng

SECOND = 10**9
LEASE_S = 5


def diary(
    number: int,
    handed: Mapping[int, tuple[float, Sequence[int]]],
    *,
    acknowledged: Mapping[int, float] | None = None,
    flushed: Sequence[float] = (),
    ending: str = "",
    ended_s: float = 0,
    stops: Sequence[tuple[float, float]] = (),
    replaced_s: float = 0,
    cuts: Sequence[tuple[float, float]] = (),
) -> Diary:
    """Return a trainer's diary with times in seconds: batch -> (time, samples), and batch -> time of
    acknowledgement.
    """
    life = Life(
        "trainer", "main", "g", f"m{number}", Path(f"m{number}.journal"), int(ended_s * SECOND), ending,
        [(int(a * SECOND), int(b * SECOND)) for a, b in stops], int(replaced_s * SECOND),
    )  # fmt: skip
    life.cuts = [(int(a * SECOND), int(b * SECOND)) for a, b in cuts]
    made = Diary(life, done=set(handed), flushed_ns=[int(at * SECOND) for at in flushed])
    made.handed = [Handed(number, seq, int(at * SECOND), 0, tuple(nonces)) for seq, (at, nonces) in handed.items()]
    for place, (seq, at) in enumerate((acknowledged or {}).items()):
        made.acknowledged[seq] = place
        made.acknowledged_ns.append(int(at * SECOND))
    return made


def judged(
    diaries: Sequence[Diary], expected: Sequence[int], outages: Sequence[tuple[float, float]] = ()
) -> GroupVerdict:
    """Return the verdict on a group that should have been given ``expected``."""
    those = Expected(np.array(sorted(expected), np.uint64), np.zeros(len(expected), np.int64), np.array([], np.uint64))
    spans = [(int(a * SECOND), int(b * SECOND)) for a, b in outages]
    return judge("g", diaries, those, Rule(LEASE_S * SECOND, spans))


def test_a_lost_and_an_invented_sample_are_found() -> None:
    """These two things must never happen, whichever processes were killed."""
    verdict = judged([diary(0, {1: (1, [1, 2, 9])})], [1, 2, 3])
    assert verdict.delivered == 3
    assert any("1 samples never delivered" in text and text.endswith(" 3") for text in verdict.violations)
    assert any("1 samples invented" in text and text.endswith(" 9") for text in verdict.violations)


def test_a_sample_whose_step_never_ended_was_not_delivered() -> None:
    """A batch of a trainer that died in the step was not trained on."""
    one = diary(0, {1: (1, [1])}, ending=KILLED, ended_s=2)
    one.done.clear()
    assert judged([one], [1]).violations


def test_a_sample_under_another_epochs_name_is_found() -> None:
    """The payload proves its epoch, so a header with another epoch is false."""
    expected = Expected(np.array([1], np.uint64), np.array([7]), np.array([], np.uint64))
    assert "another epoch" in judge("g", [diary(0, {1: (1, [1])})], expected, Rule(SECOND, [])).violations[0]


def test_what_nothing_excuses_is_unexplained() -> None:
    """Two live members with one sample: the ledger must prevent that."""
    verdict = judged([diary(0, {1: (1, [1])}), diary(1, {1: (2, [1])})], [1])
    assert verdict.twice == verdict.reasons["unexplained"] == 1
    assert len(verdict.violations) == 1


@pytest.mark.parametrize("ending", [KILLED, FAILED])
def test_a_death_excuses_only_what_was_not_certainly_acknowledged(ending: str) -> None:
    """Up to eight acknowledgements may be under way. The ninth from the end is on the server."""
    handed = {seq: (seq, [seq]) for seq in range(1, 11)}
    first = diary(0, handed, acknowledged={seq: seq + 0.5 for seq in range(1, 10)}, ending=ending, ended_s=11)
    late = judged([first, diary(1, {1: (20, range(2, 11))})], range(1, 11))
    assert late.reasons == {f"its trainer {ending}": 9}
    early = judged([first, diary(1, {1: (20, [1])})], range(1, 11))
    assert early.reasons == {"unexplained": 1}
    assert judged([first, diary(1, {1: (10.5, [10])})], range(1, 11)).violations  # while it lived


def test_a_flush_makes_certain() -> None:
    """A checkpoint that returned is never trained on again."""
    first = diary(0, {1: (1, [1])}, acknowledged={1: 2}, flushed=[2.1], ending=KILLED, ended_s=3)
    assert judged([first, diary(1, {1: (9, [1])})], [1]).reasons == {"unexplained": 1}


def test_who_leaves_gives_back_only_what_it_did_not_acknowledge() -> None:
    """A normal end loses and repeats nothing."""
    first = diary(0, {1: (1, [1]), 2: (2, [2])}, acknowledged={1: 1.5}, ending=LEFT, ended_s=3)
    assert judged([first, diary(1, {1: (4, [2])})], [1, 2]).reasons == {"handed back": 1}
    assert judged([first, diary(1, {1: (4, [1])})], [1, 2]).reasons == {"unexplained": 1}


def test_who_is_told_to_leave_while_no_server_answers_may_leave_acknowledgements_behind() -> None:
    """Without a server it leaves after two seconds.

    With a server it has no such excuse, and flushed acknowledgements have none at all.
    """
    first = diary(0, {1: (1, [1]), 2: (2, [2])}, acknowledged={1: 1.5, 2: 2.5}, ending=LEFT, ended_s=3, flushed=[3.1])
    later = diary(1, {1: (9, [2])})
    away = judged([first, later], [1, 2], outages=[(2.2, 6)])
    assert away.reasons == {"left without a server": 1}
    assert judged([first, later], [1, 2], outages=[(4, 6)]).reasons == {"unexplained": 1}
    first.flushed_ns.insert(0, int(2.7 * SECOND))
    assert judged([first, later], [1, 2], outages=[(2.2, 6)]).reasons == {"unexplained": 1}


def test_a_stop_excuses_only_beyond_a_lease_and_only_what_was_in_hand() -> None:
    """A member that is slow for less than its lease keeps what it holds."""
    second = diary(1, {1: (9, [1])})
    for stop, reason in (((2, 8), "its trainer stopped"), ((2, 5), "unexplained"), ((8, 16), "unexplained")):
        first = diary(0, {1: (1, [1])}, stops=[stop])
        assert judged([first, second], [1]).reasons == {reason: 1}


def test_who_was_stopped_may_hand_out_what_others_took_until_it_has_renewed() -> None:
    """Its queue is older than its knowledge, and an outage of the server prolongs that."""
    taker = diary(0, {1: (9, [1])}, acknowledged={1: 9.5}, flushed=[9.6])
    assert judged([taker, diary(1, {1: (11, [1])}, stops=[(2, 10)])], [1]).reasons == {"by one stopped": 1}
    late = diary(1, {1: (20, [1])}, stops=[(2, 10)])
    assert judged([taker, late], [1]).reasons == {"unexplained": 1}
    assert judged([taker, late], [1], outages=[(10, 16)]).reasons == {"by one stopped": 1}


def test_a_taken_name_excuses_both_holders() -> None:
    """Two processes with one name: the older one stops as soon as it learns of the other."""
    old, new = diary(0, {1: (1, [1]), 2: (7, [2])}, replaced_s=5), diary(1, {1: (6, [1, 2])})
    assert judged([old, new], [1, 2]).reasons == {"its trainer replaced": 1, "by one replaced": 1}


def test_a_rank_is_held_to_the_very_batches_of_the_canonical_order() -> None:
    """A count alone would accept a wrong order, another rank's batch, or a missing replacement of a bad sample."""
    options = Options(seed=1, minutes=1, ranks=2)
    size, planned = options.rank_batch, PlannedEpoch(0, [*range(1, 30), None, *range(31, 41)], {"0:29"})
    first, second, third, fourth = batches_of(planned, size, 2)
    assert first == tuple(range(1, 14))
    assert third == (27, 28, 29, 31, *range(31, 40))  # 31 replaces 30, too
    assert fourth == (40, *range(1, 13))  # the last step is filled with the epoch's first samples
    whole = [diary(0, {1: (1, first), 2: (2, third)}), diary(1, {1: (1, second), 2: (2, fourth)})]
    for rank, one in enumerate(whole):
        one.life.member = str(rank)
        one.handed = [replace(batch, position=2 * size * batch.seq) for batch in one.handed]
    rule = Rule(LEASE_S * SECOND, [])
    assert judge_ranks(options, deepcopy(whole), [planned], rule).violations == []
    for wrong in (third[::-1], fourth, third[:-1], first):
        hurt = deepcopy(whole)
        hurt[0].handed[1] = replace(hurt[0].handed[1], nonces=wrong)
        assert judge_ranks(options, hurt, [planned], rule).violations


def test_equal_batches_of_a_rank_are_told_apart_by_their_places() -> None:
    """With large entries a batch is one sample, and a sample that replaces a bad one is in two batches."""
    options, planned = Options(seed=1, minutes=1, ranks=1, sample_bytes=1 << 20), PlannedEpoch(0, [None, 5, 6], {"0:0"})
    one = diary(0, {1: (1, [5]), 2: (2, [5]), 3: (3, [6])})
    one.life.member = "0"
    one.handed = [replace(batch, position=batch.seq) for batch in one.handed]
    rule = Rule(LEASE_S * SECOND, [])
    assert judge_ranks(options, [deepcopy(one)], [planned], rule).violations == []
    one.handed[1] = replace(one.handed[1], position=1)
    # one position is left out, and another taken twice
    assert len(judge_ranks(options, [one], [planned], rule).violations) == 2


def test_a_sample_that_is_twice_in_one_batch_has_no_excuse() -> None:
    """No fault of its trainer excuses it, because no other member took anything over between two rows."""
    assert judged([diary(0, {1: (11, [1, 1])}, stops=[(2, 10)])], [1]).reasons == {"unexplained": 1}


def test_a_damaged_payload_answers_to_no_name() -> None:
    """Identities come from the received bytes: one flipped bit, one swapped label, one cut tail."""
    made = sample(3, 17, 12345, 100)
    assert prove(3, made["x"], made["y"]) == 12345
    for place, value in ((slice(50, 51), made["x"][50] ^ 1), (slice(60, 100), 0)):
        hurt = made["x"].copy()
        hurt[place] = value
        assert prove(3, hurt, made["y"]) is None
    assert prove(3, made["x"], 18) is None
    assert prove(4, made["x"], made["y"]) is None


def test_a_journal_reads_back_as_it_was_written(tmp_path: Path) -> None:
    """The checker has no other evidence."""
    path = tmp_path / "one.journal"
    journal = Journal(path)
    for line in (("B",), ("H", 1, 4, "a,ff", 26), ("X", 1, "row 2"), ("D", 1), ("A", 1), ("F",), ("Z",), ("L",)):
        journal.note(*line)
    with path.open("a") as torn:
        torn.write("H 12")
    read = read_diary(0, Life("trainer", "main", "g", "m", path, ending=LEFT))
    assert [(one.seq, one.epoch, one.nonces, one.position) for one in read.handed] == [(1, 4, (0xA, 0xFF), 26)]
    assert read.done == {1}
    assert len(read.corrupt) == 1
    assert read.is_certain(1, read.flushed_ns[0])
    assert 0 < read.life.ended_ns <= read.flushed_ns[1]


def test_a_link_that_was_cut_beyond_a_lease_excuses_as_a_stop_does() -> None:
    """Its trainer could not renew. A shorter cut excuses nothing."""
    again = diary(1, {1: (20, [1])})
    assert judged([diary(0, {1: (9, [1])}, cuts=[(10, 15)]), again], [1]).reasons == {"its trainer stopped": 1}
    assert judged([diary(0, {1: (9, [1])}, cuts=[(10, 13)]), again], [1]).reasons == {"unexplained": 1}


def test_who_is_cut_off_beyond_a_lease_may_go_on_with_what_it_lost() -> None:
    """It cannot know that another trainer was given its entries."""
    cut = diary(1, {1: (16, [1])}, cuts=[(10, 18)])
    assert judged([diary(0, {1: (15, [1])}), cut], [1]).reasons == {"by one stopped": 1}
    assert judged([diary(0, {1: (11, [1])}), diary(1, {1: (12, [1])}, cuts=[(10, 18)])], [1]).reasons == {
        "unexplained": 1
    }


def test_a_failover_excuses_what_it_may_have_taken() -> None:
    """A successor may lack an acknowledgement of its last second, and none that is older."""
    handed = {seq: (seq, [seq]) for seq in range(1, 11)}
    first = diary(0, handed, acknowledged={seq: seq + 0.1 for seq in range(1, 11)}, flushed=[3.5])
    second = diary(1, {1: (20, [3, 4])})
    those = Expected(np.arange(1, 11, dtype=np.uint64), np.zeros(10, np.int64), np.array([], np.uint64))
    rule = Rule(LEASE_S * SECOND, [], [(11 * SECOND, 14 * SECOND)])
    verdict = judge("g", [first, second], those, rule)
    assert verdict.reasons == {"a failover": 1, "unexplained": 1}
    before = Rule(LEASE_S * SECOND, [], [(21 * SECOND, 24 * SECOND)])
    assert judge("g", [first, second], those, before).reasons == {"unexplained": 2}


def test_the_seed_decides_the_schedule_and_every_kind_of_fault_comes() -> None:
    """A seed that failed can be run again."""
    plan = list(faults(5, 1200, 1.5, server_kills=True))
    assert plan == list(faults(5, 1200, 1.5, server_kills=True))
    assert plan != list(faults(6, 1200, 1.5, server_kills=True))
    assert {fault.kind for fault in plan} == set(WEIGHTS)
    assert not any("server" in fault.kind for fault in faults(5, 1200, 1.5, server_kills=False))


def test_an_epoch_counts_once_a_dispatcher_told_of_it(tmp_path: Path) -> None:
    """One that is killed while it takes a number has begun nothing. What was begun must be delivered."""
    (tmp_path / "dispatcher-1.err").write_text("")
    (tmp_path / "dispatcher-2.err").write_text('{"progress": {"epochs": [{"epoch": 1, "state": "open"}]}}\n')
    (tmp_path / "dispatcher-3.out").write_text('{"stream": "main",\n "epochs": [\n  3,\n  14\n ]}\n')
    assert told_epochs(tmp_path) == {1, 3, 14}


def test_networks_and_a_cluster_add_their_faults_to_a_schedule() -> None:
    """A fault that no seed plans is never tested."""
    linked = {fault.kind for fault in faults(5, 1200, 1.5, server_kills=True, networks=True)}
    assert linked == {*WEIGHTS, *NETWORK_WEIGHTS}
    clustered = {fault.kind for fault in faults(5, 1200, 1.5, server_kills=True, cluster=True)}
    assert clustered == {*WEIGHTS, *CLUSTER_WEIGHTS} - set(SERVER)


def test_every_policy_is_in_a_default_run_and_some_samples_are_bad() -> None:
    """A policy that the default leaves out is never tested."""
    options = Options(seed=1, minutes=1)
    assert set(options.group_policies().values()) == set(POLICIES)
    assert 0 < sum(is_bad(1, index) for index in range(options.samples)) < options.samples / 10


def test_stored_seeds_plan_the_faults_they_planned_when_they_were_stored() -> None:
    """A run that is repeated after a change must be the same run."""
    for one in stored():
        assert one.planned() == one.faults, one.seed


def test_stored_seeds_cover_every_fault_both_planes_and_every_policy() -> None:
    """A case that the seeds leave out is not compared."""
    runs = [one.run_options() for one in stored()]
    assert len({options.seed for options in runs}) == 20
    assert {kind for one in stored() for kind in one.faults} == set(WEIGHTS)
    assert {options.payload for options in runs} == {"inline", "segments"}
    assert {policy for options in runs for policy in options.group_policies().values()} == set(POLICIES)
    assert {options.ranks > 0 for options in runs} == {options.own_queue for options in runs} == {False, True}


def test_some_of_the_stored_seeds_may_be_chosen() -> None:
    """All of them take an hour."""
    assert [one.seed for one in chosen("61123,7")] == [61123, 7]
    assert chosen("stored") == stored()
    with pytest.raises(ValueError, match="8"):
        chosen("7,8")


@pytest.mark.parametrize(("samples", "shard_samples"), [(48, 2), (3000, 150), (600, 30), (1500, 75), (90, 90)])
def test_the_order_that_a_run_expects_is_that_of_the_producers(samples: int, shard_samples: int) -> None:
    """It is computed without their code, because a shared mistake would count as right."""
    source = DatasetSource(range(samples), "chaos")
    for epoch in (0, 5):
        theirs = EpochOrder(source, seed=7, epoch=epoch, shuffle=True, shard_samples=shard_samples)
        ours = shards(samples, 7, epoch, shard_samples)
        assert ours == [theirs.items(shard).tolist() for shard in range(len(theirs.sizes))]
        for shard, offset in ((0, 0), (len(ours) - 1, 1)):
            made = sample_rng(7, epoch, shard, offset).bit_generator.random_raw()
            assert first_word(7, epoch, shard, offset) == made

"""The benchmark of transports: its sums, and one tiny real round of those sides that need nothing installed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import blocks, first_gigabyte, further, plots, rounds, targets, transport
from benchmarks.__main__ import main
from benchmarks.allowance import Allowance
from benchmarks.cases import BY_BATCH, IMAGE, Case, asked_for
from benchmarks.fanout import Fanned
from benchmarks.fanout import shown as fanned_shown
from benchmarks.results import Results, compared
from benchmarks.rounds import Failed, Round, run_round
from benchmarks.sides import BASELINE, INLINE, OURS, PLAIN, SEGMENTS, SHARED_MEMORY, Side, here
from benchmarks.spread import ratios
from benchmarks.transports.protocol import Load, Turns

SMALL = Case("4 kB", (1024,), "float32", batch=64, room_bytes=8 << 20, most_bytes=4_000_000)
SIDES = (*here(OURS), BASELINE)
SVG = "{http://www.w3.org/2000/svg}"


def took(seconds: float, got: int = 1000, cpu_s: float = 0.1) -> Round:
    """A round of images."""
    return Round(seconds, 1000, got, 1, IMAGE.sample_bytes, cpu_s, cpu_s, cpu_s)


def measured(sides: Sequence[Side], count: int = 1, is_lasting: bool = False) -> transport.Measured:
    """Rounds of the small case."""
    found = transport.Measured(SMALL)
    transport.measure(found, sides, count, 0.05, Allowance(600, [1]).piece(), lambda: None, is_lasting)
    return found


def test_every_side_that_needs_no_download_carries_every_sample_in_a_real_round() -> None:
    """A benchmark that quietly moves less than it says is worse than none."""
    found = measured(SIDES)
    assert found.failed == {}
    for (one,) in found.rounds.values():
        assert one.got == one.samples
        assert one.samples % SMALL.batch == 0
        assert one.writer_cpu_s > 0
        assert one.reader_cpu_s > 0
        assert one.server_cpu_s > 0
        assert one.writer_faults >= 0
        assert one.reader_faults >= 0
    text = transport.shown(found, SIDES)
    assert {f"| {side.name} " in text for side in SIDES} == {True}


def test_rows_written_by_batch_reach_two_trainers_each() -> None:
    """Trainers of the broadcast are groups: everything to each of them, and counted so."""
    case = replace(BY_BATCH, room_bytes=8 << 20, most_bytes=3_000_000)
    found = run_round(OURS[0], case, 0.05, readers=2)
    assert found.got == 2 * found.samples
    assert found.lost == 0


def test_a_side_that_cannot_run_says_why_in_its_row_and_the_others_go_on() -> None:
    """A peer that is broken here must not cost the whole run."""
    broken = replace(BASELINE, name="broken", module="no_such_transport")
    found = measured([broken, *OURS[:1], BASELINE], count=2, is_lasting=True)  # as in a quick run
    assert "No module named" in found.failed["broken"]
    assert {name: [one.lost for one in taken] for name, taken in found.rounds.items()} == {
        INLINE: [0, 0],
        PLAIN: [0, 0],
    }
    (row,) = [line for line in transport.shown(found, [broken, BASELINE]).splitlines() if line.startswith("| broken")]
    assert "No module named" in row
    fanned = Fanned(0.0, {(INLINE, 1): [took(1)]}, {("broken", 1): "nothing arrived"})
    assert "1: nothing arrived" in fanned_shown(fanned, [broken, BASELINE], (1,))


def test_what_a_side_showed_before_it_failed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that hangs in the last of three rounds has two good ones."""
    left = [took(1), took(2)]

    def fake(*_: object, **__: object) -> Round:
        if not left:
            raise OSError("no more\nof it")
        return left.pop()

    monkeypatch.setattr(transport, "run_round", fake)
    found = measured([BASELINE], count=3)
    assert len(found.rounds[PLAIN]) == found.count == 2
    assert "no more rounds: no more of it" in transport.shown(found, [BASELINE])


def test_slow_cores_cost_rounds_and_not_minutes() -> None:
    """A run that a contributor waits for ends when it says, and every payload has its round."""
    now = [0.0]
    allowance = Allowance(100, [3, 1], lambda: now[0])
    first = allowance.piece()
    assert first.has_room_for(0)
    now[0] = 30
    assert first.has_room_for(1)
    now[0] = 60
    assert not first.has_room_for(2)  # 90 of the 75 s that it has
    second = allowance.piece()
    assert second.has_room_for(0)
    now[0] = 80
    assert second.has_room_for(1)  # what the first left is its own
    now[0] = 100
    assert not second.has_room_for(2)


def test_an_interrupted_run_keeps_and_shows_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty minutes of measuring are not lost to a Ctrl-C in the twenty-first."""

    def fake(side: Side, *_: object, **__: object) -> Round:
        if side.name == INLINE:
            raise KeyboardInterrupt
        return took(2)

    monkeypatch.setattr("benchmarks.__main__.CASES", [SMALL])
    monkeypatch.setattr(transport, "run_round", fake)
    path = tmp_path / "new" / "figures.json"
    assert main(["transport", "--clean", "--side", INLINE, "--side", "plain", "--json", str(path)]) == 130
    assert list(json.loads(path.read_text())["transport"][0]["rounds"]) == [PLAIN]
    told = capsys.readouterr().out
    assert f"| {PLAIN} " in told
    assert "interrupted after" in told


def test_a_child_that_is_silent_ends_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that hangs must not hold up the run."""
    monkeypatch.setattr(rounds, "PATIENCE_S", 0.01)
    with pytest.raises(Failed, match="is silent for"):
        run_round(BASELINE, SMALL, 0.05)


def test_ratios_are_of_neighbouring_rounds() -> None:
    """A machine that slows down half-way moves both sides of a pair, and so no ratio."""
    ours, theirs = [took(1), took(10), took(2)], [took(2), took(20), took(6)]
    found = ratios(ours, theirs)
    assert found is not None
    assert (found.median, found.low, found.high) == (2, 2, 3)
    assert found.shown() == "2.00x (2.00-3.00)"
    assert ratios(ours, []) is None


def test_what_did_not_arrive_is_counted_and_not_paid_for() -> None:
    """PUB/SUB that drops half of it is half as fast as it sent."""
    assert took(1, got=500).lost == 0.5
    assert took(1, got=500).gb_per_s == took(2).gb_per_s


def test_targets_are_reached_or_not_by_the_median_of_the_run() -> None:
    """The table of targets is where claims are withdrawn."""
    ours, theirs = [took(1), took(1), took(1)], [took(2.3), took(2.4), took(1.7)]
    sizes = [replace(IMAGE, name="4 kB"), IMAGE]
    all_of_it = [transport.Measured(case, {INLINE: ours, SEGMENTS: ours, PLAIN: theirs}) for case in sizes]
    fanned = Fanned(0.0, {(SEGMENTS, 8): [took(0.25)], (INLINE, 1): [took(1)]})
    found = {one.what: one for one in targets.targets(all_of_it, [fanned], {})}
    plain = found["150 kB, inline, to plain redis-py + hiredis (floor 1.8)"]
    assert plain.is_met
    assert plain.found.low == pytest.approx(1.7)
    assert not found["150 kB, inline, CPU s/GB of writer and reader"].is_met
    assert not found["150 kB, 8 trainers on segments in sum, to one inline"].is_met
    assert found[f"{INLINE}: best size to worst, from 4 kB on"].found.median == 1
    assert "| no " in targets.shown(list(found.values()))


def test_a_batch_of_other_bytes_or_another_shape_ends_the_round() -> None:
    """Speed of a transport that damages what it carries is not shown."""
    load = Load("read", "", (8,), "uint8", batch=2)
    good = load.pool()[:2].copy()
    out = os.open(os.devnull, os.O_WRONLY)
    Turns(load, iter(()), out).got(good)
    good[1, 3] ^= 1
    for damaged in (good, good[:, :4], good.astype(np.int16)):
        with pytest.raises(ValueError, match="batch"):
            Turns(load, iter(()), out).got(damaged)
    os.close(out)


def test_plots_are_drawn_again_from_a_file_of_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plots in the documents come from a run's own figures, and from nothing else."""
    images = transport.Measured(IMAGE, {INLINE: [took(1)], PLAIN: [took(2)], "<other>": [took(400)]})
    rows = transport.Measured(BY_BATCH, {INLINE: [took(1)], PLAIN: [took(1)]})
    fanned = Fanned(0.0, {(INLINE, 1): [took(1)], (INLINE, 8): [took(0.2)]})
    Results({}, [images, rows], [fanned]).save(tmp_path / "figures.json")
    sizes = {name: {"ratio": {"median": ratio}} for name, ratio in (("1 member", 1), ("8 members", 1.2))}
    (tmp_path / "growth.json").write_text(json.dumps({"axes": [{"axis": "m", "is_waiting": False, "sizes": sizes}]}))
    monkeypatch.setattr(
        "sys.argv", ["plots", str(tmp_path / "figures.json"), str(tmp_path / "growth.json"), str(tmp_path / "img")]
    )
    assert plots.main() == 0
    drawn = {path.stem: ElementTree.fromstring(path.read_text()) for path in (tmp_path / "img").iterdir()}
    lines = {name: len(root.findall(f"{SVG}polyline")) for name, root in drawn.items()}
    assert lines == {"transport": 2, "trainers": 1, "growth": 1}
    texts = [text.text for text in drawn["transport"].iter(f"{SVG}text")]
    assert {INLINE, "<other>", "150 kB"} <= set(texts)
    first = drawn["transport"].findall(f"{SVG}polyline")[0].get("points", "").split()
    places = [float(point.split(",")[1]) for point in first]
    assert places[0] < places[1]  # twice plain redis-py is higher up than once


def test_the_command_writes_tables_figures_and_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contributor runs this command before and after a change."""
    monkeypatch.setattr("benchmarks.__main__.CASES", [SMALL])
    before = tmp_path / "before.json"
    what = [
        "transport",
        "--side",
        INLINE,
        "--side",
        "redis-py",
        "--rounds",
        "1",
        "--seconds",
        "0.05",
        "--budget",
        "16mb",
    ]
    assert main([*what, "--json", str(before), "--plots", str(tmp_path)]) == 0
    written = json.loads(before.read_text())
    assert set(written["transport"][0]["rounds"]) == {INLINE, PLAIN}
    assert written["environment"]["cores"]
    assert (tmp_path / "transport.svg").exists()
    assert written["environment"]["budget"] == "16 MiB"
    now = transport.Measured(SMALL, {INLINE: [took(1)], PLAIN: [took(2)]})
    last = compared([now], written).splitlines()[-1].split("|")
    assert [cell.strip() for cell in last[1:3]] == [SMALL.name, INLINE]
    assert last[4].strip() == "2.00x"
    assert "to plain redis-py" in capsys.readouterr().out


def test_anybody_may_measure_payloads_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims are judged by other shapes than those they were made with."""
    monkeypatch.setattr("benchmarks.fanout.TRAINERS", (2,))
    monkeypatch.setattr("benchmarks.__main__.MAKING", (2,))
    file = tmp_path / "own.json"
    how = [
        "--batch",
        "16",
        "--rounds",
        "1",
        "--seconds",
        "0.05",
        "--side",
        INLINE,
        "--budget",
        "8mb",
        "--json",
        str(file),
    ]
    assert main(["transport", "--payload", "float32:3,8,8", "--payload", "20kb", "--rows", *how]) == 0
    written, told = json.loads(file.read_text()), capsys.readouterr().out
    assert "### float32:3,8,8: 768 bytes a sample, batches of 16" in told
    assert [one["case"]["shape"] for one in written["transport"]] == [[3, 8, 8], [20480]]
    assert main(["trainers", "--payload", "float32:3,8,8", "--plots", str(tmp_path), *how]) == 0
    written = json.loads(file.read_text())
    assert {one["payload"] for one in written["trainers"]} == {"float32:3,8,8"}
    assert all(taken["rounds"][0]["got"] for one in written["trainers"] for taken in one["rounds"])
    assert (tmp_path / "trainers-float32-3-8-8.svg").exists()
    assert written["targets"] == []


@pytest.mark.parametrize("text", ["nothing", "float32:3,x", "object:3", "float32:0", "0", "strange:3", "float32:-1,-1"])
def test_a_payload_that_nothing_could_carry_is_refused_by_name(text: str) -> None:
    """Not by a trace, and not in the middle of a run."""
    with pytest.raises(SystemExit, match=text):
        main(["transport", "--payload", text])


def test_a_run_of_nothing_is_an_error() -> None:
    """A payload or a side that is misspelled would otherwise be an empty run that looks well."""
    with pytest.raises(SystemExit, match="151 kB"):
        main(["transport", "--size", "151 kB"])
    with pytest.raises(SystemExit, match="rabbit"):
        main(["transport", "--side", "rabbit"])


def test_a_batch_of_a_payload_of_ones_own_is_neither_a_sample_nor_the_whole_memory() -> None:
    """About as many bytes as those of 150 kB; rows as many as a training takes."""
    assert asked_for("4").batch == 1024
    assert asked_for("150kb").batch == 65
    assert asked_for("500mb").batch == 2
    assert asked_for("uint8:7", 3).batch == 3


def test_the_cost_of_a_further_trainer_is_what_several_cost_more_than_one() -> None:
    """A real epoch in segments, two trainers, both ways of acknowledging."""
    found = further.measure(2, 1, 0.04)
    assert set(found) == {(batch, every_s) for batch in further.BATCHES for every_s in further.PERIODS_S}
    assert all(-1 < cost < 20 for costs in found.values() for cost in costs)
    shown = further.shown(found, 2).splitlines()
    assert [line.split("|")[2].strip() for line in shown[2:4]] == ["each batch", "20 ms together"]
    assert not [*SHARED_MEMORY.glob(f"further-{os.getpid()}")]


def test_block_sizes_are_compared_with_the_naive_loop_on_both_kinds_of_server() -> None:
    """A stock server is what most people have, and no setting of ours reaches its allocator."""
    sides = blocks.sides(["1 MB"])
    found = transport.Measured(SMALL)
    transport.measure(found, sides, 1, 0.05, Allowance(600, [1]).piece(), lambda: None)
    assert found.failed == {}
    assert all(one.got == one.samples for (one,) in found.rounds.values())
    lines = blocks.shown(found, sides).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["Penstock's"] * 3 + ["stock"] * 3
    assert all("x" in line.split("|")[4] for line in lines[2:])
    assert blocks.block_costs(found, "stock") == ""  # a line needs all sizes


def test_the_cost_of_a_block_is_what_is_left_without_bytes() -> None:
    """It does not depend on the size of a block, so it decides about the rate of small ones."""
    found = transport.Measured(IMAGE)
    for name, size in blocks.SIZES.items():
        samples = 1000 * (count := max(1, size // IMAGE.sample_bytes))
        cpu_s = 1000 * (count * IMAGE.sample_bytes * 1e-9 + 200e-6)
        one = Round(1.0, samples, samples, 1, IMAGE.sample_bytes, cpu_s, 0.0, cpu_s)
        found.rounds[f"{INLINE}, {name} on stock"] = [one]
    assert "writer 200 µs, its reader 0 µs, its server 200 µs" in blocks.block_costs(found, "stock")


def test_the_first_gigabyte_is_compared_with_later_ones_and_with_new_pages_alone() -> None:
    """The kernel clears new memory, and the table says how much of the difference that is."""
    found = first_gigabyte.run_turns(samples=128, turns=3)
    assert INLINE in found
    assert all(turn.lost == 0 for turns in found.values() for turn in turns)
    pages = {side: first_gigabyte.new_pages_s(32 << 20, first_gigabyte.shared) for side in found}
    assert all(cost > 0 for cost in pages.values())
    lines = first_gigabyte.shown([found], [pages]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(found)

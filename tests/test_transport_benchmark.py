"""The benchmark of transports: its sums, and one tiny real round of those sides that need nothing installed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import targets, transport
from benchmarks.__main__ import compared, main
from benchmarks.cases import BY_BATCH, IMAGE, Case
from benchmarks.fanout import Fanned
from benchmarks.plots import plot
from benchmarks.rounds import Round, run_round
from benchmarks.sides import BASELINE, INLINE, OURS, PLAIN, SEGMENTS, here
from benchmarks.spread import ratios
from benchmarks.transports.protocol import Load, Turns

SMALL = Case("4 kB", (1024,), "float32", batch=64, room_bytes=8 << 20, most_bytes=4_000_000)
SIDES = (*here(OURS), BASELINE)


def took(seconds: float, got: int = 1000, cpu_s: float = 0.1) -> Round:
    """A round of images."""
    return Round(seconds, 1000, got, 1, IMAGE.sample_bytes, cpu_s, cpu_s, cpu_s)


def test_every_side_that_needs_no_download_carries_every_sample_in_a_real_round() -> None:
    """A benchmark that quietly moves less than it says is worse than none."""
    found = transport.measure(SMALL, SIDES, rounds=1, seconds=0.05)
    assert found.failed == {}
    for (one,) in found.rounds.values():
        assert one.got == one.samples
        assert one.samples % SMALL.batch == 0
        assert one.writer_cpu_s > 0
        assert one.reader_cpu_s > 0
        assert one.server_cpu_s > 0
    text = transport.shown(found, SIDES)
    assert {f"| {side.name} " in text for side in SIDES} == {True}


def test_rows_written_by_batch_reach_two_trainers_each() -> None:
    """Trainers of the broadcast are groups: everything to each of them, and counted so."""
    case = replace(BY_BATCH, room_bytes=8 << 20, most_bytes=3_000_000)
    found = run_round(OURS[0], case, 0.05, readers=2)
    assert found.got == 2 * found.samples
    assert found.lost == 0


def test_a_side_that_cannot_run_says_why_and_the_others_go_on() -> None:
    """A peer that is broken here must not cost the whole run."""
    broken = replace(BASELINE, name="broken", module="no_such_transport")
    found = transport.measure(SMALL, [broken, BASELINE], rounds=1, seconds=0.05)
    assert "No module named" in found.failed["broken"]
    assert list(found.rounds) == [PLAIN]
    assert "- broken: " in transport.shown(found, [broken, BASELINE])


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
    measured = [transport.Measured(case, {INLINE: ours, SEGMENTS: ours, PLAIN: theirs}) for case in sizes]
    fanned = Fanned(0.0, {(SEGMENTS, 8): [took(0.25)], (INLINE, 1): [took(1)]})
    found = {one.what: one for one in targets.targets(measured, [fanned], None)}
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


def test_a_plot_is_svg_with_a_line_for_each_side(tmp_path: Path) -> None:
    """It goes into the docs as it is."""
    path = tmp_path / "plot.svg"
    curves = {"Penstock <inline>": [(1e3, 1.0), (1e6, 2.0)], "other": [(1e3, 0.5)]}
    plot(path, "GB/s & more", "bytes", "GB/s", {1e3: "1 kB", 1e6: "1 MB"}, curves)
    root = ElementTree.fromstring(path.read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2
    assert "Penstock <inline>" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_command_writes_tables_figures_and_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a contributor runs before and after a change."""
    monkeypatch.setattr("benchmarks.__main__.CASES", [SMALL])
    before = tmp_path / "before.json"
    what = ["transport", "--side", INLINE, "--side", "redis-py", "--rounds", "1", "--seconds", "0.05"]
    assert main([*what, "--json", str(before), "--plots", str(tmp_path)]) == 0
    written = json.loads(before.read_text())
    assert set(written["transport"][0]["rounds"]) == {INLINE, PLAIN}
    assert written["environment"]["cores"]
    assert (tmp_path / "transport.svg").exists()
    now = transport.Measured(SMALL, {INLINE: [took(1)], PLAIN: [took(2)]})
    last = compared([now], written).splitlines()[-1].split("|")
    assert [cell.strip() for cell in last[1:3]] == [SMALL.name, INLINE]
    assert last[4].strip() == "2.00x"
    assert "to plain redis-py" in capsys.readouterr().out

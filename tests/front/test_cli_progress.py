"""A production shows its rates, bytes, remaining samples, workers, bad samples and waits for space."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys

import pytest

from penstock.cli.console import Console
from penstock.cli.production import ProductionView, duration
from penstock_common.waiting import to_stderr
from penstock_producer.jobs.progress import EpochProgress, ProductionProgress


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


class FailingTerminal(Terminal):
    """A terminal that is closed, or whose user presses Ctrl-C, when the first drawing has hidden the cursor."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._errors = [error]

    def flush(self) -> None:
        """Raise the error, once, at its time."""
        if self._errors and self.getvalue().endswith("\x1b[?25l"):
            raise self._errors.pop()


def looks(seconds: int) -> ProductionProgress:
    """Return two epochs of 1,000 samples of 2 KiB, at 100 samples a second, with one in fifty bad."""
    done = min(seconds * 100, 2000)
    first, second = min(done, 1000), max(0, done - 1000)
    epochs = [
        EpochProgress(number, "produced" if made == 1000 else "sized", 1000, made, made // 50, 2048.0)
        for number, made in enumerate((first, second))
        if made
    ]
    return ProductionProgress(tuple(epochs), 2000, workers=3, waiting=1 if seconds > 15 else 0)


@pytest.mark.parametrize("screen", [io.StringIO, Terminal], ids=["log", "terminal"])
def test_a_production_shows_all_that_one_wants_to_know(screen: type[io.StringIO]) -> None:
    """Users decide from it to add workers, or to leave it alone over night: how fast, how long, how well."""
    now, err = [0.0], screen()
    console = Console(io.StringIO(), err)
    with console.progress(every_s=5, clock=lambda: now[0]) as shown:
        view = ProductionView(console, shown, clock=lambda: now[0])
        for second in range(21):
            now[0] = float(second)
            view.update(looks(second))
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err.getvalue()).splitlines()
    half = next(line for line in lines if "500/1,000" in line)
    for part in ("epoch 0", " 50%", "100/s", "980 KiB", "0:05 left", "10 bad"):
        assert part in half, (part, half)
    assert ("━" in half) == (screen is Terminal)
    fleet = next(line for line in reversed(lines) if "workers" in line)
    for part in ("workers", "3", "1 waits for space", "40 bad", "196 KiB/s"):
        assert part in fleet, (part, fleet)
    assert any(re.search(r"0:1[56] left in all", line) for line in lines)
    ends = [line for line in lines if "1,000/1,000" in line]
    assert [line.split()[1] for line in ends] == ["0", "1"]  # each once, however long the production runs


def test_bad_samples_beyond_the_named_ones_are_told_with_their_command() -> None:
    """Five of hundreds were named, and no line said that there are more."""
    err = io.StringIO()
    console = Console(io.StringIO(), err)
    with console.progress() as shown:
        look = ProductionProgress((), None, new_bad=("a.png: truncated",), more_bad="penstock bad list train")
        ProductionView(console, shown).update(look)
    lines = [line for line in err.getvalue().splitlines() if "bad sample" in line]
    assert lines == ["bad sample: a.png: truncated", "more bad samples: `penstock bad list train`"]


def test_only_what_is_awaited_is_called_a_wait() -> None:
    """Nothing waits for the spec that a worker took from its first sample."""
    err = io.StringIO()
    console = Console(io.StringIO(), err)
    with console.progress() as shown:
        view = ProductionView(console, shown)
        view.update(ProductionProgress((), None, waits="its own workers are starting"))
        view.update(ProductionProgress((), None, waits="the spec of 'train' is taken", is_wait=False))
    lines = [line for line in err.getvalue().splitlines() if "workers are" in line or "the spec" in line]
    assert lines == ["waiting: its own workers are starting", "the spec of 'train' is taken"]


def test_programs_are_told_in_json_lines() -> None:
    """A job's dashboard reads the same numbers, and stdout has only the result."""
    now, out, err = [0.0], io.StringIO(), io.StringIO()
    console = Console(out, err)
    with console.progress(clock=lambda: now[0]) as shown:
        view = ProductionView(console, shown, as_json=True, clock=lambda: now[0])
        for second in range(17):
            now[0] = float(second)
            view.update(looks(second))
    told = [json.loads(line)["progress"] for line in err.getvalue().splitlines()]
    assert len(told) == 3
    assert out.getvalue() == ""
    last = told[-1]
    assert (last["samples_per_s"], last["workers"], last["waiting_for_room"], last["left_s"]) == (100.0, 3, 0, 5.0)
    assert last["epochs"][1] == {
        "epoch": 1, "state": "sized", "samples": 1000, "done": 500, "bad": 10, "nbytes": 490 * 2048
    }  # fmt: skip


def test_a_production_that_stands_still_promises_no_end() -> None:
    """A rate of zero must not be a divisor."""
    now, err = [0.0], io.StringIO()
    console = Console(io.StringIO(), err)
    with console.progress(every_s=5, clock=lambda: now[0]) as shown:
        view = ProductionView(console, shown, clock=lambda: now[0])
        for second in range(60):
            now[0] = float(second)
            view.update(looks(min(second, 5)))
    assert "left" not in err.getvalue().splitlines()[-1]
    assert [duration(s) for s in (7, 725, 10_800)] == ["0:07", "12:05", "3:00:00"]


def test_an_epoch_that_waited_for_its_turn_shows_the_rate_at_which_it_is_made() -> None:
    """With --ahead it is opened long before its first sample, and showed half of its rate."""
    now, err = [0.0], io.StringIO()
    console = Console(io.StringIO(), err)
    with console.progress(every_s=5, clock=lambda: now[0]) as shown:
        view = ProductionView(console, shown, clock=lambda: now[0])
        for second in range(21):
            now[0] = float(second)
            made = max(0, second - 10) * 100
            state = "produced" if made == 1000 else "sized"
            view.update(ProductionProgress((EpochProgress(0, state, 1000, made, 0, 2048.0),), 1000, workers=1))
    lines = [line for line in err.getvalue().splitlines() if "epoch 0" in line]
    assert "100/s" in next(line for line in lines if "500/1,000" in line), lines
    assert "100/s" in lines[-1], lines


@pytest.mark.parametrize("as_json", [False, True])
def test_no_time_is_promised_while_writers_wait_for_space(as_json: bool) -> None:
    """The time grew from seconds to minutes while trainers held the production up."""
    now, err = [0.0], io.StringIO()
    console = Console(io.StringIO(), err)
    with console.progress(every_s=5, clock=lambda: now[0]) as shown:
        view = ProductionView(console, shown, as_json=as_json, clock=lambda: now[0])
        for second in range(12):
            now[0] = float(second)
            made = looks(min(second, 6))
            view.update(ProductionProgress(made.epochs, 2000, workers=3, waiting=3 if second > 6 else 0))
    lines = err.getvalue().splitlines()
    if as_json:
        assert [json.loads(line)["progress"]["left_s"] for line in lines] == [15.0, None]
        return
    flowing, held_up = lines[1], lines[-2:]
    assert re.search(r"0:1[56] left in all", flowing), lines
    assert "3 wait for space" in held_up[1]
    assert not [line for line in held_up if "left" in line], lines


def test_no_line_of_a_command_carries_out_what_others_wrote() -> None:
    """Names and reasons come from the server, and neither a title sequence nor half a character may reach the
    screen.
    """
    out, err = Terminal(), Terminal()
    console = Console(out, err)
    console.line(("bold", "bold"), " \x1b]0;owned\x07\x9b2J\ud800\x1b[31mred")
    console.notice("\x1b[2Jnotice")
    console.table([["a\nb", 1]], head=["\x1b[2J", "n"])
    console.json({"name": "\x1b\x9b\ud800é"})
    shown = console.progress()
    with shown:
        shown.add("label").update(1, note="\x1b[2Jnote")
    text = out.getvalue()
    assert text.startswith("\x1b[1mbold\x1b[0m \\x1b]0;owned\\x07\\x9b2J\\ud800\\x1b[31mred\n")
    assert "\\x1b[2J" in text
    assert "\x1b[2J" not in text
    assert "a\\nb     1\n{" in text
    assert json.loads(text[text.index("{") :]) == {"name": "\x1b\x9b\ud800é"}
    assert err.getvalue().startswith("\\x1b[2Jnotice\n")
    assert "  \\x1b[2Jnote" in err.getvalue()


def test_a_notice_of_a_library_is_one_printable_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Loaders and writers print on stderr about groups, members and servers, whose names others chose."""
    to_stderr("group \x1b[31mred\nWARNING: none")
    assert capsys.readouterr().err == "penstock: group \\x1b[31mred\\nWARNING: none\n"


def test_a_notice_to_a_reader_that_is_gone_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train.py 2>&1 | tee log`, whose tee was killed: threads that renew leases print notices, too."""
    near, far = os.pipe()
    with os.fdopen(far, "w", closefd=False) as stream:
        os.close(near)
        monkeypatch.setattr(sys, "stderr", stream)
        to_stderr("the server does not answer")
        with pytest.raises(BrokenPipeError):
            stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), far)
    os.close(far)


def test_a_notice_without_a_stderr_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has None for a stream that was closed before the start, as some init systems do."""
    monkeypatch.setattr(sys, "stderr", None)
    to_stderr("the server does not answer")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "closed")], ids=["ctrl-c", "closed"])
def test_what_ends_a_drawing_that_begins_ends_the_command(error: BaseException) -> None:
    """The drawing hides the cursor first. The error must stay what it is, and the cursor must come back."""
    err = FailingTerminal(error)
    with pytest.raises(type(error)) as raised, Console(io.StringIO(), err).progress() as shown:
        shown.add("epoch 0", 100, "samples")
    assert raised.value is error
    assert "0/100 samples" in err.getvalue()
    assert err.getvalue().rfind("\x1b[?25h") > err.getvalue().rfind("\x1b[?25l")

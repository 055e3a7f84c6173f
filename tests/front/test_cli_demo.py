"""`penstock demo`: its options, its refusals, and the outcomes that it calls failures."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from penstock.__main__ import main
from penstock.cli.console import Console
from penstock.demo.command import DemoResult, as_json, failures, report
from penstock.demo.script import DemoOptions, DemoOutcome, NumpyModel, TrainerProcess, TrainerTask, augment, plain
from penstock_common.stream.audit.accounts import AuditReport, EpochAudit, GroupAudit


def trained(name: str, accuracy: float = 0.97) -> TrainerProcess:
    """Return a trainer that has finished."""
    task = TrainerTask(url="", model=name, epochs=1, train="train", held_out="held-out")
    numbers = {"accuracy": accuracy, "rate": 500.0, "waited": 0.25}
    return TrainerProcess(task, print, results={"trained": numbers, "compared": {"rate": 200.0, "waited": 0.9}})


@pytest.fixture
def result() -> DemoResult:
    """Return a successful demo."""
    groups = {"convnet": GroupAudit(delivered=80), "dense": GroupAudit(delivered=80)}
    outcome = DemoOutcome(80, 20, 1, "keras", 80, 2.0, (11, 12), (trained("convnet"), trained("dense")))
    audit = AuditReport("digits", [EpochAudit(0, "produced", 80, produced=80, groups=groups)], "")
    return DemoResult(outcome, audit, "redis-cli -u redis://x XINFO GROUPS key", '1) 1) "name"', 60.0)


def test_a_good_outcome_is_told_with_every_number(result: DemoResult) -> None:
    """The output must have accuracy, speed, waiting, the comparison and the audit."""
    out = io.StringIO()
    assert failures(result.outcome, result.audit, needs_goal=True) == []
    report(result, [], Console(out=out, err=out))
    text = out.getvalue()
    for part in ("0.970", "500", "25%", "200", "90%", "lost 0, duplicate 0, pending 0", "redis-cli -u", "11, 12"):
        assert part in text


def test_a_low_accuracy_is_no_success(result: DemoResult) -> None:
    """A feed with wrong labels would show nowhere else."""
    worse = dataclasses.replace(result.outcome, trainers=(trained("convnet", 0.9), trained("dense")))
    assert "convnet" in failures(worse, result.audit, needs_goal=True)[0]
    assert failures(worse, result.audit, needs_goal=False) == []
    assert as_json(result._replace(outcome=worse), ["x"])["ok"] is False


def test_a_sample_that_was_not_delivered_is_no_success(result: DemoResult) -> None:
    """The audit decides the exit code."""
    result.audit.epochs[0].groups["dense"] = GroupAudit(delivered=79, pending=1)
    assert "79 of 80" in failures(result.outcome, result.audit, needs_goal=True)[0]


def test_the_goal_is_for_the_whole_demo_only() -> None:
    """A few digits cannot be learned that well."""
    options = DemoOptions(1797, 3, 2, None)
    assert options.needs_goal
    assert not dataclasses.replace(options, samples=300).needs_goal


def test_a_folder_that_holds_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo must not mix a user's files with its digits."""
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["demo", "--keep", str(tmp_path), "--trainer", "numpy"]) == 1
    assert "something is there already" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--samples", "5"], ["--epochs", "0"], ["--workers", "x"], ["--trainer", "jax"]])
def test_impossible_numbers_are_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They are reported before anything is started."""
    assert main(["demo", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback after a server had started and the images were made."""
    monkeypatch.setattr("penstock.demo.command.EmbeddedServer", None)
    (tmp_path / "file").touch()
    assert main(["demo", "--keep", str(tmp_path / "file" / "images"), "--trainer", "numpy"]) == 1
    told = f"penstock: --keep {tmp_path}/file/images: it cannot be written (Not a directory); name another folder\n"
    assert capsys.readouterr().err == told


def test_augmenting_keeps_form_and_label_and_follows_its_generator() -> None:
    """A retried job must make the same sample."""
    image = np.zeros((32, 32, 1), np.uint8)
    image[8:24, 14:18] = 255
    sample = {"x": image, "y": 1}
    made = [augment(sample, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert np.array_equal(made[0]["x"], made[1]["x"])
    assert not np.array_equal(made[0]["x"], made[2]["x"])
    for one in (*made, plain(sample)):
        assert (one["x"].shape, one["x"].dtype, one["y"]) == ((32, 32, 1), np.float32, 1)
        assert 0 <= one["x"].min() < one["x"].max() <= 1


def test_the_numpy_model_learns() -> None:
    """Without TensorFlow the demo still shows that the data arrived unchanged."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 640)
    images = rng.random((640, 32, 32, 1), dtype=np.float32) * 0.5
    images[np.arange(640), labels * 3, :, 0] += 1
    model = NumpyModel(64, steps=40, seed=0)
    batches: Any = ((images[i : i + 16], labels[i : i + 16]) for i in range(0, 640, 16))
    steps: list[int] = []
    model.train_on(cast("Any", batches), lambda: steps.append(1))
    assert len(steps) == 40
    assert model.accuracy(images, labels) > 0.9

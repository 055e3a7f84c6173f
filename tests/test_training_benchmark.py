"""The benchmark of trainings: one tiny real round of the way a GPU's batches go, on the CPU."""

from __future__ import annotations

import pytest

from benchmarks import training
from benchmarks.digits import SETTINGS
from benchmarks.residual import resnet
from benchmarks.training_sides import Lesson, run_round


def test_a_small_resnet_is_trained_from_the_stream_as_resnet_50_would_be_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user who has a GPU for an hour must not lose it to a typo."""
    monkeypatch.setenv(SETTINGS, "24 32 3 0")
    for feed, workers in (("penstock", 1), ("synthetic", 0)):
        found = run_round(Lesson(feed, workers, 1, 8, model="small resnet"))
        assert found.steps == 3
        assert 0 <= found.stalled <= 1
        assert 0 <= found.right <= 1
        assert all(seconds >= 0 for seconds in found.cpu_s.values())


def test_the_model_is_resnet_50() -> None:
    """A comparison with others' figures needs a model of their size: torchvision's, with ten classes."""
    assert sum(one.numel() for one in resnet().parameters()) == 23_528_522


def test_asking_for_a_gpu_where_there_is_none_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, not a traceback of four processes."""
    monkeypatch.setattr(training, "_has_gpu", lambda: False)
    monkeypatch.setattr("sys.argv", ["training", "--device", "cuda"])
    with pytest.raises(SystemExit):
        training.main()
    assert "torch sees no GPU here" in capsys.readouterr().err

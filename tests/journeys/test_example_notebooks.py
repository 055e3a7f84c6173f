"""The examples: each runs as a notebook in a fresh folder, and its cells are the scripts, so both are tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.notebooks import NOTEBOOKS, notebook
from tests.journeys.notebooks import EXAMPLES, printed_by

LINES = 80
"""The lines of a file that is short enough to copy. Most have 50."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"),
    [("keras/train", 0.94), ("pytorch/train", 0.94), ("jax/train", 0.94), ("ragged_text/train", 0.9)],
)
def test_the_examples_of_one_framework_reach_the_accuracy_they_are_copied_for(
    name: str, least: float, tmp_path: Path
) -> None:
    """Users copy an example before they read any page. JAX's uses two devices, and half of the lines are prose."""
    printed = printed_by(f"{name}.ipynb", tmp_path)
    assert float(re.findall(r"held.out.* ([\d.]+)$", printed, re.MULTILINE)[-1]) >= least


@pytest.mark.slow
def test_two_ranks_of_the_pytorch_example_take_equally_many_steps_and_learn_one_model(tmp_path: Path) -> None:
    """DistributedDataParallel waits for ever for a rank without a batch, and 1,437 digits do not divide by 32."""
    printed = printed_by("pytorch/ddp.ipynb", tmp_path)
    told = re.findall(r"rank (\d), epoch (\d+): (\d+) steps, accuracy ([\d.]+)", printed)
    ranks = [{epoch: rest for rank, epoch, *rest in told if rank == mine} for mine in "01"]
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) == 8
    assert {steps for steps, _ in ranks[0].values()} == {"45"}
    assert float(ranks[0]["7"][1]) >= 0.94


@pytest.mark.slow
def test_every_framework_reaches_the_same_accuracy_on_the_same_stream(tmp_path: Path) -> None:
    """This is Penstock's purpose: samples are made once, and four trainers of different kinds all do well."""
    printed = printed_by("frameworks/together.ipynb", tmp_path)
    accuracy = {name: float(value) for name, value in re.findall(r"(\w+): accuracy ([\d.]+)", printed)}
    assert accuracy.keys() == {"keras", "torch", "jax", "numpy"}
    assert min(accuracy.values()) >= 0.95
    assert max(accuracy.values()) - min(accuracy.values()) <= 0.03


@pytest.mark.slow
def test_a_training_killed_in_the_middle_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    """Checkpoints have this purpose: a crash costs the steps since the last one and changes nothing."""
    printed = printed_by("resume/crash.ipynb", tmp_path)
    killed = re.search(r"; step (\d+): loss [\d.]+; ended with -9", printed)
    went_on = re.search(r"goes on after step (\d+); first batch after ([\d.]+) s", printed)
    assert killed
    assert went_on
    assert (int(killed[1]) >= 250, float(went_on[2]) < 1) == (True, True)
    again = int(killed[1]) - int(went_on[1])
    assert f"the same losses, step for step: True; trained again: {again} steps" in printed
    assert "the same weights, bit for bit: True" in printed
    assert float(re.findall(r"held-out digits ([\d.]+)", printed)[-1]) >= 0.94


def test_a_notebook_holds_just_the_code_of_its_scripts() -> None:
    """Duplicated code would diverge. `python examples/notebooks.py` writes the notebooks again."""
    assert {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.ipynb")} == NOTEBOOKS.keys()
    assert [name for name in NOTEBOOKS if (EXAMPLES / name).read_text() != notebook(name)] == []


def test_the_examples_are_short_enough_to_copy_and_all_on_their_page() -> None:
    """A longer example is not read, and an unlisted one is not found."""
    page = (EXAMPLES / "README.md").read_text()
    for name, files in NOTEBOOKS.items():
        assert f"]({name})" in page, name
        for file in files:
            script = (EXAMPLES / name).parent / file
            text = script.read_text()
            assert len(text.splitlines()) <= LINES, script
            commands = re.findall("`((?:penstock|python) [^`]*)`", text.split('"""')[1])
            assert [command for command in commands if "NAME" not in command and f"`{command}`" not in page] == []

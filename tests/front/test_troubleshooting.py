"""The page on errors has every class of error, and the lines that it quotes are those that users see."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import penstock
from penstock_common import errors
from penstock_common.stream.manifest import EpochNumberTaken

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = dict(
    re.findall(
        r"^### (\w+)\n(.*?)(?=^##|\Z)", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE | re.DOTALL
    )
)
PACKAGES = ("common/penstock_common", "producer/penstock_producer", "consumer/penstock_consumer", "front/penstock")
GAP = "…"


def of(node: ast.AST) -> str:
    """Return the text of a string in the code, with gaps for inserted values, or '' for other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(of(part) or GAP for part in node.values) if isinstance(node, ast.JoinedStr) else ""


@cache
def texts() -> str:
    """Return every string of the packages, one a line."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = (of(node) for path in files for node in ast.walk(ast.parse(path.read_text())))
    return "\n".join(" ".join(text.split()) for text in found if len(text) > 7)


def test_the_page_has_every_class_of_error_and_no_other() -> None:
    """A user who searches for the name in a traceback must find it."""
    classes = {name for name, kind in vars(errors).items() if inspect.isclass(kind)}
    assert set(SECTIONS) == classes


def test_a_program_catches_what_the_page_names() -> None:
    """A trainer that must tell a lost server from a wrong name need not import an internal module."""
    assert set(penstock.errors.__all__) <= set(SECTIONS)
    for name in penstock.errors.__all__:
        assert getattr(penstock.errors, name) is getattr(errors, name)
    with pytest.raises(penstock.errors.ServerUnavailable):
        penstock.Loader(
            "train", group="resnet", batch_size=4, url="redis://127.0.0.1:1", tuning=penstock.Tuning(timeout_s=0.1)
        )


@pytest.mark.parametrize("name", SECTIONS)
def test_a_line_that_is_quoted_is_one_that_is_said(name: str) -> None:
    """A user who searches for the words of a message must find them, so a reworded message is reworded there."""
    for quoted in re.findall(r"^> (.*)$", SECTIONS[name], re.MULTILINE):
        for part in quoted.split(GAP):
            if len(words := part.strip(" ;:,.()?")) > 7:
                assert words in texts(), f"nothing says {words!r}"


def test_the_page_names_the_conflict_of_an_epochs_number() -> None:
    """A traceback names a class that `penstock.errors` has not."""
    assert issubclass(EpochNumberTaken, errors.StreamConflict)
    assert f"`{EpochNumberTaken.__name__}`" in SECTIONS["StreamConflict"]


def test_what_the_page_advises_to_type_exists() -> None:
    """Advice that ends in `unknown command` is worse than none."""
    from penstock.cli.completion import completion_points

    typed = re.findall(r"`penstock ([a-z]+)(?: ([a-z]+))?", "\n".join(SECTIONS.values()))
    assert len(typed) > 20
    known = completion_points()
    for command, action in typed:
        assert command in known["penstock"].words
        actions = known[f"penstock {command}"].words
        assert not actions or not action or action in actions, f"penstock {command} {action}"

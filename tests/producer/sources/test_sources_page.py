"""The page on sources as its readers use it: its class is a source, its commands are understood."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import Parser
from penstock.cli.sources import add_sources, plans_of
from penstock_producer.planning.order import EpochOrder
from penstock_producer.sources import installed
from penstock_producer.sources.config import InstalledConfig, parse_config
from penstock_producer.sources.open import open_source
from penstock_producer.sources.protocol import Source
from tests.contracts.source import SourceContract
from tests.producer.sources.conftest import UserModule

PAGE = (Path(__file__).parents[3] / "docs" / "sources.md").read_text()
(CLASS,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("penstock produce ")
]


class TestTheClassOfThePage(SourceContract):
    """Whoever copies it has a source that keeps every promise, and can be balanced and split."""

    @pytest.fixture
    def config(self, user_module: UserModule, monkeypatch: pytest.MonkeyPatch) -> InstalledConfig:
        """What a job would carry."""
        name = user_module(CLASS)

        def points(group: str) -> list[EntryPoint]:
            return [EntryPoint("waves", f"{name}:Waves", group)]

        monkeypatch.syspath_prepend(".")
        monkeypatch.setattr(installed, "entry_points", points)
        return InstalledConfig(name="waves", options={"count": 30})

    @pytest.fixture
    def source(self, config: InstalledConfig) -> Source:
        """Opened here."""
        source = open_source(config)
        assert source.unit == "sample"
        return source

    def test_it_can_be_chosen_from(self, config: InstalledConfig) -> None:
        """The options of the page's command."""
        split: Any = parse_config(
            {"kind": "split", "source": config.model_dump(), "parts": [["a", 0.5], ["b", 0.5]], "part": "b"}
        )
        balanced: Any = open_source(parse_config({"kind": "balanced", "source": split.model_dump(), "samples": 9}))
        order = EpochOrder(balanced, seed=0, epoch=0, shuffle=True, shard_samples=9)
        labels = [int(balanced.read(int(item), np.random.default_rng(0))["y"]) for item in order.items(0)]
        assert sorted(labels) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[2])
def test_every_command_of_the_page_is_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page whose commands are refused is worse than none."""
    monkeypatch.chdir(tmp_path)
    for name in ("images-0.npy", "labels.npy", "data.npz"):
        (tmp_path / name).touch()
    parser = Parser(prog="penstock produce")
    add_sources(parser, Parser)
    plans = plans_of(parser.parse_args(shlex.split(command)[2:]))
    assert len(plans) == 1


def test_the_page_shows_every_kind() -> None:
    """A source that is not on it is not found."""
    assert len(COMMANDS) >= 8
    parser = Parser(prog="penstock produce")
    add_sources(parser, Parser)
    (kinds,) = (action.choices for action in parser._actions if action.dest == "kind")
    assert kinds is not None
    assert [kind for kind in kinds if f"| `{kind} " not in PAGE] == []

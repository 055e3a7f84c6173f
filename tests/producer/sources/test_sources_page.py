"""The pages on sources as their readers use them: the class is a source, the commands are understood."""

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
from penstock_producer.jobs.plan import EpochOrder
from penstock_producer.sources import installed
from penstock_producer.sources.config import InstalledConfig, SourceConfig, parse_config
from penstock_producer.sources.open import open_source
from penstock_producer.sources.protocol import Source
from tests.contracts.iterable import IterableContract
from tests.contracts.source import SourceContract
from tests.producer.sources.conftest import UserModule
from tests.producer.test_jobs import produce

DOCS = Path(__file__).parents[3] / "docs"
NAMES = ("sources", "python-sources", "choosing-samples", "own-source")
PAGE = "\n".join((DOCS / f"{name}.md").read_text() for name in NAMES)
(CLASS,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("penstock produce ")
]


class TestTheClassOfThePage(SourceContract):
    """A user who copies it has a source that keeps every promise, and can be balanced and split."""

    @pytest.fixture
    def config(self, user_module: UserModule, monkeypatch: pytest.MonkeyPatch) -> InstalledConfig:
        """Return what a job would carry."""
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


FEED = """
from penstock_common.errors import SampleError, SourceError

class Feed:
    unit, repeatable, batched = "item", False, False
    spec = {"x": ("int64", (2,))}
    def __init__(self, count, breaks_at=None):
        self.count, self.breaks_at = count, breaks_at
        self.fingerprint, self.info = f"{count:016x}", {"source": "feed"}
    def __iter__(self):
        if not self.count:
            raise SourceError("feed gave no items")
        for number in range(self.count):
            if number == self.breaks_at:
                raise SourceError(f"feed failed at item {number}: ZeroDivisionError: division by zero")
            yield number
    def make(self, item, position, rng):
        if not isinstance(item, int):
            raise SampleError(f"{self.key(position)}: {type(item).__name__}, expected a number")
        return {"x": [item, rng.integers(9)]}
    def key(self, position):
        return f"feed[{position}]"
    def close(self):
        pass
"""


class TestAnIterableOfOnesOwn(IterableContract):
    """A class by the protocol that the page names, with a spec of its own."""

    @pytest.fixture
    def config(self, user_module: UserModule, monkeypatch: pytest.MonkeyPatch) -> InstalledConfig:
        """Return what a job would carry."""
        points = [EntryPoint("feed", f"{user_module(FEED)}:Feed", installed.GROUP)]
        monkeypatch.syspath_prepend(".")
        monkeypatch.setattr(installed, "entry_points", lambda group: points)
        return InstalledConfig(name="feed", options={"count": 9})

    def others(self, config: Any) -> list[SourceConfig]:
        """Its option is its own affair."""
        return [config.model_copy(update={"options": {"count": count}}) for count in (2, 3)]

    @pytest.fixture
    def failing(self, config: InstalledConfig) -> InstalledConfig:
        """One that raises."""
        return config.model_copy(update={"options": {"count": 9, "breaks_at": 1}})

    @pytest.fixture
    def empty(self, config: InstalledConfig) -> InstalledConfig:
        """One without items."""
        return config.model_copy(update={"options": {"count": 0}})


DEAF = """
from penstock_common.errors import SampleError
class Deaf(Waves):
    def read(self, index, rng):
        if index == 3:
            raise SampleError("no such wave")
        return super().read(index, rng)
"""


@pytest.mark.parametrize(("kind", "name"), [("installed", "waves[3]"), ("weighted", "0/waves[3]")])
def test_a_sample_error_without_the_samples_name_gets_it(
    any_url: str, user_module: UserModule, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    """The page shows how to raise it, and the list of bad samples said "no such wave" of no sample."""
    points = [EntryPoint("deaf", f"{user_module(CLASS + DEAF)}:Deaf", installed.GROUP)]
    monkeypatch.syspath_prepend(".")
    monkeypatch.setattr(installed, "entry_points", lambda group: points)
    source: dict[str, Any] = {"kind": "installed", "name": "deaf", "options": {"count": 9}}
    if kind == "weighted":
        source = {"kind": "weighted", "parts": [{"source": source}]}
    told = list[str]()
    produce(any_url, parse_config(source), each=lambda look: told.extend(look.new_bad))
    assert told == [f"{name}: no such wave"]


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

"""The documents' claims about the code: defaults have the values told, and every test, file and name told exists.

What the documents promise is tested where the promises are kept; snippets of the README run in test_readme.py.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import runpy
import shlex
import stat
import subprocess
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

import penstock
from docs import file_list
from docs.img import figures
from docs.promises import anchor, docstrings, headings, link, promises, with_tables
from penstock.cli import parser_of
from penstock_common.server.connection import _FILES_OF_TLS as FILES_OF_TLS
from penstock_common.server.connection import MEMORY_OPTION, check_url
from penstock_common.server.pool import CHECKS_NAME
from penstock_common.server.sentinel import _OWN_LOGIN as SENTINEL_LOGIN
from penstock_common.settings import _BY_FILE as BY_FILE
from penstock_common.settings import Settings
from penstock_common.tuning import FIELDS, LEASE_S, PREFETCH_BYTES
from penstock_common.waiting import to_stderr
from penstock_producer.jobs.watchdog import SAMPLE_LIMIT_S
from penstock_producer.sources.transform import BLOCK_SAMPLES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
UNITS = {
    "GiB": 1 << 30, "MiB": 1 << 20, "MB": 1_000_000, "kB": 1000, "s": 1, "ms": 1,
}  # fmt: skip
INTERNALS = sorted((DOCS / "internals").glob("*.md"))
MECHANISMS = [page for page in INTERNALS if page.name.startswith("mechanisms-")]
WRITTEN_BY_HAND = ("guarantees.md", "defaults.md", *(f"internals/{page.name}" for page in INTERNALS))
"""Pages whose `paths/like/this.py` are checked; CONTRIBUTING shortens them on purpose."""


def rows(page: str, columns: int) -> Iterator[list[str]]:
    """Yield the cells of each table row with ``columns`` columns, without heads and rules."""
    lines = (DOCS / page).read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == columns and not set(line) <= set("|- ") and above.startswith("|"):
            yield cells


def parsed(text: str) -> Any:
    """``1 GiB``, ``30 s``, ``0.75``, ``"budget"``, ``None`` as a value."""
    number, _, unit = text.strip('"').partition(" ")
    return ast.literal_eval(number) * UNITS[unit] if unit in UNITS else ast.literal_eval(text)


# --- defaults ---------------------------------------------------------------------------------------------------------

CONSTANTS = {cells[2].strip("`"): cells[1] for cells in rows("internals/constants.md", 4)}


def assigned_in(file: Path) -> set[str]:
    """Return the names that a module assigns itself."""
    return {
        node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name) and
        isinstance(node.ctx, ast.Store)
    }  # fmt: skip


@pytest.mark.parametrize("where", [where for where in CONSTANTS if not where.startswith("stream:")])
def test_a_default_is_what_the_page_says(where: str) -> None:
    """A user sizes memory by this page."""
    module, _, name = where.partition(":")
    there = importlib.import_module(module)
    assert getattr(there, name) == parsed(CONSTANTS[where])
    assert name in assigned_in(Path(str(there.__file__)))  # a module that only imports it sends a reader astray
    if CONSTANTS[where].endswith("s"):  # the page's unit is the constant's
        assert name.endswith("_MS" if CONSTANTS[where].endswith(" ms") else "_S")


def test_a_stream_made_without_a_word_has_the_defaults_of_the_page(any_url: str) -> None:
    """A stream follows its stored settings, whatever the constants say."""
    with penstock.Writer("plain", url=any_url) as writer:
        stream = writer.stream
    assert len(stream.partitions) == parsed(CONSTANTS["stream:partitions"])
    assert stream.retention == parsed(CONSTANTS["stream:retention"])
    assert stream.durability == parsed(CONSTANTS["stream:durability"])
    assert stream.budget_bytes == parsed(CONSTANTS["penstock_common.stream.streams:DEFAULT_BUDGET_BYTES"])
    assert stream.block_bytes == parsed(CONSTANTS["penstock_common.stream.streams:DEFAULT_BLOCK_BYTES"])


SETTINGS = {
    "Server of the streams": "penstock_common.settings:DEFAULT_URL",
    "Budget": "penstock_common.stream.streams:DEFAULT_BUDGET_BYTES",
    "Block": "penstock_common.stream.streams:DEFAULT_BLOCK_BYTES",
    "Partitions": "stream:partitions",
    "Retention": "stream:retention",
    "Durability": "stream:durability",
    "Payload": "stream:payload",
    "Prefetch": "penstock_common.tuning:PREFETCH_BYTES",
    "Lease": "penstock_common.tuning:LEASE_S",
    "Wait for a stream that never appears": "penstock_consumer.read.loader:STARTUP_S",
    "Patience with a server that is away": "penstock_common.waiting:OUTAGE_S",
    "Bad samples that fail an epoch": "penstock_producer.jobs.fill:MAX_BAD",
    "Time for one sample": "penstock_producer.jobs.watchdog:SAMPLE_LIMIT_S",
    "Share of the machine's memory for its workers": "penstock_producer.jobs.watchdog:MEMORY_SHARE",
    "Samples that a block transform receives at once": "penstock_producer.sources.transform:BLOCK_SAMPLES",
    "Samples in a shard of a planned epoch, at most": "penstock_producer.jobs.plan:LARGEST_DEFAULT",
    "Samples on a contact sheet": "penstock.cli.show:COUNT",
    "Samples that `penstock stat` draws": "penstock.cli.stat:SAMPLES",
}
"""The setting of the users' page, and the constant of the internals page that holds its default."""


def test_a_setting_of_the_users_page_has_the_value_of_its_constant() -> None:
    """The two pages agree, and the constants' page is compared with the code."""
    told = {cells[0].partition(":")[0]: cells[1] for cells in rows("defaults.md", 3)}
    assert {name: told[name] for name in SETTINGS} == {name: CONSTANTS[where] for name, where in SETTINGS.items()}


def code_in(cell: str) -> list[str]:
    """Return the words that a cell sets in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def test_every_variable_of_the_environment_is_on_the_page() -> None:
    """A variable that no page names is found by reading code only, and one that nothing reads has no effect."""
    told = [name for cells in rows("defaults.md", 4) for name in code_in(cells[0]) if name.isupper()]
    read = {each.metadata["variable"] for each in Settings.__dataclass_fields__.values()}
    assert sorted(told) == sorted(read | {f"{name}_FILE" for name in BY_FILE})


def test_every_option_of_an_address_on_the_page_is_taken() -> None:
    """An option that is refused keeps a program from its server."""
    told = {
        code_in(cells[0])[0]: code_in(cells[1])
        for cells in rows("defaults.md", 4)
        if re.fullmatch("`[a-z_]+`", cells[0])
    }
    assert set(told) == {"db", MEMORY_OPTION, CHECKS_NAME, *FILES_OF_TLS, *SENTINEL_LOGIN}
    for option, schemes in told.items():
        for scheme in schemes:
            path = {"unix": "/socket"}.get(scheme, "host:6379/service" if "sentinel" in scheme else "host:6379")
            check_url(f"{scheme}://{path}?{option}=1")
            with pytest.raises(penstock.errors.ServerUnavailable):
                check_url(f"{scheme}://{path}?{option}s=1")


def argument_tables() -> dict[str, dict[str, str]]:
    """Callable -> argument -> default as written ('' where the page says 'as above')."""
    tables: dict[str, dict[str, str]] = {}
    for line in (DOCS / "defaults.md").read_text().splitlines():
        if head := re.match(r"\| `(?:penstock\.)?(\w+)\(\.\.\.\)` \|", line):
            table = tables.setdefault(head[1], {})
        elif line.startswith("| `") and line.count("|") == 4:
            first, default, _ = (cell.strip() for cell in line.strip("|").split("|"))
            names = re.findall(r"`(\w+)`", first)
            values = default.split(", ") if default.count(", ") == len(names) - 1 else [default] * len(names)
            table |= dict(zip(names, values, strict=True))
    return tables


TUNING: Mapping[str, Mapping[str, Any]] = {
    "Loader": {
        "create": True, "prefetch_bytes": PREFETCH_BYTES, "lease_s": LEASE_S, "views": False, "notify": to_stderr,
        "acknowledge_every_s": 0.0,
    },
    "Replay": {"prefetch_bytes": PREFETCH_BYTES, "lease_s": LEASE_S, "views": False, "notify": to_stderr},
    "Files": {"prefetch_bytes": PREFETCH_BYTES, "views": False, "notify": to_stderr},
    "Writer": {"checksum": True, "notify": to_stderr},
    "produce": {
        "shuffle": True, "seed": 0, "block_samples": BLOCK_SAMPLES, "on_error": "quarantine",
        "sample_limit_s": SAMPLE_LIMIT_S, "notify": to_stderr,
    },
}  # fmt: skip
"""The values that stand for None in the fields of a Tuning."""


@pytest.mark.parametrize("name", ["Writer", "Loader", "Replay", "Files", "produce", "EmbeddedServer"])
def test_every_argument_with_a_default_is_on_the_page(name: str) -> None:
    """A default that stands in a signature alone is found by reading code only."""
    found = {
        argument.name: argument.default
        for argument in inspect.signature(getattr(penstock, name)).parameters.values()
        if argument.default is not argument.empty
    }
    found |= {**dict.fromkeys(FIELDS.get(name, ())), **TUNING.get(name, {})}
    table = argument_tables()[name]
    assert set(table) == set(found)
    for argument, text in table.items():
        if text.startswith("`"):
            assert found[argument].__name__ == text.strip("`")
        elif text:
            value = dict(found[argument]) if text == "{}" else found[argument]
            assert value == parsed(text), argument


# --- length -----------------------------------------------------------------------------------------------------------

MOST_WORDS = 1200


def reference_pages() -> set[str]:
    """Return the pages that the menu "Reference" of the landing page lists. A reader looks things up there."""
    [menu] = re.findall(r":caption: Reference\n\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    return set(menu.split())


def test_a_page_is_read_in_minutes() -> None:
    """A longer page is two pages. Words are those of `wc -w` outside of blocks of code."""
    reference, internals = reference_pages(), {f"internals/{page.stem}" for page in INTERNALS}
    assert len(reference) > 10
    words = {
        page.relative_to(DOCS).with_suffix("").as_posix(): len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split())
        for page in DOCS.rglob("*.md")
        if (text := page.read_text())
    }
    assert [page for page, count in words.items() if count > MOST_WORDS and page not in reference | internals] == []


# --- what is named exists ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", INTERNALS, ids=lambda page: page.stem)
def test_every_test_that_an_internals_page_names_exists(page: Path) -> None:
    """A guarantee is worth its test."""
    named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", page.read_text())
    assert [f"{path}::{test}" for path, test in named if test not in docstrings(path)] == []


def test_every_promise_has_tests_that_exist_and_say_what_they_show() -> None:
    """A promise is worth its tests. One without a test belongs to the section "Not yet"."""
    assert [each.name for each in promises() if not each.tests] == []
    named = [test.partition("::") for each in promises() for test in each.tests]
    assert [f"{path}::{test}" for path, _, test in named if not docstrings(path).get(test)] == []


PAGES_AND_TOOLS = {"test_kubernetes_page.py", "test_redis_cli.py", "test_torn.py"}
"""Journeys that hold what a page says, or test a tool of other tests."""


def test_every_journey_proves_a_promise_or_is_named_by_a_page() -> None:
    """A journey takes long. If no list has it, no reader knows what would be lost without it."""
    texts = [path.read_text() for path in [*DOCS.rglob("*.md"), *DOCS.rglob("*.toml"), *ROOT.glob("*.md")]]
    named = {name for text in texts for name in re.findall(r"tests/journeys/(test_\w+\.py)", text)}
    assert {path.name for path in (ROOT / "tests" / "journeys").glob("test_*.py")} - named == PAGES_AND_TOOLS


def test_the_tables_of_the_promises_are_those_of_their_list() -> None:
    """The next run of the script overwrites a table that was changed without it."""
    page = (DOCS / "internals" / "promises.md").read_text()
    assert with_tables(page) == page, "run python docs/promises.py"


def test_the_guarantees_have_the_words_and_the_mechanisms_of_the_promises() -> None:
    """A promise in two wordings is two promises."""
    linked = re.findall(r"^\| \[(.+?)\.\]\(internals/(.+?)\)", (DOCS / "guarantees.md").read_text(), re.MULTILINE)
    names = {each.name for each in promises()}
    assert len(linked) > 10
    assert [name for name, _ in linked if name not in names] == []
    assert linked == [(name, link(name)) for name, _ in linked]


def test_every_promise_names_the_tests_that_kill_mutants_of_its_code() -> None:
    """Without such a test, a fault may break a promise unnoticed."""
    promised = re.findall(r"^\| \[(.+?)\]\(internals/mechanisms-", (DOCS / "guarantees.md").read_text(), re.MULTILINE)
    table = {promise: tests for promise, tests in rows("internals/mutants.md", 2) if promise != "promise"}
    assert len(promised) > 10
    assert list(table) == promised
    assert [promise for promise, tests in table.items() if "`tests/" not in tests and tests != "not mutated"] == []


def test_every_row_on_who_can_reach_what_names_tests_that_exist() -> None:
    """Readers believe that a stranger cannot do a thing if a test shows it. The page begins with the table."""
    title, table = (ROOT / "SECURITY.md").read_text().split("\n## ")[:2]
    assert title == "# Security\n"
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 5
    named = [re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", row.rsplit("|", 2)[1]) for row in rows]
    assert [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    assert [test for tests in named for test in tests if test[1] not in docstrings(test[0])] == []


@pytest.mark.parametrize("page", MECHANISMS, ids=lambda page: page.stem)
def test_the_contents_of_a_mechanisms_page_are_its_headings_in_order(page: Path) -> None:
    """A reader looks for a promise in the contents first, so each heading is there."""
    links = re.findall(r"^- \[(.+)\]\(#(.+)\)$", page.read_text(), re.MULTILINE)
    assert links == [(heading, anchor(heading)) for heading in headings(page)]


def test_the_promises_are_the_headings_of_the_mechanisms_in_order() -> None:
    """Each promise leads to the mechanism that keeps it, and no mechanism is without its promise."""
    names = [each.name for each in promises()]
    pages = [DOCS / "internals" / page for page in dict.fromkeys(link(name).partition("#")[0] for name in names)]
    assert sorted(pages) == MECHANISMS
    assert names == [heading for page in pages for heading in headings(page)]


@pytest.mark.parametrize(
    "page",
    [
        DOCS / "guarantees.md",
        DOCS / "performance.md",
        DOCS / "defaults.md",
        *INTERNALS,
        *sorted((DOCS / "benchmarks").glob("*.md")),
    ],
    ids=lambda page: page.stem,
)
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    """A link whose file or heading is gone sends the reader looking."""
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text())
    dead = []
    for path, fragment in links:
        target = (page.parent / path).resolve() if path else page
        found = target.exists() and (
            not fragment or fragment in map(anchor, re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE))
        )
        dead += [] if found else [f"{path}#{fragment}"]
    assert dead == []


@pytest.mark.parametrize("page", WRITTEN_BY_HAND)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    """A reader opens the file that a page names; one that has moved sends him looking."""
    text = (DOCS / page).read_text()
    bases = (ROOT, *(ROOT / base for base in BASES))
    named = set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|yaml|toml))`", text))
    assert [path for path in sorted(named) if not any((base / path).exists() for base in bases)] == []


def test_the_page_of_files_has_the_first_words_of_each() -> None:
    """Who wants to change a line finds its file there."""
    page = file_list.rendered()
    assert re.findall(r"^\| `.*` \|  \|$", page, re.MULTILINE) == [], "begin the file with what it holds"
    assert file_list.PAGE.read_text(encoding="utf-8") == page, "run python -m docs.file_list"


def test_the_architecture_counts_the_files_on_a_samples_way() -> None:
    """A newcomer reads them in an hour, so the number is a promise."""
    table, said = (
        (DOCS / "internals/architecture.md").read_text().split("## The files on the way")[1].split("These are ")[:2]
    )
    named = re.findall(
        r"`([\w/]+\.py)`", "".join(line.split("|")[1] for line in table.splitlines() if line[:3] == "| `")
    )
    assert len(named) == len(set(named)) == int(said.split()[0])


BASES = ("common/penstock_common", "producer/penstock_producer", "consumer/penstock_consumer", "front/penstock")


def test_every_table_of_the_keys_names_a_field_once() -> None:
    """Two rows for one field say two things, and a reader in another language follows one of them."""
    fields: list[str] = []
    for line in (DOCS / "redis-keys.md").read_text().splitlines():
        if not line.startswith("|"):
            fields = []
        elif (field := line.split("|")[1].strip()).startswith("`"):
            assert field not in fields, line
            fields.append(field)


def test_every_decision_is_told_alike() -> None:
    """A reader of decisions looks for three things: what, why, and at what price."""
    for path in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        text = path.read_text()
        number = re.match(r"# (\d+)\. ", text)
        assert number, path.name
        assert int(number[1]) == int(path.name[:4]), path.name
        assert all(f"**{word}.**" in text for word in ("Decided", "Why", "The price")), path.name


# --- command lines ----------------------------------------------------------------------------------------------------

SHELL = re.compile(r"^ *```(?:sh|bash|console).*?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*penstock (?!--)(.+)$", re.MULTILINE)
ENDS = re.compile(r"^(&&|\|+|&|>>?|;)$")


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a page, as a shell splits it, up to what follows it in its line."""
    for page in (*DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md"), ROOT / "README.md"):
        for block in SHELL.findall(page.read_text()):
            for line in COMMAND.findall(re.sub(r"\\\n\s*", " ", block)):
                known = re.sub(r"\$(PWD|folder)\b", "/data", line)
                words = shlex.split(re.sub(r"\$\w+", "2", known).replace(";", " ; "), comments=True)
                yield f"{page.relative_to(ROOT)}: {line}", list(takewhile(lambda word: not ENDS.match(word), words))


def test_every_command_line_of_a_page_is_understood() -> None:
    """A command that is pasted and refused costs a page its reader."""
    refused, seen = [], 0
    for where, (name, *arguments) in command_lines():
        seen += 1
        try:
            parser_of(name).parse_args(arguments)
        except SystemExit:
            refused.append(where)
    assert seen > 100
    assert refused == []


def test_the_file_of_the_security_page_is_private_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address with a password that others can read is no secret."""
    [block] = re.findall(r"^ *```sh\n(.*?)^ *```", (DOCS / "security.md").read_text(), re.MULTILINE | re.DOTALL)
    told = f"{block}\necho $PENSTOCK_URL_FILE"
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-ec", told], env=environment, capture_output=True, text=True, check=True)
    file = Path(done.stdout.strip())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setenv("PENSTOCK_URL_FILE", str(file))
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    url = Settings.from_environment().url
    assert url == file.read_text().strip()
    check_url(url)


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(figures.FIGURES))
def test_a_figure_shows_the_stored_results(name: str) -> None:
    """A figure that lags behind the results misleads."""
    drawn = figures.FIGURES[name]()
    assert (DOCS / "img" / name).read_text(encoding="utf-8") == drawn, "run python docs/img/figures.py"
    assert f"(img/{name})" in (DOCS / "performance.md").read_text()


def test_the_stored_rates_are_those_of_the_table() -> None:
    """The panels by payload show peers that the table leaves out, so they have a file of their own."""
    stored = figures.stored("transport")
    table = figures.table(DOCS / "benchmarks" / "results.md", "### From writer to batches")
    assert len(table) == len(stored["payloads"])
    for column, name in enumerate(figures.OURS, 1):
        told = [float(figures.RATIO.findall(row[column])[0][0]) for row in table]
        assert stored["systems"][name] == told


# --- diagrams ---------------------------------------------------------------------------------------------------------


def test_the_diagrams_are_what_their_script_draws() -> None:
    """The next run of the script overwrites a picture that was changed without it."""
    diagrams = runpy.run_path(str(DOCS / "img" / "diagrams.py"))["DRAWINGS"]
    for name, draw in diagrams.items():
        assert (DOCS / "img" / name).read_text(encoding="utf-8") == draw().svg(), "run python docs/img/diagrams.py"

"""The house rules of CONTRIBUTING.md that ruff, mypy and import-linter cannot say, and the promises of packaging.

Rules about what the code does live with the rooms they test (tests/common, tests/producer, ...).
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.__main__ import main
from penstock.cli import COMMANDS, load_command
from tests.house.lua import LUA_FILES, loads_of, parse_lua, sent_to_read
from tests.house.rules import RULES, excepted, found, list_of, parsed
from tests.house.shrink import shrunk

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "common/penstock_common",
    "producer/penstock_producer",
    "consumer/penstock_consumer",
    "front/penstock",
)
PUBLIC_NAMES = {
    "Batch",
    "Canonical",
    "EmbeddedServer",
    "Files",
    "Loader",
    "PenstockError",
    "Ragged",
    "Replay",
    "Stats",
    "Tuning",
    "View",
    "Writer",
    "__version__",
    "errors",
    "mix",
    "produce",
}
HEAVY = {"tensorflow", "keras", "torch", "jax", "rq", "PIL", "sklearn"}


def _package_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def _code_files() -> list[Path]:
    folders = (*PACKAGES, "tests", "benchmarks", "chaos", "examples", "docker")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _documents() -> list[Path]:
    return sorted(
        [*ROOT.glob("*.md"), *(path for name in ("docs", "examples", "docker") for path in (ROOT / name).rglob("*.md"))]
    )


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _python(code: str) -> Any:
    """Run ``code`` in a fresh interpreter and return the JSON it prints last."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


# --- packaging --------------------------------------------------------------------------------------------------------


def test_the_wheel_lists_every_package_folder() -> None:
    """Hatchling skips a misspelt path in silence, and a user would miss a whole package."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    found = {_name(path.parent) for side in ROOT.iterdir() for path in side.glob("penstock*/py.typed")}
    assert sorted(listed) == sorted(PACKAGES)
    assert found == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_code_is_a_package(package: str) -> None:
    """A folder without ``__init__.py`` imports here and vanishes from type checkers and the wheel's contracts."""
    bare = {_name(path.parent) for path in (ROOT / package).rglob("*.py") if not (path.parent / "__init__.py").exists()}
    assert not bare


def test_public_names_are_pinned() -> None:
    """A name that users import appears or goes only on purpose, with a line in the changelog."""
    assert set(penstock.__all__) == PUBLIC_NAMES
    assert {name for name in penstock.__all__ if getattr(penstock, name, None) is None} == set()
    assert set(penstock.__all__) <= set(dir(penstock))


def test_the_version_is_written_once() -> None:
    """``penstock.__version__`` and the distribution can never disagree."""
    assert penstock.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_importing_penstock_is_light() -> None:
    """A command and a worker start often: no framework, queue or image library, and under 150 ms of our own."""
    code = (
        "import sys, time, json, numpy, redis; start = time.perf_counter(); import penstock;"
        "print(json.dumps([time.perf_counter() - start, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    runs = [_python(code) for _ in range(3)]
    assert not HEAVY & set(runs[0][1])
    assert min(seconds for seconds, _ in runs) < 0.150


def test_writer_and_loader_load_no_framework() -> None:
    """A numpy trainer's host has no framework installed, and a writer's host no queue."""
    code = (
        "import sys, json, penstock; penstock.Writer, penstock.Loader, penstock.Replay;"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    assert not HEAVY & set(_python(code))


# --- words -----------------------------------------------------------------------------------------------------------


def test_every_module_says_what_lives_there() -> None:
    """A stranger finds the room for a line by reading the first lines of files."""
    silent = [_name(path) for path in _code_files() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


# --- which line lives where -------------------------------------------------------------------------------------------

KEY_SPELLING = re.compile(
    r"penstock:\{|:(roster|entries|state|ledger|pos|dead|quarantine|index|meta|manifests?|events?)(:|$)"
)


def _strings(tree: ast.Module) -> Iterator[str]:
    """All string constants (parts of f-strings too) that are not docstrings or notes under a field."""
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes:
            yield node.value


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in {"environ", "environb", "getenv", "putenv"} and isinstance(node.value, ast.Name)
    return isinstance(node, ast.ImportFrom) and node.module == "os" and any("env" in name.name for name in node.names)


def _writes_output(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "print"
    return isinstance(node, ast.Attribute) and node.attr == "stdout" and getattr(node.value, "id", "") == "sys"


def test_only_settings_reads_the_environment() -> None:
    """The effect of a variable is documented in one place, and a library call means the same in every shell."""
    rooms = {"common/penstock_common/settings.py"}
    found = {_name(p) for p in _package_files() if any(map(_reads_environment, ast.walk(parsed(p))))}
    assert found <= rooms


def test_only_the_command_prints() -> None:
    """A library that prints breaks a user's pipe."""
    found = {_name(p) for p in _package_files() if any(map(_writes_output, ast.walk(parsed(p))))}
    rooms = ("front/penstock/cli/", "front/penstock/demo/", "front/penstock/__main__.py")
    assert {name for name in found if not name.startswith(rooms)} == set()


def test_only_one_module_spells_keys() -> None:
    """docs/redis-keys.md can be believed, because there is one place to compare it with."""
    rooms = {"common/penstock_common/stream/keys.py"}
    found = {_name(p) for p in _package_files() if any(map(KEY_SPELLING.search, _strings(parsed(p))))}
    assert found <= rooms


OF_A_CLUSTER = re.compile(r"(SlotMap|MapWatcher|RoutedChannel|RedisCluster|redis_mode|is_(\w+_)?(spread|cluster))")


def _used_of_others(path: Path) -> Iterator[str]:
    """Yield the names that a file imports, and the attributes that it uses."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute | ast.alias):
            yield node.attr if isinstance(node, ast.Attribute) else node.name


def test_only_the_layer_of_servers_asks_whether_there_is_a_cluster() -> None:
    """Code that is right on one server and elsewhere has no second way, which only some tests would take."""
    found = {_name(path) for path in _package_files() if any(map(OF_A_CLUSTER.fullmatch, _used_of_others(path)))}
    assert {name for name in found if not name.startswith("common/penstock_common/server/")} == set()
    assert found, "the layer itself asks"


# --- import contracts -------------------------------------------------------------------------------------------------

TRESPASSES = {
    "front/penstock/trespass.py": "import redis.client, rq.job, torch.nn, PIL.Image",
    "front/penstock/bench/trespass.py": "import penstock.cli",
    "front/penstock/demo/script.py": "import penstock_common",
    "common/penstock_common/wire/trespass.py": "import os.path, time, penstock_common.stream",
    "common/penstock_common/stream/groups/trespass.py": "import penstock_common.stream.index",
    "consumer/penstock_consumer/stages/trespass.py": "import penstock_common.stream, penstock_producer",
    "consumer/penstock_consumer/read/trespass.py": "import penstock_consumer.adapters",
    "producer/penstock_producer/sources/trespass.py": "import penstock_producer.notebook",
}
"""One breach of each contract."""


def _contracts(root: Path) -> tuple[int, str]:
    """(exit code, report) of import-linter on the four packages under ``root``."""
    sides = [str(root / Path(package).parent) for package in PACKAGES]
    code = f"import sys; sys.path[:0] = {sides}; from importlinter.cli import lint_imports_command as run; run()"
    command = [sys.executable, "-c", code, "--no-logo", "--no-cache", "--config", str(root / "pyproject.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    return done.returncode, done.stdout + done.stderr


def test_imports_point_one_way() -> None:
    """Producer and consumer never meet, and a framework, RQ or redis enters by one door."""
    code, report = _contracts(ROOT)
    assert code == 0, report


def test_a_trespass_breaks_every_contract(tmp_path: Path) -> None:
    """A contract with a misspelt module keeps itself for ever."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, code in TRESPASSES.items():
        (tmp_path / name).write_text(code)
    assert " 0 kept" in _contracts(tmp_path)[1]


# --- rules with exceptions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_no_exception_is_added(rule: str) -> None:
    """The remaining breaches are listed in tests/house/exceptions/, and the lists only become shorter."""
    new = sorted(set(found(rule)) - set(excepted(rule)))
    assert not new, f"{RULES[rule].sentence}. Moved or renamed code: run `python -m tests.house.shrink`"


@pytest.mark.parametrize("rule", RULES)
def test_no_exception_outlives_its_reason(rule: str) -> None:
    """A list that names what is fixed would let the same mistake in again."""
    path = list_of(rule).relative_to(ROOT)
    gone = [f"{path}: {place}: remove this line" for place in excepted(rule) if place not in found(rule)]
    assert not gone, "`python -m tests.house.shrink` removes them"


BREACHES = {
    "class_names": {
        "penstock.a": "class Lease: ...",
        "penstock.b": "class Member:\n    class Lease: ...",
    },
    "foreign_assignments": {
        "penstock.a": "class Reader:\n    def __init__(self) -> None:\n        self.state = 1",
        "penstock.b": "def stop(reader):\n    reader.state = 0",
    },
    "docstrings": {"penstock.a": 'def held():\n    """Of a member, what it holds."""'},
}
KEPT = {
    "class_names": {"penstock.a": "class Lease: ...", "penstock.b": "class Member: ..."},
    "foreign_assignments": {
        "penstock.a": "@dataclass\nclass Report:\n    state: int",
        "penstock.b": "class Reader:\n    def stop(self) -> None:\n        self.state = 0",
        "penstock.c": "def fill(report: Report) -> None:\n    report.state = 1",
    },
    "docstrings": {"penstock.a": 'def held():\n    """Return the entries that a member holds."""'},
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_finds_its_breach(rule: str) -> None:
    """A rule that finds nothing keeps itself for ever."""
    assert RULES[rule].find({name: ast.parse(code) for name, code in BREACHES[rule].items()})
    assert not RULES[rule].find({name: ast.parse(code) for name, code in KEPT[rule].items()})


def test_shrinking_adds_no_exception() -> None:
    """An exception goes with its reason or follows its code; a new breach stays a breach."""
    listed = {"penstock.a:f", "penstock.a:Old.run", "penstock.a:Old", "penstock.a"}
    assert shrunk(listed, {"penstock.a:f"}) == {"penstock.a:f"}
    assert shrunk(listed, {"penstock.b:f", "penstock.a:New.run"}) == {"penstock.b:f", "penstock.a:New.run"}
    assert shrunk(listed, {"penstock.a:New", "penstock.a:g", "penstock.b"}) == set()
    assert shrunk(listed, {"penstock.b:f", "penstock.c:f"}) == {"penstock.b:f"}


# --- benchmarks, chaos and examples -----------------------------------------------------------------------------------

ADAPTERS = {"jax", "keras", "tensorflow", "torch"}
INSIDE = re.compile(r"\bpenstock_(common|producer|consumer)\b")
COMPARED = ("between", "growth", "jpegs", "transports.ours")
"""The modules that `python -m benchmarks.between COMMIT` runs, also on the packages of other commits."""


def _knows_an_inside(code: str) -> bool:
    """Tell whether a file names more of Penstock than users do."""
    imported = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in imported if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imported if getattr(node, "module", "") == "penstock" for alias in node.names}
    below = {parts[1] for module in modules if (parts := module.split("."))[0] == "penstock" and len(parts) > 1}
    return bool(INSIDE.search(code) or names - PUBLIC_NAMES - ADAPTERS or below - ADAPTERS)


def _runs(module: str) -> set[str]:
    """Return the benchmark modules that one imports, at any depth."""
    seen, pending = set(), [module]
    while pending:
        if (name := pending.pop()) in seen:
            continue
        path = ROOT / "benchmarks" / f"{name.replace('.', '/')}.py"
        if not path.exists():  # a name out of a module
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "benchmarks":
                below = (node.module or "").partition(".")[2]
                pending += [below, *(f"{below}.{alias.name}".strip(".") for alias in node.names)]
    return seen


def test_benchmarks_chaos_and_examples_use_what_users_use() -> None:
    """They must run on commits whose insides lie elsewhere. The list of exceptions may only become shorter."""
    listed = (ROOT / "tests/house/exceptions/insides.txt").read_text().splitlines()
    files = [path for folder in ("benchmarks", "chaos", "examples") for path in (ROOT / folder).rglob("*.py")]
    found = sorted(_name(path) for path in files if _knows_an_inside(path.read_text()))
    assert found == listed
    for name in listed:
        assert "needs an internal part" in (ast.get_docstring(ast.parse((ROOT / name).read_text())) or ""), name


def test_what_is_compared_between_commits_uses_what_users_use() -> None:
    """``benchmarks.between`` runs this tree's scripts on the packages of another commit."""
    run = {f"benchmarks/{name.replace('.', '/')}.py" for start in COMPARED for name in _runs(start)}
    assert {"benchmarks/rounds.py", "benchmarks/growth_rounds.py", "benchmarks/trainers.py"} <= run
    assert not [name for name in run if _knows_an_inside((ROOT / name).read_text())]


@pytest.mark.parametrize(
    ("code", "is_inside"),
    [
        ("import penstock\nimport penstock.torch\nfrom penstock import Loader, mix", False),
        ("from penstock.jax import dataset", False),
        ("def f():\n    from penstock_consumer.read.loader import Loader", True),
        ("context.preload(['penstock_producer.jobs'])", True),
        ("from penstock.cli import byte_size", True),
        ("from penstock import cli", True),
    ],
)
def test_an_inside_is_told_from_a_public_name(code: str, is_inside: bool) -> None:
    """A rule that finds nothing keeps itself for ever."""
    assert _knows_an_inside(code) is is_inside


# --- the command and the documents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """People copy the example before they read the options."""
    assert main([command, "--help"]) == 0
    assert f"penstock {command}" in capsys.readouterr().out.lower().partition("example")[2]


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_a_file_of_its_own(command: str) -> None:
    """A stranger who types `penstock server` knows which file to open.

    The demo stands above the command line, because it also uses the public names.
    """
    module = "penstock.demo.command" if command == "demo" else f"penstock.cli.{command}"
    assert load_command(command).__name__ == module
    assert (ROOT / "front" / f"{module.replace('.', '/')}.py").exists()


def test_documents_name_no_host_and_no_home() -> None:
    """A document must hold on every machine: readers have their own index and their own folders."""
    hosts = r"pypi\.org|pythonhosted|docker\.io|ghcr\.io|quay\.io"
    homes = r"(?<![\w.])/(home/\w|root/|Users/\w|work/)"
    found = {
        f"{_name(path)}:{number}"
        for path in _documents()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(f"{hosts}|{homes}", line)
    }
    assert not found


def test_links_between_documents_lead_somewhere() -> None:
    """A dead link is the first thing a newcomer finds."""
    dead = {
        f"{_name(path)} -> {target}"
        for path in _documents()
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
        if "://" not in target and not (path.parent / target).exists()
    }
    assert not dead


# --- scripts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LUA_FILES, ids=lambda path: path.stem)
def test_a_script_says_what_it_takes_answers_and_who_calls_it(path: Path) -> None:
    """A reader of another language has the file alone."""
    script, loads = parse_lua(path), loads_of([file for file in _package_files() if "scripts" not in file.parts])
    assert script.callers == loads.get(path.stem), path.name
    for table in ("KEYS", "ARGV"):
        assert not script.wrong_numbers(table), (path.name, table)


def test_every_script_that_is_loaded_is_a_file() -> None:
    """A misspelt name would be met by the command that uses it alone."""
    loaded = loads_of([file for file in _package_files() if "scripts" not in file.parts])
    assert set(loaded) == {path.stem for path in LUA_FILES}


def test_only_scripts_that_say_that_they_only_read_go_by_evalsha_ro() -> None:
    """The server refuses a write in the middle of such a script, and only where it comes to one."""
    sent = sent_to_read([file for file in _package_files() if "scripts" not in file.parts])
    assert {"describe_entry", "list_entries", "read_headers"} <= sent
    assert not [name for name in sent if not parse_lua(LUA_FILES[0].with_name(f"{name}.lua")).says_that_it_only_reads]


def test_an_undescribed_key_of_a_script_is_found(tmp_path: Path) -> None:
    """The test above can fail."""
    (wrong := tmp_path / "wrong.lua").write_text(
        "-- Does it.\n--\n-- KEYS: roster\n-- ARGV: none\n-- Answer: 1\n-- Callers: a.py\n\nreturn KEYS[2] .. ARGV[1]\n"
    )
    assert (parse_lua(wrong).wrong_numbers("KEYS"), parse_lua(wrong).wrong_numbers("ARGV")) == ({2}, {1})
    wrong.write_text("-- Does it.\n--\n-- KEYS: roster\n-- ARGV: none\n-- Callers: a.py\n\nreturn 1\n")
    with pytest.raises(AssertionError, match="headings"):
        parse_lua(wrong)


def test_every_file_that_names_the_version_names_the_same_one() -> None:
    """A citation or an npm package of another version sends its reader to another code."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert json.loads((ROOT / "js" / "package.json").read_text())["version"] == version
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert penstock.__version__ == version

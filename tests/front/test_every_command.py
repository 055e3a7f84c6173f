"""Every command has an example that can be typed, one line for an error, and JSON where it is offered."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.__main__ import main
from penstock.cli import COMMANDS, parser_of
from penstock.cli.completion import SHELLS, completion_points

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text()
SECTIONS = dict(re.findall(r"^### penstock (\S+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Return a command's parser, or those of its actions."""
    subs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not subs:
        yield parser
    for sub in subs:
        for each in sub.choices.values():
            yield from leaves(each)


LEAVES = {leaf.prog: leaf for name in COMMANDS for leaf in leaves(parser_of(name))}


def typed(text: str) -> Iterator[list[str]]:
    """Return our command lines among some lines of shell, without redirections and pipes."""
    for line in text.splitlines():
        found = re.search(r"\$\(penstock ([^)]*)\)", line) or re.search(r"(?:^|\s)penstock (\S.*)", line)
        if found:
            words = shlex.split(found[1], comments=True)
            ends = [at for at, word in enumerate(words) if word in ("|", ">", "&")]
            yield words[: ends[0]] if ends else words


# --- help and pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_the_help_and_of_the_page_can_be_typed(name: str) -> None:
    """An example with a renamed option is worse than none."""
    parser = parser_of(name)
    text = (parser.epilog or "").partition("example:\n")[2].partition("\n\n")[0]
    examples = [argv for argv in typed(text) if argv[0] == name]
    (shown,) = re.findall(r"^```sh\n(.*?)\n```", SECTIONS[name], re.MULTILINE | re.DOTALL)
    on_page = list(typed(shown))
    assert examples
    assert [argv[0] for argv in on_page] == [name]
    for argv in examples + on_page:
        if "--help" not in argv:
            parser_of(name).parse_args(argv[1:])  # ends the test with the parser's own words


def test_the_page_has_the_commands_in_use_and_their_exit_codes() -> None:
    """Authors of scripts look there, and would not find a command that is missing on the page."""
    assert set(SECTIONS) == set(COMMANDS)
    assert [name for name, text in SECTIONS.items() if "\nExit codes: " not in text] == []


def test_the_overview_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Users type this first."""
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert set(re.findall(r"^  ([a-z]+)  ", told, re.MULTILINE)) == set(COMMANDS)
    for code in ("0 done", "1 an error", "2 wrong usage", "130 Ctrl-C"):
        assert code in told


# --- errors -----------------------------------------------------------------------------------------------------------

VALUES = {
    "stream": "trian",
    "name": "resnet",
    "names": "resnet",
    "epoch": "0",
    "entry": "1-0",
    "policy": "epochs:3",
    "directory": "out",
    "grant": "train/resnet",
}
MORE = {
    "penstock bad drop": ["--group", "resnet"],
    "penstock delete": ["--yes"],
    "penstock doctor": ["--no-probe"],
    "penstock health trainer": ["--group", "resnet"],
    "penstock monitor": ["--once"],
    "penstock tail": ["--once"],
}
"""Options without which the command asks, or continues."""
MADE_IF_MISSING = {"penstock import"}


def positionals(leaf: argparse.ArgumentParser) -> list[str]:
    """Return the names of the positional arguments."""
    return [action.dest for action in leaf._actions if not action.option_strings]


def arguments(leaf: argparse.ArgumentParser, **values: str) -> list[str]:
    """A command line with every positional argument."""
    given = VALUES | values
    words = [given[name] for name in positionals(leaf) if name in given]
    return [*leaf.prog.split()[1:], *words, *MORE.get(leaf.prog, [])]


STREAMS = [prog for prog, leaf in LEAVES.items() if "stream" in positionals(leaf)]


@pytest.mark.parametrize("prog", STREAMS)
def test_a_mistyped_stream_is_one_line_that_names_the_right_one(
    prog: str, any_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the most frequent mistake, made here with every command: exit code 1, no traceback, nothing made by that
    name.
    """
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    with penstock.Writer("train", url=any_url):
        pass
    code = main(arguments(LEAVES[prog], directory=str(tmp_path / "out")))
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (1, "", 1)
    if prog not in MADE_IF_MISSING:
        assert "no stream 'trian'" in err
        assert "did you mean 'train'?" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_one_line_and_exit_code_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that was written for another version must not continue."""
    leaf = next(leaf for leaf in LEAVES.values() if leaf.prog.split()[1] == name)
    words = leaf.prog.split()[1:]
    shell = ["bash"] if name == "completion" else []
    # required arguments come first, so that the error is about the option
    filled = [word for dest in positionals(leaf) for word in shell or [VALUES.get(dest, "x")]]
    assert main([*words, *filled, "--no-such-option", *(["--", "true"] if name == "run" else [])]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "--no-such-option" in err


# --- JSON -------------------------------------------------------------------------------------------------------------

OFFERS_JSON = {prog for prog, leaf in LEAVES.items() if "--json" in leaf._option_string_actions}
RUN_ELSEWHERE = {
    "penstock demo",  # tests/front/test_cli_demo.py
    *(prog for prog in OFFERS_JSON if prog.startswith("penstock produce ")),  # tests/front/test_cli_produce.py
    *(prog for prog in OFFERS_JSON if prog.startswith("penstock bench ")),  # tests/front/test_cli_bench.py
    "penstock gateway",  # tests/front/gateway
    "penstock import",  # needs an export first: tests/journeys
    "penstock bad drop", "penstock bad retry",  # need what is bad: tests/front/test_cli_bad.py
}  # fmt: skip
WAYS: dict[str, list[str]] = {
    "penstock audit": [],
    "penstock bad list": [],
    "penstock bad show": [],
    "penstock delete": [],
    "penstock doctor": [],
    "penstock epochs abandon": ["--force"],
    "penstock epochs close": [],
    "penstock epochs list": [],
    "penstock epochs pin": [],
    "penstock epochs retain": [],
    "penstock epochs unpin": [],
    "penstock export": [],
    "penstock groups declare": [],
    "penstock groups drop": [],
    "penstock groups list": [],
    "penstock groups reset": [],
    "penstock inspect": [],
    "penstock monitor": [],
    "penstock partitions": [],
    "penstock show": ["--count", "2"],
    "penstock stat": [],
    "penstock tail": [],
    "penstock trim": [],
}
"""Command -> options with which it prints JSON and ends."""


IN_LINES = {"penstock tail"}
"""Commands that print an object a line for as long as they run."""


def test_every_command_that_offers_json_is_tried() -> None:
    """A script that uses a command first would find one that was left out."""
    assert OFFERS_JSON - set(WAYS) - RUN_ELSEWHERE == set()


@pytest.mark.parametrize("prog", sorted(OFFERS_JSON & set(WAYS)))
def test_json_is_all_there_is_on_stdout(
    prog: str, any_url: str, any_client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`penstock ... --json | jq` works with every command that offers it."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    with penstock.Writer("train", url=any_url) as writer, writer.epoch() as epoch:
        for number in range(5):
            epoch.write({"x": np.full(3, number, np.uint8), "y": number})
    if prog != "penstock groups declare":
        assert main(["groups", "declare", "train", "resnet"]) == 0
    if prog == "penstock epochs unpin":
        assert main(["epochs", "pin", "train", "0"]) == 0
    entry = any_client.xrange(any_client.keys("*:0:entries")[0], count=1)[0][0].decode()
    capsys.readouterr()
    argv = arguments(LEAVES[prog], stream="train", entry=entry, directory=str(tmp_path / "out"))
    assert main([*(word for word in argv if word != entry or prog == "penstock bad show"), *WAYS[prog], "--json"]) == 0
    out = capsys.readouterr().out
    for text in out.splitlines() if prog in IN_LINES else [out]:
        assert json.loads(text) is not None


# --- completion -------------------------------------------------------------------------------------------------------

PRESSED = {
    "penstock ins": {"inspect"},
    "penstock produce im": {"images"},
    "penstock produce images photos --mode ": {"rgb", "gray", "gray16", "encoded"},
    "penstock show train --cl": {"--class"},
    "penstock produce images --wat": {"--watch"},
    "penstock produce tar --wat": set(),
    "penstock epochs p": {"pin"},
    "penstock completion ": set(SHELLS),
}


def script_of(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the command's output."""
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("line", PRESSED)
def test_bash_completes_commands_actions_options_and_values(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A press of Tab in a real bash."""
    words = " ".join(map(shlex.quote, line.split(" ")))
    press = (
        f'COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _penstock; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "--norc", "-c", f"compopt() {{ :; }}\n{script_of('bash', capsys)}\n{press}"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = {word for word in done.stdout.split() if word not in ("-h", "--help")}
    assert found == PRESSED[line]


NO_FILES = [
    "penstock ", "penstock groups ", "penstock groups ph", "penstock completion ", "penstock produce images p --mode ",
]  # fmt: skip
FILES = ["penstock produce images ", "penstock show train --out ", "penstock run images ph"]
"""Lines to complete in a folder that has `photos`. The third word of the first does not begin an action."""
PRESSES = {
    "bash": """
        for line in "$@"; do
            COMP_WORDS=($line); [ "${line% }" = "$line" ] || COMP_WORDS+=('')
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); offered=yes
            compopt() { [ "$*" = "+o default" ] && offered=no; }
            _penstock; echo $offered
        done""",
    "zsh": """
        _describe() { return 1 }
        _files() { offered=yes }
        for line in "$@"; do
            words=(${=line}); [ "${line% }" = "$line" ] || words+=('')
            CURRENT=${#words}; offered=no; _penstock; echo $offered
        done""",
    "fish": """
        for line in $argv
            complete -C$line | grep -q photos && echo yes || echo no
        end""",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_no_file_is_offered_where_an_action_is_due(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A list of files hides the few possible words. Each installed shell is asked for its own completions."""
    script = script_of(shell, capsys)
    for at, point in completion_points().items():
        if shell == "fish":
            assert (f"-n '__penstock_at {at}' -f\n" in script) == bool(point.words)
        else:
            (line,) = re.findall(rf"^ *'{at}'\) .*", script, re.MULTILINE)
            assert line.endswith(f"files={'no' if point.words else 'yes'} ;;")
    if program := shutil.which(shell):
        (tmp_path / "photos").mkdir()
        (tmp_path / "script").write_text(
            f"{'compdef() { :; }' if shell == 'zsh' else ''}\n{script}\n{PRESSES[shell]}\n"
        )
        bare = {"bash": "--norc", "zsh": "-f", "fish": "--no-config"}[shell]
        done = subprocess.run(
            [program, bare, "script", *NO_FILES, *FILES], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["no"] * len(NO_FILES) + ["yes"] * len(FILES), done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_know_every_place_and_are_valid(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that cannot be completed is not found. Each installed shell checks the script."""
    script = script_of(shell, capsys)
    assert {leaf.prog for leaf in LEAVES.values()} <= set(completion_points())
    for at, point in completion_points().items():
        assert at in script
        for option in point.options:
            in_fish = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            assert (in_fish if shell == "fish" else option) in script
    if program := shutil.which(shell):
        done = subprocess.run([program, "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")

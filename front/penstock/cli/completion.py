"""``penstock completion``: a shell script that completes commands, actions, options and their choices.

The script is made from the parsers and is complete: a press of Tab starts no Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.cli.console import Console


SHELLS = ("bash", "zsh", "fish")


EPILOG = (
    "example:\n"
    '  eval "$(penstock completion bash)"                                  # in ~/.bashrc\n'
    '  eval "$(penstock completion zsh)"                                   # in ~/.zshrc, after compinit\n'
    "  penstock completion fish > ~/.config/fish/completions/penstock.fish\n\n"
    "Made of the commands of this version: make it again after an update, or let the shell's start do so."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument("shell", choices=SHELLS, help="%(choices)s")


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the script."""
    console.lines({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](completion_points()).rstrip())
    return 0


@dataclass(slots=True)
class CompletionPoint:
    """The words that may follow others, such as ``penstock produce images``."""

    words: dict[str, str] = field(default_factory=dict)
    """Sub-commands and choices of arguments, with their help. If there are some, no file is offered."""
    options: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[str]] = field(default_factory=dict)
    """Option that takes a value -> its allowed values, or none if any value is allowed."""


def completion_points() -> dict[str, CompletionPoint]:
    """Return every completion point by its words."""
    from penstock.cli import COMMANDS, parser_of

    start = CompletionPoint(dict(COMMANDS), {"--help": "", "--version": ""})
    found = {"penstock": start}
    for name in COMMANDS:
        _walk(parser_of(name), f"penstock {name}", found)
    return found


def _walk(parser: argparse.ArgumentParser, at: str, found: dict[str, CompletionPoint]) -> None:
    point = found[at] = CompletionPoint()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                point.words[choice.dest] = _help(parser, choice)
            for name, sub in action.choices.items():
                _walk(sub, f"{at} {name}", found)
            continue
        choices = [str(choice) for choice in action.choices or ()]
        if not action.option_strings:
            point.words.update(dict.fromkeys(choices, ""))
        for option in action.option_strings:
            point.options[option] = _help(parser, action)
            if action.nargs != 0:
                point.values[option] = choices


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return " ".join(text.split())


def _filled(template: str, found: dict[str, CompletionPoint], words: Callable[[dict[str, str]], str]) -> str:
    """Fill a script of bash or zsh. ``words`` writes the assignment of some words with their help."""
    cases, values = [], []
    for at, point in found.items():
        files = "no" if point.words else "yes"
        cases.append(f"        '{at}') {words({**point.words, **point.options})} files={files} ;;")
        for option, choices in point.values.items():
            files = "no" if choices else "yes"
            values.append(f"        '{at} {option}') {words(dict.fromkeys(choices, ''))} files={files} ;;")
    deeper = "|".join(f"'{at}'" for at in found if at != "penstock")
    return template.format(deeper=deeper, cases="\n".join(cases), values="\n".join(values))


def _bash(found: dict[str, CompletionPoint]) -> str:
    return _filled(_BASH, found, lambda words: f"words='{' '.join(words)}'")


_BASH = """\
# bash completion for penstock
_penstock() {{
    local at=penstock words='' files=yes word i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="$at ${{COMP_WORDS[i]}}"
        case "$word" in
            {deeper}) at="$word" ;;
        esac
    done
    case "$at" in
{cases}
    esac
    case "$at ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
    esac
    [ $files = yes ] || compopt +o default
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _penstock penstock
"""


def _zsh(found: dict[str, CompletionPoint]) -> str:
    def words(each: dict[str, str]) -> str:
        escaped = [
            [part.replace(":", "\\:") for part in pair if part] for pair in each.items()
        ]  # ':' comes before help
        return f"found=({shlex.join(map(':'.join, escaped))})"

    return _filled(_ZSH, found, words)


_ZSH = """\
#compdef penstock
_penstock() {{
    local at=penstock files=yes word i
    local -a found
    for ((i = 2; i < CURRENT; i++)); do
        word="$at ${{words[i]}}"
        case "$word" in
            {deeper}) at="$word" ;;
        esac
    done
    case "$at" in
{cases}
    esac
    case "$at ${{words[CURRENT-1]}}" in
{values}
    esac
    _describe penstock found || [[ $files = no ]] || _files
}}
compdef _penstock penstock
"""


def _fish(found: dict[str, CompletionPoint]) -> str:
    lines = []
    for at, point in found.items():
        when = f"complete -c penstock -n {_fish_quoted(f'__penstock_at {at}')}"
        if point.words:
            lines.append(f"{when} -f")
        lines += [f"{when} -a {_fish_quoted(word)}{_described(text)}" for word, text in point.words.items()]
        for option, text in point.options.items():
            name = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            values = point.values.get(option)
            takes = "" if values is None else f" -x -a {_fish_quoted(' '.join(values))}" if values else " -r"
            lines.append(f"{when} {name}{takes}{_described(text)}")
    return _FISH.format(deeper=" ".join(_fish_quoted(at) for at in found if at != "penstock"), lines="\n".join(lines))


_FISH = """\
# fish completion for penstock
function __penstock_at
    set -l at penstock
    for word in (commandline -opc)[2..-1]
        if contains -- "$at $word" {deeper}
            set at "$at $word"
        end
    end
    test "$at" = "$argv"
end
{lines}
"""


def _described(text: str) -> str:
    return f" -d {_fish_quoted(text)}" if text else ""


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

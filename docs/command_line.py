"""The reference of the ``penstock`` command as Markdown, made of the parsers that read its command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from penstock.cli import COMMANDS, parser_of

SHARED = ("choice of samples", "production")
"""The titles of groups that are told once if several commands have the same options."""

UNTOLD = (argparse._HelpAction, argparse._SubParsersAction)
"""What no section lists: --help, and the choices that have sections of their own."""


def reference() -> str:
    """Return a section for each command, and below it one for each of its actions or kinds of source."""
    shown: dict[str, str] = {}
    return "\n\n".join(part for name, parser in parsers() for part in _section(name, parser, shown))


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command line, such as ``penstock produce images``, and its parser."""
    for name in COMMANDS:
        yield from _with_choices(parser_of(name))


def _with_choices(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for name, below in action.choices.items():
                below.description = below.description or helps.get(name)
                yield from _with_choices(below)


def _section(name: str, parser: argparse.ArgumentParser, shown: dict[str, str]) -> Iterator[str]:
    """Yield the parts of a section.

    Args:
        name: the words of the command line.
        parser: its parser.
        shown: the options of a group -> the command that has them first. Later commands refer to it.
    """
    yield f"{'#' * name.count(' ')}# {name}"
    if parser.description:
        yield f"{parser.description[:1].upper()}{parser.description[1:]}."
    yield _block(parser.format_usage().removeprefix("usage: "))
    for group in parser._action_groups:
        told = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        actions = [action for action in told if not isinstance(action, UNTOLD)]
        if not (text := "\n\n".join(_described(parser, action) for action in actions)):
            continue
        title = f"**{(group.title or '').capitalize()}**"
        first = shown.setdefault(text, name) if group.title in SHARED else name
        yield title if first == name else f"{title}: those of `{first}`."
        if first == name:
            yield text
    if parser.epilog:
        yield _block(parser.epilog)


def _described(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    text = formatter._expand_help(action) if action.help else ""
    name = formatter._format_action_invocation(action)
    return f"`{name}`\n: {_marked(text)}"


def _marked(text: str) -> str:
    """Return the text with its options and quoted commands as code, and with no other markup."""
    parts = re.split(r"(`[^`]+`|--[a-z][a-z-]*)", text)
    plain = [re.sub(r"([\\*_<\[|$#~])", r"\\\1", part) for part in parts[::2]]
    code = [f"`{part.strip('`')}`" for part in parts[1::2]]
    return "".join(word for pair in zip(plain, [*code, ""], strict=True) for word in pair)


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"

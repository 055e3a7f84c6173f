"""The rules that the four packages keep except at listed places, and the lists, which may only become shorter.

A rule looks at syntax trees and names each violation as ``module:qualified.name``, so that a line that moves inside its
file changes nothing. ``test_house.py`` compares what the rules find with the lists in ``exceptions/``.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("common", "producer", "consumer", "front")
EXCEPTIONS = Path(__file__).parent / "exceptions"

FRAGMENT = re.compile(
    r"(Also|As|Behind|Beside|How|In that|Nobody|Nothing|Of|Since|So|Somebody|The same|What|Where|Whether|Which|Why"
    r"|Who(m|se|ever)?)\b"
)
"""Openings after which no sentence follows: a clause that depends on a name that the reader has not seen."""

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Scope(NamedTuple):
    """A module, class or function, and its place as ``module:qualified.name``."""

    place: str
    node: Definition


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file of the four packages, which every rule looks at."""
    return ast.parse(path.read_text())


def modules(root: Path = ROOT) -> dict[str, ast.Module]:
    """Return the syntax tree of every file of the four packages, by module name."""
    trees = {}
    for side in SIDES:
        for path in sorted((root / side).glob("penstock*/**/*.py")):
            parts = path.relative_to(root / side).with_suffix("").parts
            trees[".".join(parts).removesuffix(".__init__")] = parsed(path)
    return trees


def scopes(name: str, tree: ast.Module) -> Iterator[Scope]:
    """Yield a module and everything that it defines, at any depth."""
    yield Scope(name, tree)
    pending: list[tuple[str, ast.AST]] = [(f"{name}:", tree)]
    while pending:
        prefix, parent = pending.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield Scope(prefix + node.name, node)
                pending.append((f"{prefix}{node.name}.", node))
            else:
                pending.append((prefix, node))


def own_nodes(definition: Definition) -> Iterator[ast.AST]:
    """Yield the nodes of a definition that belong to no definition inside it."""
    for node in ast.iter_child_nodes(definition):
        pending = [node]
        while pending:
            current = pending.pop()
            if not isinstance(current, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield current
                pending.extend(ast.iter_child_nodes(current))


# --- the rules --------------------------------------------------------------------------------------------------------


def repeated_class_names(trees: dict[str, ast.Module]) -> set[str]:
    """Find classes that share their name with another class."""
    places = [
        scope for name, tree in trees.items() for scope in scopes(name, tree) if isinstance(scope.node, ast.ClassDef)
    ]
    uses = Counter(scope.node.name for scope in places if isinstance(scope.node, ast.ClassDef))
    return {scope.place for scope in places if isinstance(scope.node, ast.ClassDef) and uses[scope.node.name] > 1}


def _stores(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that the nodes under ``node`` assign or delete."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store | ast.Del):
            yield inner


def _is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in {"self", "cls"}


def _declared(node: ast.ClassDef) -> set[str]:
    """Return the attributes that a class declares in its body or sets on itself."""
    fields = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    names = {
        name.id
        for item in node.body
        if isinstance(item, ast.Assign)
        for name in item.targets
        if isinstance(name, ast.Name)
    }
    setters = {item.name for item in node.body if isinstance(item, ast.FunctionDef) and _is_setter(item)}
    return fields | names | setters | {target.attr for target in _stores(node) if _is_own(target)}


def _is_setter(function: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "setter" for each in function.decorator_list)


def _is_record(node: ast.ClassDef) -> bool:
    """Tell whether a class is a record: a dataclass that never sets its own attributes."""
    names = {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list}
    return "dataclass" in names and not any(_is_own(target) for target in _stores(node))


def _class_of(name: str, definition: Definition) -> str:
    """Return the class that a function's annotation or own call gives a variable, or '' where neither says."""
    for node in own_nodes(definition):
        if isinstance(node, ast.arg) and node.arg == name and node.annotation:
            return ast.unparse(node.annotation).strip("'").rpartition(".")[2]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.targets[0]) == name:
            return ast.unparse(node.value.func).rpartition(".")[2]
    return ""


def foreign_assignments(trees: dict[str, ast.Module]) -> set[str]:
    """Find assignments to attributes of objects other than ``self`` that are neither records nor objects of a library.

    The class of an object is known where the function annotates or makes it. Elsewhere the attribute's name decides:
    it counts if any class of ours that is no record declares it.
    """
    found = [scope for name, tree in trees.items() for scope in scopes(name, tree)]
    classes = [scope.node for scope in found if isinstance(scope.node, ast.ClassDef)]
    guarded = {name for node in classes if not _is_record(node) for name in _declared(node)}
    objects = {node.name for node in classes if not _is_record(node)}
    harmless = {node.name for node in classes} - objects | {"ArgumentParser"}
    return {
        f"{scope.place} {ast.unparse(node)}"
        for scope in found
        for node in own_nodes(scope.node)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if not _is_own(node) and node.attr in guarded
        if _class_of(ast.unparse(node.value), scope.node) not in harmless
    }


def is_sentence(docstring: str) -> bool:
    """Tell whether a docstring opens with a sentence, as far as its first and last words show."""
    opening = " ".join(docstring.strip().partition("\n\n")[0].split())
    starts_well = bool(re.match(r"[A-Z`\"(]", opening)) and not FRAGMENT.match(opening)
    return starts_well and bool(re.search(r"\.[)\"'`]*$", opening))


def docstring_fragments(trees: dict[str, ast.Module]) -> set[str]:
    """Find docstrings that do not open with a sentence."""
    return {
        scope.place
        for name, tree in trees.items()
        for scope in scopes(name, tree)
        if (text := ast.get_docstring(scope.node)) and not is_sentence(text)
    }


@dataclass(frozen=True)
class Rule:
    """A rule as its breach is reported, and the function that finds the breaches."""

    sentence: str
    find: Callable[[dict[str, ast.Module]], set[str]]


RULES = {
    "class_names": Rule("A class name is used once in the tree: rename one of the classes", repeated_class_names),
    "foreign_assignments": Rule(
        "An object sets its own attributes: use a constructor argument, a method or a return value", foreign_assignments
    ),
    "docstrings": Rule(
        "A docstring opens with a sentence: a capital, a full stop, and no fragment such as 'Of' or 'What'",
        docstring_fragments,
    ),
}


# --- the lists --------------------------------------------------------------------------------------------------------


def list_of(rule: str) -> Path:
    """Return the file that lists the exceptions from a rule."""
    return EXCEPTIONS / f"{rule}.txt"


def excepted(rule: str) -> list[str]:
    """Return the lines of a rule's list."""
    return list_of(rule).read_text().splitlines()


@cache
def found(rule: str) -> frozenset[str]:
    """Return the places in this checkout where the code breaks a rule."""
    return frozenset(RULES[rule].find(_trees()))


@cache
def _trees() -> dict[str, ast.Module]:
    return modules()

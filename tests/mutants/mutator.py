"""Small faults in one file, of Python or Lua: each mutant is the file's text with one change.

Only changes that compile are made. Names of commands and texts of messages are left alone, because the first
call finds a change there, or no call ever does.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "True": "False", "False": "True"}
_LUA_TOKEN = re.compile(r"'(?:\\.|[^'\\])*'|\d+|\w+|==|~=|<=|>=|\.\.|\s+|.", re.DOTALL)
_LUA_SWAPS = {
    "==": "~=", "~=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "and": "or", "or": "and", "+": "-", "-": "+",
    "true": "false", "false": "true", "max": "min", "min": "max", "not": "", "/": "*",
}  # fmt: skip
_LUA_CALL = re.compile(r"redis\.p?call\(")
_LUA_RETURN = re.compile(r"\breturn\b[^\n]*?(?= end\b|$)", re.MULTILINE)
_LUA_ASSIGNMENT = re.compile(
    r"(?:^|(?<=then )|(?<=do )) *(?!\s*(?:local|for|if) )[\w.\[\], #+]+ = [^\n]*?(?= end\b|$)", re.MULTILINE
)
_LUA_CONDITION = re.compile(r"(?<=\bif )(.*?)(?= then\b)", re.DOTALL)
# What the - of a negative number may follow.
_LUA_UNARY = ("", "(", ",", "=", "{", "return", "or", "and")
# What a word before a call that is a statement may be, and what may not follow one.
_LUA_BEFORE = re.compile(r"(?:^|\b(?:then|do|else|end)|\)) *$")
_LUA_GOES_ON = re.compile(r"\s*(?:==|~=|[<>\[+*/.,)-]|or\b|and\b|then\b)")


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the bytes from ``start`` to ``end`` of its text become ``new``."""

    path: str
    function: str
    """The qualified name of the innermost function; empty outside functions, and in Lua."""
    line: int
    start: int
    end: int
    new: str
    before: str
    """The changed lines as they are, without the space around them."""
    after: str
    lines: tuple[str, ...]
    """The changed lines that a call of the function runs. Empty where the change is not in the function's body."""

    @property
    def name(self) -> str:
        """Return a name that stays the same while other lines of the file change."""
        return f"{self.path}: {self.function}: {self.before} -> {self.after}"

    @property
    def module(self) -> str:
        """Return the name by which tests import the file, or '' of a script."""
        return self.path.partition("/")[2].removesuffix(".py").replace("/", ".") if self.path.endswith(".py") else ""

    def text(self, original: str) -> str:
        """Return the text of the file with the change."""
        data = original.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()


def mutants_of(root: Path, path: str, *, must_compile: bool = True) -> list[Mutant]:
    """Return every mutant of a file, in the order of its lines.

    Without ``must_compile``, which takes most of the time, some do not compile.
    """
    text = (root / path).read_text(encoding="utf-8")
    found = _lua_changes(text) if path.endswith(".lua") else _python_changes(text)
    run = set() if path.endswith(".lua") else set(lines_run(compile(text, path, "exec")))
    made = {_mutant(path, text, change, run) for change in found}
    if must_compile and path.endswith(".py"):
        made = {mutant for mutant in made if _compiles(mutant.text(text))}
    return sorted(made, key=lambda mutant: (mutant.start, mutant.end, mutant.new))


_Change = tuple[int, int, str, str]
"""Start, end, new text, function."""


def lines_run(code: CodeType) -> Iterator[int]:
    """Yield the numbers of the lines that calls run: those of the functions in ``code``, at any depth."""
    if code.co_flags & inspect.CO_OPTIMIZED:  # else it is a module or a class, which runs once
        yield from (line for _, _, line in code.co_lines() if line is not None)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from lines_run(inner)


def _mutant(path: str, text: str, change: _Change, run: set[int]) -> Mutant:
    start, end, new, function = change
    data = text.encode()
    low, high = data.rfind(b"\n", 0, start) + 1, data.find(b"\n", end)
    before = data[low:high].decode()
    after = (data[low:start] + new.encode() + data[end:high]).decode()
    line = data.count(b"\n", 0, start) + 1
    lines = tuple(each.strip() for number, each in enumerate(before.splitlines(), line) if number in run)
    return Mutant(path, function, line, start, end, new, _one_line(before), _one_line(after), lines)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _lua_changes(text: str) -> Iterator[_Change]:
    code = re.sub(r"--[^\n]*", lambda match: " " * len(match[0]), text)
    for start, end, new in [*_lua_words(code), *_lua_statements(code)]:
        yield len(text[:start].encode()), len(text[:end].encode()), new, ""


def _lua_words(code: str) -> Iterator[tuple[int, int, str]]:
    end, before = 0, ""  # the last token that is no space
    for token in _LUA_TOKEN.findall(code):
        start, end = end, end + len(token)
        if token in _LUA_SWAPS and not (token == "-" and before in _LUA_UNARY):
            yield start, end, _LUA_SWAPS[token]
        elif token.isdecimal() and not code[:start].endswith(("KEYS[", "ARGV[")):
            yield start, end, str(int(token) + 1)
        elif token.startswith("'") and not (
            token[1:-1].isupper() or code[:start].endswith(("call(", "reply(", "error("))
        ):
            yield start, end, {"'0'": "'1'", "'1'": "'0'", "''": "'~'"}.get(token, f"'~{token[1:]}")
        if not token.isspace():
            before = token


def _lua_statements(code: str) -> Iterator[tuple[int, int, str]]:
    for match in _LUA_CALL.finditer(code):
        end = _closing(code, match.end() - 1) + 1
        goes_on = code[: match.start()].rstrip().endswith((",", "=", "(", "{", "..", " and", " or", " not", " in"))
        line = code[: match.start()].rpartition("\n")[2]
        if _LUA_BEFORE.search(line) and not goes_on and not _LUA_GOES_ON.match(code, end):
            yield match.start(), end, ""
    for match in [*_LUA_RETURN.finditer(code), *_LUA_ASSIGNMENT.finditer(code)]:
        whole = match[0].count("(") == match[0].count(")") and match[0].count("{") == match[0].count("}")
        if whole and code[match.end() :].strip() and not match[0].rstrip().endswith((",", "..", " and", " or")):
            yield match.start(), match.end(), ""
    for match in _LUA_CONDITION.finditer(code):
        yield match.start(), match.end(), f"not ({match[0]})"


def _closing(text: str, opening: int) -> int:
    depth, at = 0, opening
    for token in _LUA_TOKEN.findall(text[opening:]):
        depth += (token == "(") - (token == ")")
        if depth == 0:
            return at
        at += len(token)
    raise AssertionError(f"an open bracket: {text[opening : opening + 40]}")


def _python_changes(text: str) -> Iterator[_Change]:
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for node, function in _nodes(ast.parse(text), ""):
        for target, new in _changes_of(node):
            assert target.end_lineno is not None
            assert target.end_col_offset is not None
            start = lines[target.lineno - 1] + target.col_offset
            yield start, lines[target.end_lineno - 1] + target.end_col_offset, new, function


def _nodes(node: ast.AST, function: str, prefix: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Yield the nodes that run, each with its function.

    Annotations, texts, raised errors and the `strict` of `zip` are left out.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _nodes(child, prefix + child.name, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                yield from _nodes(child, function, f"{prefix}{child.name}.")
            else:
                yield child, function
                yield from _nodes(child, function, prefix)


_Located = ast.expr | ast.stmt


def _changes_of(node: ast.AST) -> Iterator[tuple[_Located, str]]:
    match node:
        case ast.Compare(left, ops, comparators):
            for at, op in enumerate(ops):
                new = [*ops[:at], _COMPARISONS[type(op)](), *ops[at + 1 :]]
                yield node, f"({ast.unparse(ast.Compare(left, new, comparators))})"
        case ast.BoolOp(op, values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            yield node, f"({ast.unparse(ast.BinOp(left, _ARITHMETIC[type(op)](), right))})"
        case ast.Constant(int() as value):
            yield node, str(not value if isinstance(value, bool) else value + 1)
        case ast.Name(id) if id in _NAMES:
            yield node, _NAMES[id]
        case ast.IfExp(test=test) | ast.If(test=test) | ast.While(test=test):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.comprehension(ifs=[test]):
            yield test, f"(not ({ast.unparse(test)}))"
        case _:
            yield from _statement_changes(node)


def _statement_changes(node: ast.AST) -> Iterator[tuple[_Located, str]]:
    match node:
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.Return(ast.expr() as value) if not (isinstance(value, ast.Constant) and not value.value):
            yield node, "return None"
        case ast.Break():
            yield node, "continue"
        case ast.Continue():
            yield node, "break"

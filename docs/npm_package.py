"""The reference of the npm package as Markdown, made of the doc comments in its TypeScript sources.

The sources are formatted by Biome, so a declaration begins at a known column. TypeScript itself is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "js" / "src"
TOPICS = {
    "replay": "Replay an epoch",
    "group": "Join a group",
    "write": "Write a stream",
    "adapters": "TensorFlow.js",
    "wire": "Entries and specs",
    "": "Batches and servers",
    "errors": "Errors",
}
"""The folder or file of the sources, and the heading of its names. A folder that is not here is under the empty one."""
KINDS = ("function", "class", "interface", "type", "const")
DECLARATION = re.compile(rf"^export (?:async )?(?P<kind>{'|'.join(KINDS)}) (?P<name>\w+)", re.MULTILINE)
MEMBER = re.compile(
    r"^  (?!(?:private|constructor)\b)(?:readonly |async |get |static |\*)*(?P<name>[a-z]\w*)\??(?=[:(<])"
)
COMMENT = re.compile(r"/\*\*(?P<text>.*?)\*/\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Told:
    """A declaration with its comment.

    Attributes:
        name: the exported name, or ``Class.member``.
        signature: the declaration without a body.
        comment: the text of its doc comment, '' for none.
        members: of a class or an interface, what it declares.
    """

    name: str
    signature: str
    comment: str
    members: tuple[Told, ...] = ()


def exported() -> dict[str, Path]:
    """Return each name that the package exports, and the source that declares it."""
    index = (SOURCES / "index.ts").read_text()
    found = {}
    for names, path in re.findall(r"^export (?:type )?\{([^}]*)\} from \"\./(.*)\.js\";", index, re.MULTILINE):
        for name in names.split(","):
            if words := name.split():
                found[words[-1]] = SOURCES / f"{path}.ts"
    for path in re.findall(r"^export \* from \"\./(.*)\.js\";", index, re.MULTILINE):
        source = SOURCES / f"{path}.ts"
        found |= {match["name"]: source for match in DECLARATION.finditer(source.read_text())}
    return found


def told(name: str, source: Path) -> Told:
    """Return the declaration of an exported name."""
    text = source.read_text()
    for match in DECLARATION.finditer(text):
        if match["name"] == name:
            break
    else:
        raise LookupError(f"{source.relative_to(SOURCES)} declares no {name}, which index.ts exports")
    signature = _until_body(text[match.start() :]).removeprefix("export ").removeprefix("async ")
    members: tuple[Told, ...] = ()
    if match["kind"] in ("class", "interface"):
        first = text[match.start() :].partition("\n")[0]
        body = "" if first.endswith("{}") else text[match.start() :].partition("\n}")[0]
        members = tuple(_members(name, body))
    return Told(name, signature, _comment_before(text, match.start()), members)


def _members(owner: str, body: str) -> Iterator[Told]:
    """Yield what a class or an interface declares, except private members."""
    at = 0
    seen = set()
    for line in body.splitlines(keepends=True):
        if (match := MEMBER.match(line)) and match["name"] not in seen:
            seen.add(match["name"])
            signature = _until_body(body[at:].lstrip())
            yield Told(f"{owner}.{match['name']}", signature.removeprefix("async "), _comment_before(body, at))
        at += len(line)


def _until_body(text: str) -> str:
    """Return a declaration up to its body, or its end, in one line."""
    depth = 0
    is_type = text.startswith(("export type", "export const", "readonly"))
    for at, character in enumerate(text):
        if (
            character == "{"
            and depth == 0
            and not is_type
            and text[at - 1] == " "
            and text[at : at + 2] in ("{\n", "{}")
        ):
            return _in_a_line(text[:at])
        depth += (character in "({[") - (character in ")}]")
        if character == ";" and depth == 0:
            return _in_a_line(text[:at])
    return _in_a_line(text)


def _in_a_line(text: str) -> str:
    line = re.sub(r"\s+", " ", re.sub(r"/\*\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)).strip()
    return re.sub(r"([(<{]) | ([)>])", r"\1\2", line.replace(", )", ")"))


def _comment_before(text: str, at: int) -> str:
    match = COMMENT.search(text[text.rfind("/**", 0, at) if "/**" in text[:at] else at : at])
    if match is None:
        return ""
    lines = [re.sub(r"^\s*\* ?", "", line).rstrip() for line in match["text"].strip().splitlines()]
    return "\n".join(lines).strip()


def undocumented() -> list[str]:
    """Return the exported names, and the members of exported classes, that have no doc comment."""
    everything = [told(name, source) for name, source in exported().items()]
    members = [member for each in everything if each.signature.startswith("class") for member in each.members]
    return [each.name for each in [*everything, *members] if not each.comment]


def reference() -> str:
    """Return a section for each topic, and below it one for each exported name."""
    topics: dict[str, list[Told]] = {topic: [] for topic in TOPICS}
    for name, source in exported().items():
        topic = source.relative_to(SOURCES).with_suffix("").parts[0]
        topics[topic if topic in TOPICS else ""].append(told(name, source))
    return "\n\n".join(part for topic, names in topics.items() for part in [f"## {TOPICS[topic]}", *_sections(names)])


def _sections(names: list[Told]) -> Iterator[str]:
    order = {kind: place for place, kind in enumerate(KINDS)}
    for each in sorted(names, key=lambda each: order[each.signature.split()[0]]):
        plain = "".join(f"\n  {member.signature};" for member in each.members if not member.comment)
        body = f" {{{plain}\n}}" if plain else ""
        yield f"### {each.name}\n\n```ts\n{each.signature}{body}\n```"
        yield from _paragraphs(each.comment)
        for member in each.members:
            if member.comment:
                text = "\n\n".join(_paragraphs(member.comment))
                yield f"`{member.signature.removeprefix('readonly ')}`\n: " + text.replace("\n", "\n  ")


def _paragraphs(comment: str) -> Iterator[str]:
    """Yield the parts of a comment: its text, then parameters, result and errors as a list, then the example."""
    plain, *tags = re.split(r"^@", comment, flags=re.MULTILINE)
    if plain.strip():
        yield plain.strip()
    listed, examples = [], []
    for tag in tags:
        word, _, rest = tag.partition(" ") if not tag.startswith("example") else ("example", "", tag[len("example") :])
        rest = rest.strip()
        if word == "param":
            name, _, rest = rest.partition(" ")
            listed.append(f"- `{name}`: {_flowed(rest)}")
        elif word == "example":
            examples.append(f"```js\n{rest}\n```")
        else:
            listed.append(f"- {word.capitalize()}: {_flowed(rest)}")
    if listed:
        yield "\n".join(listed)
    yield from examples


def _flowed(text: str) -> str:
    return " ".join(text.split())

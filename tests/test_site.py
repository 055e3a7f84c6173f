"""The site that `make docs` builds: every page is reachable, every link has a target, every public name is documented.

The tests read the built pages, because a setting that the builder ignores shows there only.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from bs4 import BeautifulSoup, Tag

import penstock
from docs.command_line import parsers
from docs.npm_package import exported, undocumented
from docs.promises import promises, shown_by

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("penstock", "penstock.errors", "penstock.torch", "penstock.tensorflow", "penstock.keras", "penstock.jax")
API_PAGES = ("python", "adapters", "errors")
BEHIND_A_BATCH = {"given_by", "is_alone", "is_dropped", "spans", "without_lost"}
"""The attributes of a Batch by which readers, mixtures and adapters acknowledge it. A user has no use for them."""


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what leads somewhere, and where a link may lead."""
        given = {name: value or "" for name, value in attrs}
        self.links += [given[name] for name in ("href", "src") if name in given]
        if "id" in given:
            self.anchors.add(given["id"])


@dataclass
class Site:
    """A built site, and what its build said."""

    folder: Path
    build: subprocess.CompletedProcess[str]
    pages: dict[Path, _Page] = field(default_factory=dict)

    def page(self, path: Path) -> _Page:
        """Return a page, parsed once."""
        if path not in self.pages:
            self.pages[path] = _Page(path.read_text())
        return self.pages[path]

    @cached_property
    def api(self) -> list[Tag]:
        """The definitions of the API pages: a name with its signature, and its description."""
        texts = [(self.folder / "docs" / "reference" / f"{name}.html").read_text() for name in API_PAGES]
        return [each for text in texts for each in BeautifulSoup(text, "html.parser").select("dl.py")]

    @cached_property
    def names(self) -> set[str]:
        """The full names that the API pages define."""
        return {str(sign["id"]) for each in self.api for sign in each.find_all("dt", id=True, recursive=False)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Build the site as `make docs` does, where no framework can be imported."""
    out = tmp_path_factory.mktemp("site")
    flags = ["--quiet", "--fresh-env", "--fail-on-warning", "--keep-going", "-c", "docs", "-d", str(out / "doctrees")]
    assert " ".join(flags[:6]) in (ROOT / "Makefile").read_text()
    command = [sys.executable, "-m", "sphinx", *flags, ".", str(out / "html")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return Site(out / "html", build)


def test_the_site_is_built_without_a_warning(site: Site) -> None:
    """A warning is a dead link, an unlisted page or a docstring that does not show as it was meant."""
    assert site.build.stderr == ""
    assert site.build.returncode == 0


def pages() -> list[Path]:
    """Return the pages of the repository that the site shows."""
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]


def test_every_page_is_in_the_navigation(site: Site) -> None:
    """A page that no menu names is not read; add it to a toctree of docs/index.md."""
    index = site.folder / "docs" / "index.html"
    menu = BeautifulSoup(index.read_text(), "html.parser").select("div.sidebar-tree a.reference.internal")
    shown = {(index.parent / urldefrag(str(link["href"])).url).resolve() for link in menu} | {index}
    built = {page: (site.folder / page.relative_to(ROOT)).with_suffix(".html") for page in pages()}
    assert len(built) > 70
    assert [str(page.relative_to(ROOT)) for page, html in built.items() if html not in shown] == []


def test_each_mechanism_shows_the_tests_of_its_promise(site: Site) -> None:
    """The lists are added when the site is built, so a page without them builds, too."""

    def letters(text: str) -> str:
        return re.sub(r"\W", "", text)

    shown = {}
    for page in (site.folder / "docs" / "internals").glob("mechanisms-*.html"):
        for section in BeautifulSoup(page.read_text(), "html.parser").select("section > section"):
            title = section.h2.get_text() if section.h2 else ""
            shown[letters(title)] = [letters(each.get_text()) for each in section.select("li > ul > li")]
    assert shown == {letters(each.name): [letters(test + shown_by(test)) for test in each.tests] for each in promises()}


def test_a_block_shows_the_name_of_its_file(site: Site) -> None:
    """The commands below a block name its file, and a reader who pastes the block has to save it under that name."""
    fences = {page: re.findall(r"^ *```\w+ (\S+\.[a-z]\w*)$", page.read_text(), re.MULTILINE) for page in pages()}
    assert len([name for names in fences.values() for name in names]) > 40
    for page, names in fences.items():
        html = (site.folder / page.relative_to(ROOT)).with_suffix(".html").read_text()  # parsing all takes 6 s of CPU
        shown = re.findall(r'<div class="code-block-caption"><span class="caption-text">(.*?)</span>', html)
        assert shown == names, page


def test_every_link_leads_somewhere(site: Site) -> None:
    """A reader who follows a dead link leaves."""
    dead = []
    pages = sorted(site.folder.rglob("*.html"))
    assert len(pages) > 70
    for page in pages:
        for link in site.page(page).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            found = target.is_file() and (
                target.suffix != ".html" or unquote(parts.fragment) in site.page(target).anchors
            )
            dead += [] if found else [f"{page.relative_to(site.folder)}: {link}"]
    assert dead == []


def test_no_page_is_offered_as_a_download(site: Site) -> None:
    """A link to a document that the site lacks would hand its reader a file of Markdown."""
    assert [str(path) for path in (site.folder / "_downloads").rglob("*.md")] == []


def test_the_first_page_leads_to_the_landing_page(site: Site) -> None:
    """A site is opened by its address, without the name of a file."""
    assert 'url=docs/index.html"' in (site.folder / "index.html").read_text()


def public_names(module: str) -> list[str]:
    """Return the `__all__` of a module, read without importing it, because some import a framework."""
    path = ROOT / "front" / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    [names] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    ]
    return [str(name) for name in names]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(site: Site, module: str) -> None:
    """A name that the reference lacks does not exist for its reader."""
    names = set(public_names(module)) - {"errors"}
    if module == "penstock.errors":
        names -= {"PenstockError"}  # documented as penstock.PenstockError
    assert names
    assert [name for name in sorted(names) if f"{module}.{name}" not in site.names] == []


def test_the_modules_of_the_reference_are_the_public_ones() -> None:
    """A new adapter comes with its reference."""
    assert set(MODULES) == {"penstock", *(f"penstock.{name}" for name in penstock._MODULES)}


def definitions(site: Site, *kinds: str) -> Iterator[tuple[str, Tag, Tag]]:
    """Yield each definition of these kinds on the API pages: full name, signature, description."""
    for each in site.api:
        sign, text = each.find("dt", recursive=False), each.find("dd", recursive=False)
        assert isinstance(sign, Tag)
        assert isinstance(text, Tag)
        if set(kinds) & set(each["class"]):
            yield str(sign["id"]), sign, text


def described(text: Tag) -> set[str]:
    """Return the names of the parameters that a description tells of."""
    fields = text.find("dl", class_="field-list", recursive=False)
    return {each.get_text().lstrip("*") for each in fields.select("strong")} if isinstance(fields, Tag) else set()


CLASSES = sorted(name for name in set(public_names("penstock")) - {"PenstockError"} if name[0].isupper())


def members(kind: type[Any]) -> Iterator[str]:
    """Yield the public attributes of a class that Penstock's own code gives it."""
    for base in kind.__mro__:
        if base.__module__.startswith("penstock"):
            for name, value in vars(base).items():
                if not name.startswith("_") and type(value).__name__ != "Mistaken":
                    yield name


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_attribute_is_documented(site: Site, name: str) -> None:
    """A method without a docstring is left out of the reference in silence."""
    kind = getattr(penstock, name)
    left_out = BEHIND_A_BATCH if kind is penstock.Batch else set()
    [arguments] = [
        described(text) for full_name, _, text in definitions(site, "class") if full_name == f"penstock.{name}"
    ]
    wanted = {*members(kind)} - left_out - arguments
    assert [member for member in sorted(wanted) if f"penstock.{name}.{member}" not in site.names] == []


def test_every_parameter_is_described(site: Site) -> None:
    """A reader wants unit, default and meaning of what he passes; a name alone is a guess."""
    missing = []
    for name, sign, text in definitions(site, "function", "method", "class"):
        names = [each.find("span", class_="n") for each in sign.select("em.sig-param")]
        taken = {each.get_text() for each in names if each is not None}  # a bare star has none
        missing += [f"{name}({each})" for each in sorted(taken - described(text))]
    assert missing == []


def test_every_result_is_described(site: Site) -> None:
    """A name such as `wait` does not say what comes back."""
    public, missing, seen = set(public_names("penstock")), [], 0
    for name, _, text in definitions(site, "function", "method"):
        path = name.removeprefix("penstock.")
        if path.partition(".")[0] in public:
            seen += 1
            result = operator.attrgetter(path)(penstock).__annotations__.get("return", "None")
            fields = {each.get_text().rstrip(":") for each in text.select("dl.field-list > dt")}
            is_told = fields & {"Returns", "Yields"} or text.get_text().strip().startswith(("Return", "Yield"))
            missing += [] if result == "None" or is_told else [name]
    assert seen > 30
    assert missing == []


def test_every_function_and_class_has_an_example(site: Site) -> None:
    """An example answers what a description leaves open."""
    told = list(definitions(site, "function", "class"))
    assert len(told) > 20
    assert [name for name, _, text in told if not text.select(".doctest")] == []


def test_no_sentence_of_a_docstring_shows_as_a_type(site: Site) -> None:
    """The first colon of an attribute's docstring is read as the end of its type."""
    told = definitions(site, "attribute", "property")
    assert [name for name, _, text in told if any(each.get_text() == "Type:" for each in text.select("dt"))] == []


def test_every_name_of_the_npm_package_is_documented(site: Site) -> None:
    """A user of Node finds what an editor shows; the page is made of the same comments."""
    names = list(exported())
    assert {"load", "replay", "openWriter", "PenstockError", "LoaderOptions"} <= set(names)
    assert undocumented() == []
    text = BeautifulSoup((site.folder / "docs" / "reference" / "npm.html").read_text(), "html.parser")
    shown = [each.find(string=True, recursive=False) for each in text.select("section > h3")]
    assert sorted(map(str, shown)) == sorted(names)
    signatures = " ".join(each.get_text() for each in text.select("div.highlight-ts"))
    assert "function load(stream: string, options: LoaderOptions): Loader" in signatures
    assert "checkpoint(): Promise<LoaderState>" in [each.get_text() for each in text.select("dt")]


def test_every_option_of_every_command_is_in_the_reference(site: Site) -> None:
    """The command line changes by its parsers alone, so the page is made of them."""
    text = BeautifulSoup((site.folder / "docs" / "reference" / "command-line.html").read_text(), "html.parser")
    shown = {each.get_text() for each in text.select("section > h2, section > h3, section > h4")}
    options = {word.rstrip(",") for each in text.select("dt code") for word in each.get_text().split()}
    found = dict(parsers())
    assert len(found) > 30
    assert [name for name in found if not any(heading.startswith(name) for heading in shown)] == []
    taken = {option for parser in found.values() for each in parser._actions for option in each.option_strings}
    assert taken - options == {"-h", "--help"}

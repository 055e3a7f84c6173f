"""The site that `make docs` builds: Sphinx reads the pages of the repository where they lie.

The source folder is the repository, so a link between pages is the same on the site and in the repository. The menus
are in index.md. A dead link and a broken docstring are errors.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from fnmatch import fnmatch
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = map(str, [ROOT, *(ROOT / folder for folder in ("common", "producer", "consumer", "front"))])
os.environ["COLUMNS"] = "90"  # the width of usage lines
FRAMEWORKS = ["jax", "keras", "tensorflow", "torch"]
# For the whole build: none needs to be installed, and one that is installed is not imported. It ends when collected.
WITHOUT_FRAMEWORKS = mock(FRAMEWORKS)
WITHOUT_FRAMEWORKS.__enter__()

project = "Penstock"
author = project_copyright = "The Penstock maintainers"
release = version = version_of("penstock")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
locale_dirs: list[str] = []
WITH_PAGES = ("docs", "examples")
include_patterns = ["*.md", *(f"{folder}/**" for folder in WITH_PAGES)]
# A folder that is left out here is not searched, and .venv has 100,000 files.
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in WITH_PAGES]
smartquotes_action = "D"  # dashes only: quotes are often code

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_sphinx = False
html_last_updated_fmt = None

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

default_role = "py:obj"
add_module_names = False
autodoc_mock_imports = FRAMEWORKS
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autoclass_content = "both"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 88


def without_mistakes(app: Sphinx, what: str, name: str, call: object, options: object, taken: str, given: str) -> Any:
    """Leave out the arguments that a call takes only to say what is wrong with them."""
    return (re.sub(r"(=\S+)?, \*others", "", taken), given) if taken else None


class CommandLine(SphinxDirective):
    """The place where the reference of every command is, made of its parser."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        from docs.command_line import reference

        sections: list[nodes.Node] = self.parse_text_to_nodes(reference(), allow_section_headings=True)
        return sections


class NpmPackage(SphinxDirective):
    """The place where the reference of the npm package is, made of its doc comments."""

    def run(self) -> list[nodes.Node]:
        """Return the sections, and warn of names without a comment."""
        from docs.npm_package import reference, undocumented

        for name in undocumented():
            logging.getLogger(__name__).warning("%s of the npm package has no doc comment", name)
        sections: list[nodes.Node] = self.parse_text_to_nodes(reference(), allow_section_headings=True)
        return sections


def name_files(app: Sphinx, page: str, text: list[str]) -> None:
    """Show the file name that a fence has after its language, which Markdown leaves out, above the block."""
    block = r"\1```{code-block} \2\n\1:caption: \3\n"
    text[0] = re.sub(r"^( *)```(\w+) (\S+\.[a-z]\w*)$", block, text[0], flags=re.MULTILINE)


def list_tests(app: Sphinx, page: str, text: list[str]) -> None:
    """Add to each promise of a mechanisms page the tests that keep it, and what each shows."""
    if page.startswith("docs/internals/mechanisms-"):
        from docs.promises import with_tests

        text[0] = with_tests(text[0])


def list_further_pages(app: Sphinx, page: str, text: list[str]) -> None:
    """Append a menu of the pages in docs/ that no menu of index.md names, so that a new page is on the site."""
    if page == root_doc:
        named = re.findall(r"^(?:.* <)?([a-z*-]+)>?$", text[0], re.MULTILINE)
        stems = sorted(path.stem for path in Path(ROOT, "docs").glob("*.md") if path.stem != "index")
        if further := [stem for stem in stems if not any(fnmatch(stem, name) for name in named)]:
            text[0] += "\n".join(["", "```{toctree}", ":hidden:", ":caption: Further pages", "", *further, "```", ""])


def link_folders(app: Sphinx, document: nodes.document) -> None:
    """Have a link to a folder lead to the README.md in it, as in the repository."""
    here = posixpath.dirname(app.env.current_document.docname)
    for link in document.findall(pending_xref):
        page = posixpath.normpath(posixpath.join(here, link["reftarget"], "README"))
        if link["reftype"] == "myst" and page in app.env.found_docs:
            link["refdomain"], link["reftarget"], link["reftargetid"] = "doc", page, None


def link_names(app: Sphinx, document: nodes.document) -> None:
    """Have a name like `EpochWriter.write` lead to it from the docstrings of any module."""
    for link in document.findall(pending_xref):
        if link["refdomain"] == "py" and link["reftarget"][0].isupper():
            link["refspecific"] = True


def begin_at_the_root(app: Sphinx, error: Exception | None) -> None:
    """Redirect the first page of the output to the landing page, which is in the subfolder docs/."""
    Path(app.outdir, "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">\n')


def setup(app: Sphinx) -> None:
    """Register what is above."""
    app.add_directive("command-line", CommandLine)
    app.add_directive("npm-package", NpmPackage)
    app.connect("autodoc-process-signature", without_mistakes)
    app.connect("source-read", name_files)
    app.connect("source-read", list_tests)
    app.connect("source-read", list_further_pages)
    app.connect("doctree-read", link_folders)
    app.connect("doctree-read", link_names)
    app.connect("build-finished", begin_at_the_root)

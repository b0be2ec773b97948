"""Settings of Sphinx: `make docs` builds `build/docs/site` from what `docs/generate.py` has written.

Inventories of other projects are read with `-t online` only: without a network the build must work, and a link to a
class of PyTorch is then its name.
"""

from __future__ import annotations

import importlib
import sys
import typing
from pathlib import Path

from sphinx.domains.python import PythonDomain

import horovodlike

if typing.TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.append(str(Path(__file__).parent))
importlib.import_module("torch._dynamo")  # before TensorFlow: with Triton, the other order can abort the process

project = "horovodlike"
version = release = horovodlike.__version__
language = "en"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx"]

html_theme = "furo"
html_title = f"horovodlike {version}"
templates_path = ["templates"]
_SIDEBAR = ("brand", "search", "versions", "scroll-start", "navigation", "scroll-end")
html_sidebars = {"**": [f"sidebar/{part}.html" for part in _SIDEBAR]}
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4
# A class that several modules offer: each offer is as good as the others.
suppress_warnings = ["ref.python"]
# What is named in full and is public must be there; but not the modules behind a façade, in which base classes have
# their homes.
nitpicky = True
_BEHIND = r"(?!horovodlike\.[a-z]).*|.*\._.*|horovodlike\.(data\.records|tensorflow\.compression)\..*"
nitpick_ignore_regex = [("py:(obj|mod)", ".*"), ("py:.*", _BEHIND)]

autodoc_typehints = "none"
autodoc_member_order = "bysource"
# What is in single backticks is code, and a link if it is a public name.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "numpy": ("https://numpy.org/doc/stable", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
}
if not tags.has("online"):  # noqa: F821 -- Sphinx defines it
    intersphinx_mapping = {}


class _Domain(PythonDomain):
    """Python's names, of which several public modules may offer one that a private module defines."""

    def note_object(
        self, name: str, objtype: str, node_id: str, aliased: bool = False, location: typing.Any = None
    ) -> None:
        """Keep the first page of a name that is an alias."""
        if not (aliased and name in self.objects):
            super().note_object(name, objtype, node_id, aliased, location)


def _add_names(_: Sphinx, page: str, text: list[str]) -> None:
    """Add the names of a public module to its page."""
    if page.startswith("api/horovodlike"):
        generate = importlib.import_module("generate")
        text[0] += generate.directives(importlib.import_module(page.removeprefix("api/")))


# What axe finds in the pages that Sphinx, docutils and the theme write.
_MENDED = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages">',
    '<div id="search-results"></div>\n\n': '<h1>Search</h1><div id="search-results"></div>\n',
    '<th class="head"><p></p></th>': "<td></td>",
    "<pre>": '<pre tabindex="0">',  # long lines are scrolled by keys
}


def _mend(app: Sphinx, error: Exception | None) -> None:
    """Make the pages usable by keyboard and screen reader."""
    for path in app.outdir.rglob("*.html") if error is None else ():
        text = path.read_text(encoding="utf-8")
        for before, after in _MENDED.items():
            text = text.replace(before, after)
        path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Replace the domain of Python, fill the pages of the API, and mend the HTML."""
    app.add_domain(_Domain, override=True)
    app.connect("source-read", _add_names)
    app.connect("build-finished", _mend)

"""Settings of Sphinx: `make docs` builds `build/docs/site` from what `docs/generate.py` has written.

Inventories of other projects are read with `-t online` only: without a network the build must work, and a link to a
class of PyTorch is then its name.
"""

from __future__ import annotations

import typing

from sphinx.domains.python import PythonDomain

import horovodlike

if typing.TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "horovodlike"
version = release = horovodlike.__version__
language = "en"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx"]

html_theme = "furo"
html_title = f"horovodlike {version}"
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4
# A class that several modules offer: each offer is as good as the others.
suppress_warnings = ["ref.python"]

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


def setup(app: Sphinx) -> None:
    """Replace the domain of Python."""
    app.add_domain(_Domain, override=True)

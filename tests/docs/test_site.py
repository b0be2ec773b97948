"""The site: it builds without a warning, its links lead somewhere, and it has every public name."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import generate
import pytest
from support.browser import browser

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    """The parts of a page that the tests look at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.headings: list[int] = []
        self.without_text: list[str] = []
        self.language = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.add(values.get("id", ""))
        self.links += [values[name] for name in ("href", "src") if name in values]
        if tag == "html":
            self.language = values.get("lang", "")
        if tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            self.headings.append(int(tag[1]))
        if (tag == "img" and "alt" not in values) or (values.get("role") == "img" and not values.get("aria-label")):
            self.without_text.append(tag)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once for the tests of this module."""
    folder = tmp_path_factory.mktemp("site")
    source = folder / "source"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(generate, "SITE", source)
        generate.write_site()
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", ROOT / "docs", source, folder / "html"]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder; yield its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            # Files that a page asks for without knowing whether they exist: the answer 404 would be on the console.
            if self.path in ("/favicon.ico", "/versions.json") and not (folder / self.path[1:]).exists():
                self.send_response(204)
                self.end_headers()
            else:
                super().do_GET()

        def log_message(self, format: str, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """Serve the site; give its address."""
    with serve(site) as address:
        yield address


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def dead(pages: dict[Path, Page]) -> Iterator[str]:
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else {""}
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in anchors):
                yield f"{path.name}: {link}"


def test_links_and_anchors_lead_somewhere(pages: dict[Path, Page]) -> None:
    assert len(pages) > 60
    assert list(dead(pages)) == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert 'src="http' not in text and 'rel="stylesheet" href="http' not in text, path


def test_examples_in_docstrings_are_code(site: Path) -> None:
    assert not [path for path in (site / "api").glob("*.html") if "<blockquote>" in path.read_text()]


def test_pages_can_be_read_aloud(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert page.language == "en" and not page.without_text, path
        if path.name not in ("genindex.html", "py-modindex.html"):
            assert page.headings[0] == 1 and page.headings.count(1) == 1, path
        steps = zip(page.headings, page.headings[1:], strict=False)
        assert all(after <= before + 1 for before, after in steps), path


def test_everybody_can_use_the_pages(served: str, tmp_path: Path) -> None:
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("chromium is not installed: `make tools` does")
    with browser(tmp_path) as page:
        page.resize(1200, 1600, "light")
        for name in ("index", "search", "users/monitor", "developers/architecture", "api/horovodlike"):
            page.open(f"{served}/{name}.html")
            assert page.audit() == [], name
        page.resize(1200, 1600, "dark")
        for name in ("index", "users/monitor"):
            page.open(f"{served}/{name}.html")
            assert page.audit("color-contrast") == [], name
        assert page.problems == []
        assert all(each.startswith((served, "data:")) for each in page.requests)


def test_versions_can_be_chosen_where_there_are_several(served: str, site: Path, tmp_path: Path) -> None:
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("chromium is not installed: `make tools` does")
    deployed = tmp_path / "deployed"
    (deployed / "0.1").mkdir(parents=True)
    (deployed / "0.1" / "index.html").write_text("<title>the first version</title>")
    for name in ("0.2", "0.3"):
        (deployed / name).symlink_to(site)
    choices = [{"name": f"v{name}", "url": f"{name}/"} for name in ("0.3", "0.2", "0.1")]
    (deployed / "versions.json").write_text(json.dumps(choices))
    (tmp_path / "browser").mkdir()
    with browser(tmp_path / "browser") as page, serve(deployed) as address:
        shown = "document.querySelector('#versions select').options.length"
        page.open(f"{served}/users/monitor.html")
        page.wait_for("performance.getEntriesByName(location.origin + '/versions.json').length")
        assert page.value("document.querySelector('#versions').hidden") and page.value(shown) == 0
        page.open(f"{address}/0.2/users/monitor.html")
        page.wait_for("!document.querySelector('#versions').hidden")
        names = "[...document.querySelectorAll('#versions option')].map(each => each.text)"
        assert page.value(names) == ["v0.3", "v0.2", "v0.1"]
        assert page.value("document.querySelector('#versions select').selectedOptions[0].text") == "v0.2"
        assert page.audit("select-name", "label", "color-contrast", "target-size") == []
        choose = "(select => { select.selectedIndex = %d; select.dispatchEvent(new Event('change')); return true; })"
        choose += "(document.querySelector('#versions select'))"
        page.value(choose % 0)
        page.wait_for("location.pathname === '/0.3/users/monitor.html' && document.readyState === 'complete'")
        page.wait_for("!document.querySelector('#versions').hidden")
        assert page.problems == []
        page.value(choose % 2)  # it has no such page
        page.wait_for("location.pathname === '/0.1/' && document.title === 'the first version'")


def test_every_public_name_has_an_address_and_a_docstring(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    missing = []
    for module in map(importlib.import_module, generate.MODULES):
        for name in generate.exported(module):
            value = getattr(module, name)
            if not name.startswith("__") and f"{module.__name__}.{name}" not in known:
                missing.append(f"no address: {module.__name__}.{name}")
            if inspect.isclass(value) or inspect.isroutine(value):
                members = [each for each in vars(value) if not each.startswith("_")] if inspect.isclass(value) else []
                methods = filter(inspect.isroutine, (getattr(value, each) for each in members))
                missing += [f"no docstring: {each}" for each in (value, *methods) if not inspect.getdoc(each)]
    assert not missing, "\n".join(missing)

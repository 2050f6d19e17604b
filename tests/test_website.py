"""The documentation as a site: every link leads somewhere, search works, nothing is asked of another host."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from boards import example
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
SHOWN = ["index", "tutorial", "tour", "findings", "help", "python/contract", "tasks/shift", "results"]

needs_browser = pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("BENCH_REQUIRE_BROWSER") != "1", reason="no Chromium on this system"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built once; a warning of the builder ends it."""
    folder = tmp_path_factory.mktemp("site") / "website"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def website():
    """The module that builds it."""
    sys.path.insert(0, str(ROOT / "docs"))
    import website

    yield website
    sys.path.remove(str(ROOT / "docs"))


class Page(HTMLParser):
    """The links of a page, and where a link may lead within it."""

    def __init__(self, path):
        super().__init__()
        self.links, self.ids = [], {""}
        self.feed(path.read_text())

    def handle_starttag(self, _, attrs):  # noqa: D102
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]


def dead_links(folder):
    """Every link of the pages below a folder that leads nowhere, but for those to other hosts."""
    read = {path: Page(path) for path in folder.rglob("*.html") if path.name != "404.html"}
    dead = []
    for path, page in read.items():
        for link in page.links:
            to = urlsplit(link)
            if to.scheme or to.netloc:
                continue
            there = (path.parent / unquote(to.path)).resolve() if to.path else path
            page_there = read.get(there)
            if not there.exists() or (
                to.fragment and page_there and unquote(to.fragment) not in page_there.ids
            ):
                dead.append(f"{path.relative_to(folder)}: {link}")
    return dead


def test_every_link_leads_somewhere(site):
    assert not dead_links(site)
    assert len(list(site.rglob("*.html"))) > 80


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html">x</a><a href="#there">x</a><a href="#here" id="here">x</a>'
    )
    assert dead_links(tmp_path) == ["a.html: b.html", "a.html: #there"]


def test_no_page_asks_for_anything_from_elsewhere(site):
    """Scripts, styles and pictures are of the site; a link in the text may lead away."""
    asked = re.compile(
        r"""<(?:script|img|iframe|source)[^>]* src=["'](?:https?:)?//|<link[^>]* href=["'](?:https?:)?//"""
    )
    assert not [path.name for path in site.rglob("*.html") if asked.search(path.read_text())]
    assert asked.search('<script src="https://example.org/x.js">')


def test_the_reference_has_every_command_and_every_module_of_the_vocabulary(site, website):
    commands = Page(site / "help.html").ids
    assert {f"bench-{name}" for name in website.cli.COMMANDS} | {"bench-board-build"} <= commands
    text = (site / "help.html").read_text()
    assert "--print_config" in text
    assert not re.search(r"0x[0-9a-f]{6}|\x08", text), "an address in memory, or a backspace"
    assert {"bench.contract.Method", "bench.contract.Task.score"} <= Page(
        site / "python" / "contract.html"
    ).ids
    modules = {path.stem for path in (ROOT / "bench").glob("*.py")} - set(website.NO_VOCABULARY)
    assert {path.stem for path in (site / "python").glob("*.html")} == modules


@pytest.fixture(scope="module")
def opened(site, website):
    """Opens a page of the site, which here has the board of the example; cut off from every network."""
    shutil.rmtree(site / "board")
    shutil.copytree(example().site, site / "board")
    website.link_back(site / "board")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)

        def page_of(name, width, scheme):
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            context.set_offline(True)
            page = context.new_page()
            page.wrong = []
            page.on("console", lambda said: page.wrong.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: page.wrong.append(str(error)))
            page.on(
                "request", lambda asked: page.wrong.append(asked.url) if asked.url[:4] == "http" else None
            )
            page.on("requestfailed", lambda asked: page.wrong.append(asked.url))
            page.goto((site / f"{name}.html").as_uri())
            return page

        yield page_of
        browser.close()


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
def test_pages_fit_the_screen_and_ask_nobody(opened, width, scheme):
    for name in SHOWN:
        page = opened(name, width, scheme)
        over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, f"{name} scrolls sideways by {over} pixels"
        assert page.locator("h1").count() == 1, name
        assert not page.wrong, name
        page.context.close()


@needs_browser
@pytest.mark.parametrize("words", ["radial", "cifar10", "split_digits"])
def test_search_finds(opened, words):
    """Words with digits too: the search library's index of such words is wrong, so digits are left out."""
    page = opened("tutorial", 1280, "light")
    page.locator(".md-search__input").click()
    page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for()
    page.locator(".md-search__input").press_sequentially(words)
    found, letters = page.locator(".md-search-result__item"), words.strip("0123456789")
    # A link carries what it was found for, and those of the first letters are there before the whole word's.
    found.locator(f"a[href$='?h={letters}']").first.wait_for()
    assert found.count() > 3
    page.goto(found.first.locator("a").first.get_attribute("href"))
    assert letters in page.locator("article").inner_text().lower()
    assert not page.wrong


@needs_browser
def test_site_and_board_lead_to_each_other(opened, site):
    page = opened("index", 1280, "light")
    page.locator(".md-tabs__link", has_text="Board").click()
    page.wait_for_url("**/board/index.html")
    page.locator("tbody a").first.click()
    page.wait_for_url("**/board/tasks/*.html")
    page.get_by_role("link", name="Documentation").click()
    page.wait_for_url(f"**/{site.name}/index.html")
    assert not page.wrong

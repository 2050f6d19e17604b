"""The board's pages in the system's Chromium: with and without scripts, light and dark, wide and narrow.

BENCH_REQUIRE_BROWSER=1 makes a missing browser a failure.
"""

import os
import shutil

import pytest
from axe_playwright_python.sync_playwright import Axe
from boards import example, identity
from playwright.sync_api import sync_playwright

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("BENCH_REQUIRE_BROWSER") != "1", reason="no Chromium on this system"
)
KINDS = ("index", "overall", "task", "method", "compare", "reading", "submitting", "changes")


@pytest.fixture(scope="module")
def browser():
    """One browser for all tests."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def opened(browser):
    """Opens a page of the example, cut off from every network; closes it afterwards."""
    contexts = []

    def page_of(kind, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.wrong = []
        page.on("console", lambda said: page.wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        page.on("requestfailed", lambda request: page.wrong.append(request.url))
        page.goto(place(kind).resolve().as_uri())
        return page

    yield page_of
    for context in contexts:
        context.close()


def place(kind):
    """The file of a kind of page."""
    site = example().site
    known = {
        "task": site / "tasks" / f"{identity(0)}.html",
        "method": site / "methods" / "theirs" / "method+rate=0.1.html",
        "compare": min((site / "compare" / identity(0)).glob("*.html")),
    }
    return known.get(kind, site / f"{kind}.html")


def names(page):
    """Entries of the ranked table that are seen, in order."""
    rows = page.locator("#ranked tbody tr:visible th")
    return rows.all_inner_texts()


def ranked():
    """Entries in the order of the ranking."""
    return [row["name"] for row in example().board.tables[identity(0)]["entries"] if row["ranks"]]


@pytest.mark.parametrize("scripts", [True, False])
def test_the_order_of_the_table_is_the_rankings_with_and_without_scripts(opened, scripts):
    page = opened("task", java_script_enabled=scripts)
    assert names(page) == ranked()
    assert page.locator("#ranked caption, #standing").count() >= 1
    shown = page.locator("#ranked tbody tr td:first-child").all_inner_texts()
    table = example().board.tables[identity(0)]["entries"]
    ranks = [row["ranks"] for row in table if row["ranks"]]
    assert shown == [str(a) if a == b else f"{a}\N{EN DASH}{b}" for a, b in ranks]
    assert page.locator("input").count() == (1 if scripts else 0)
    assert page.wrong == []


@pytest.mark.parametrize("kind", KINDS)
def test_pages_need_no_network_and_break_no_policy(opened, kind):
    """The policy of a page that refused its own style or script would be told on the console."""
    page = opened(kind)
    assert page.wrong == []
    assert page.locator("h1").inner_text()
    assert page.evaluate("getComputedStyle(document.querySelector('main')).maxWidth") != "none"


def test_the_policy_holds(opened):
    """Negative control: a script put into the page does not run."""
    page = opened("index")
    page.evaluate("() => { const s = document.createElement('script'); s.text = 'window.ran = 1'; "
                  "document.body.append(s); }")  # fmt: skip
    assert page.evaluate("window.ran === undefined")
    assert any("Content Security Policy" in said for said in page.wrong)


def test_filter_leaves_the_rows_that_hold_all_words(opened):
    page = opened("task")
    page.get_by_label("Filter rows").fill("method+rate")
    assert names(page) == ["method+rate=0.1 (theirs)"]
    assert page.locator("output.filter").inner_text() == f"1 of {len(ranked())}"
    page.get_by_label("Filter rows").fill("no such thing")
    assert names(page) == []
    page.get_by_label("Filter rows").fill("")
    assert names(page) == ranked()


def test_sorting_by_keyboard_and_back(opened):
    page = opened("task")
    head = page.locator("#ranked thead th").nth(2)
    button = head.get_by_role("button")
    button.focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert names(page) == ranked()  # a loss: the lowest is first
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending"
    assert names(page) == ranked()[::-1]
    page.locator("#ranked thead th").nth(1).get_by_role("button").click()
    assert names(page) == sorted(names(page))
    assert page.locator("#ranked [aria-sort]").count() == 1


def test_what_is_missing_is_last_in_both_directions(opened):
    page = opened("overall")
    table = page.locator("table", has=page.locator("caption, th", has_text=identity(1))).last
    button = table.locator("thead th").nth(2).get_by_role("button")
    for _ in range(2):
        button.click()
        cells = table.locator("tbody tr td:nth-child(3)").evaluate_all(
            "cs => cs.map(c => c.dataset.value || '')"
        )
        assert "" in cells
        first = cells.index("")
        assert first > 0
        assert set(cells[first:]) == {""}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(opened, kind, scheme):
    page = opened(kind, color_scheme=scheme, bypass_csp=True)
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_negative_control_axe_sees_grey_on_grey(opened):
    page = opened("index", bypass_csp=True)
    page.evaluate("document.querySelector('.lead').style.color = '#ccc'")
    assert Axe().run(page).violations_count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_no_page_scrolls_sideways_on_a_phone(opened, kind):
    page = opened(kind, viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    regions = page.locator(".scroll")
    for number in range(regions.count()):
        region = regions.nth(number)
        assert region.get_attribute("tabindex") == "0"
        assert region.get_attribute("aria-labelledby") or region.get_attribute("aria-label")


def test_the_keyboard_reaches_the_content_first_and_shows_where_it_is(opened):
    page = opened("task")
    page.keyboard.press("Tab")
    focused = "document.activeElement"
    assert page.evaluate(f"{focused}.textContent") == "To the content"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate(f"document.querySelector('main').contains({focused})")
    assert page.evaluate(f"getComputedStyle({focused}).outlineStyle") == "solid"


def test_drawings_take_the_colours_of_the_page_and_their_names_lie_apart(opened):
    """Marks are told from the paper in light and in dark, and no name of a drawing covers another."""
    seen = set()
    for scheme in ("light", "dark"):
        page = opened("overall", color_scheme=scheme, viewport={"width": 390, "height": 800})
        stroke = page.evaluate("getComputedStyle(document.querySelector('svg.front circle.on')).stroke")
        assert stroke != page.evaluate("getComputedStyle(document.body).backgroundColor")
        seen.add(stroke)
    assert len(seen) == 2
    for drawing in page.locator("svg.front").all():
        boxes = [text.bounding_box() for text in drawing.locator("text:not(.axis)").all()]
        assert boxes
        for k, one in enumerate(boxes):
            for other in boxes[:k]:
                across = one["x"] < other["x"] + other["width"] and other["x"] < one["x"] + one["width"]
                down = abs(one["y"] - other["y"]) < one["height"] / 2
                assert not (across and down)


def test_dark_is_dark_and_print_is_plain(opened):
    back = "getComputedStyle(document.body).backgroundColor"
    light, dark = (opened("index", color_scheme=scheme).evaluate(back) for scheme in ("light", "dark"))
    assert sum(map(int, light[4:-1].split(","))) > 700 > 120 > sum(map(int, dark[4:-1].split(",")))
    page = opened("task", color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate(back) == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    assert not page.locator("label.filter").first.is_visible()
    assert names(page) == ranked()

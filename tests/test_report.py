"""`bench report`: what the page says, that it needs nothing, and that no stranger's record acts in it."""

import base64
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import numpy as np
import pytest
from scipy import stats

from bench import cli
from bench.commands import formats
from bench.intervals import Interval
from bench.leaderboard.evidence.entries import directory_of
from bench.runs.registry import misleads
from bench.tasks.split_mnist import SplitMNIST

EXAMPLE = json.loads((directory_of("split_mnist", "mfvi") / "record.json").read_text())
VALUES = (0.93, 0.95, 0.94)
SCRIPT = "<script>alert(1)</script>"
SVG = f'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9" onload="alert(2)">{SCRIPT}</svg>'


KNOWN = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "div"),
    *("h1", "h2", "h3", "h4", "p", "br", "span", "strong", "code", "figure", "figcaption"),
    *("table", "thead", "tbody", "tr", "th", "td", "img", "svg", "polyline", "circle"),
}
"""Every tag of a report."""


class Page(HTMLParser):
    """Tags with their attributes, and the text without those of style and title."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.pieces, self.open = [], [], []
        self.feed(html)
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag, attributes):
        """Keeps the tag."""
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_data(self, data):
        """Keeps what is shown."""
        if self.open[-1:] not in (["style"], ["title"]):
            self.pieces.append(data)

    def images(self):
        """What figures hold."""
        sources = [attributes["src"] for tag, attributes in self.tags if tag == "img"]
        return [base64.b64decode(source.partition("base64,")[2]) for source in sources]


def needs_nothing_and_runs_nothing(html):
    """No script, no handler, no link, and nothing that a browser would fetch."""
    page = Page(html)
    assert {tag for tag, _ in page.tags} <= KNOWN
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("href", "action", "srcset", "xlink:href")
            if name == "src":
                assert re.fullmatch(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", value)
            if name == "style":
                assert re.fullmatch(r"background: #[0-9a-f]{6}", value)
    assert "url(" not in html
    assert "@import" not in html
    (policy,) = (a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    return page


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Calls `bench report ARGUMENTS` in a folder of its own; returns code, out, err."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        capsys.readouterr()
        return cli.main(["report", *map(str, arguments)]), *capsys.readouterr()

    return call


def made(method="mfvi", seed=0, value=0.5, out="runs", figure=SVG, **changes):
    """Writes a run with a figure and curves; changes name fields of its record, such as `task__version`."""
    record = json.loads(json.dumps(EXAMPLE))
    record["method"] |= {"name": method, "identity": method}
    record |= {"seed": seed, "metrics": dict.fromkeys(EXAMPLE["metrics"], 0.125)}
    record["metrics"]["average_accuracy"] = value
    for name, change in changes.items():
        part, _, field = name.rpartition("__")
        (record[part] if part else record)[field] = change
    directory = Path(out, "split_mnist", method, f"standard-seed{seed}")
    (directory / "figures").mkdir(parents=True)
    (directory / "figures" / "matrix.svg").write_text(figure)
    (directory / "curves.csv").write_text("curve,series,x,value\nloss,step 1,1,2.5\nloss,step 1,3,0.5\n")
    (directory / "record.json").write_text(json.dumps(record))
    return directory


def test_a_report_says_what_was_run_and_what_came_out(call):
    for seed, value in enumerate(VALUES):
        made(seed=seed, value=value)
    made(
        "map",
        0,
        0.25,
        method__settings={"learning_rate": 0.5, "optimizer": None},
        command="bench run map here",
    )
    made(
        "map",
        1,
        None,
        status="diverged",
        reason="epoch 3: the loss is nan",
        undefined={"average_accuracy": "gone"},
    )
    assert call("runs")[:2] == (0, "report.html\n")
    page = needs_nothing_and_runs_nothing(Path("report.html").read_text())
    mean = Interval(np.mean(VALUES), *stats.t.interval(0.95, 2, np.mean(VALUES), stats.sem(VALUES)), "")
    spec = SplitMNIST(SplitMNIST.settings_class(dataset="mnist")).spec
    for said in (
        *("map, mfvi on split_mnist", "5 runs.", "split_mnist, standard", spec.question, spec.source),
        "What would mislead: " + misleads(SplitMNIST).replace("`", ""),
        *(formats.interval(mean), "0.2500 (n = 1: no interval)"),
        "mean over s of accuracy after the last step (fraction, higher is better)",
        *("epoch 3: the loss is nan", "average_accuracy gone (seed 1)", "bench run map here"),
        *("method.learning_rate 0.5", "method.optimizer null", "tuning by_hand", "trainer.precision 32-true"),
        *(f"torch {EXAMPLE['environment']['torch']}", f"commit {EXAMPLE['provenance']['commit']}"),
        *("loss: 0.5000 to 2.500, x from 1 to 3", "step 1", "matrix, seed 0"),
    ):
        assert " ".join(said.split()) in re.sub(r" (?=[.,;)])", "", page.text.replace("( ", "(")), said
    assert page.images() == [SVG.encode()] * 2  # of the first completed run of each method
    polylines = [attributes["points"] for tag, attributes in page.tags if tag == "polyline"]
    assert polylines == ["0.0,0.0 320.0,120.0"] * 5


def test_where_runs_differ_their_seeds_are_said(call):
    for seed in range(3):
        made(seed=seed, environment__threads=2 if seed == 1 else 8)
    call("runs")
    text = Page(Path("report.html").read_text()).text
    assert "threads 8 (seed 0, seed 2); 2 (seed 1)" in text
    assert f"python {EXAMPLE['environment']['python']} torch" in text


def test_the_same_runs_give_the_same_bytes_wherever_they_lie(call):
    folders = [made(seed=seed) for seed in range(3)]
    call("runs")
    call(*reversed(folders), "--to", "again.html")
    shutil.copytree("runs", "elsewhere/runs")
    call("elsewhere", "--to", "deep/er/third.html")
    first = Path("report.html").read_bytes()
    assert Path("again.html").read_bytes() == first == Path("deep/er/third.html").read_bytes()
    assert b"elsewhere" not in Path("deep/er/third.html").read_bytes()


HOSTILE = {
    "method__settings": {SCRIPT: 'javascript:alert(1)"><img src=x onerror=alert(1)>'},
    "command": f"bench run {SCRIPT} {{{{ 7 * 7 }}}} {{% include '/etc/passwd' %}}",
    "reason": None,
    "undefined": {},
    "environment__device": "'><svg onload=alert(1)>",
    "validation": {"</style><script>": 1.0},
    "diagnostics": {"<!--": 1.0},
    "trainer": {"devices": "</td></table><iframe src=https://example.org>"},
}


def hostile(out="runs"):
    """A stranger's run whose every free text is markup."""
    directory = made(out=out, **HOSTILE)
    (directory / "curves.csv").write_text(
        f'curve,series,x,value\n{SCRIPT},"a""><b onclick=x>",1,nan\n{SCRIPT},s,1,2\n'
    )
    (directory / "figures" / '"><script>.svg').write_text(SVG)
    (directory / "figures" / "\u202egpj.svg").write_text(SVG)
    return directory


def test_a_strangers_record_is_text_and_nothing_else(call):
    hostile()
    assert call("runs")[0] == 0
    html = Path("report.html").read_text()
    page = needs_nothing_and_runs_nothing(html)
    for said in (
        SCRIPT,
        HOSTILE["command"],
        HOSTILE["environment__device"],
        HOSTILE["trainer"]["devices"],
        "<!--",
    ):
        assert said in page.text
    assert r"\u202egpj" in page.text
    assert "\u202e" not in html
    assert len(page.images()) == 3


def test_law_catches_a_page_without_escaping(call, monkeypatch):
    """Negative control: the same records through a template that trusts them."""
    environment = jinja2.Environment
    monkeypatch.setattr(
        jinja2, "Environment", lambda **options: environment(**options | {"autoescape": False})
    )
    hostile()
    call("runs")
    with pytest.raises(AssertionError):
        needs_nothing_and_runs_nothing(Path("report.html").read_text())


def test_bidi_characters_make_a_record_damaged(call):
    made(seed=0, reason="\u202eevil")
    code, out, err = call("runs")
    assert (code, out) == (2, "")
    assert "damaged" in err
    assert "\u202e" not in err


@pytest.mark.parametrize("trick", ["link", "folder", "large", "other", "pipe"])
def test_what_is_no_figure_is_left_out(call, tmp_path, trick):
    """A link could lead to a file of the reader's own, which the report would then show to others."""
    directory = made()
    path = directory / "figures" / "matrix.svg"
    (tmp_path / "own.svg").write_text("<svg >secret</svg>")
    path.unlink()
    match trick:
        case "link":
            path.symlink_to(tmp_path / "own.svg")
        case "folder":
            path.parent.rmdir()
            (tmp_path / "mine").mkdir()
            (tmp_path / "mine" / "matrix.svg").write_text("<svg >secret</svg>")
            path.parent.symlink_to(tmp_path / "mine")
        case "large":
            path.write_text("<svg >" + " " * 2**21)
        case "other":
            path.write_text("GIF89a")
        case "pipe":
            os.mkfifo(path)
    if trick in ("link", "folder", "pipe"):  # such a run is a damaged one
        code, _, err = call("runs")
        assert (code, Path("report.html").exists()) == (2, False)
        assert "is damaged and not counted" in err
        return
    assert call("runs")[0] == 0
    page = Page(Path("report.html").read_text())
    assert page.images() == []
    assert "figures left out, being links, no SVG or over 2 MiB: 1" in page.text


def test_figures_are_drawn_again_where_none_lie_beside_the_record(call):
    directory = directory_of("split_mnist", "map")
    assert call(directory)[0] == 0
    page = needs_nothing_and_runs_nothing(Path("report.html").read_text())
    assert len(page.images()) == 2
    assert all(content.startswith(b"<svg") for content in page.images())


def test_what_cannot_be_reported_is_said_in_one_line(call):
    directory = made()
    for arguments, said in (
        (["nowhere"], "nowhere is no folder"),
        (["runs", "--to", "runs/record.json"], "must end in .html"),
        (["runs", "--to", f"{directory}/record.json/x.html"], "cannot write"),
    ):
        code, out, err = call(*arguments)
        assert (code != 0, out) == (True, "")
        assert said in err
        assert err.count("\n") == 1
    Path("empty").mkdir()
    assert call("empty")[2] == "bench: no finished run at or below empty\n"
    assert not Path("report.html").exists()


def test_a_task_that_is_not_known_here_is_reported_without_units(call):
    made(task__name="nowhere.tasks:Mine", metrics={"average_accuracy": 0.5})
    assert call("runs")[0] == 0
    text = needs_nothing_and_runs_nothing(Path("report.html").read_text()).text
    assert "The task is not known where this report was made" in text
    assert "0.5000 (n = 1: no interval)" in text


@pytest.mark.slow
def test_a_browser_runs_and_fetches_nothing_and_the_page_fits_a_phone(call, tmp_path):
    """With a hostile record, in the system's Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        missing = pytest.fail if os.environ.get("BENCH_REQUIRE_BROWSER") == "1" else pytest.skip
        missing("no Chromium on this system")
    from playwright.sync_api import sync_playwright

    hostile()
    call("runs")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 640})
        said, asked = [], []
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("console", lambda message: said.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        assert said == []
        assert [url for url in asked if not url.startswith("data:image/svg")] == [page.url]
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        browser.close()

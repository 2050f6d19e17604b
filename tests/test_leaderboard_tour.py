"""docs/leaderboard.md followed to the letter: run, submit, verify, add, build, and the page in a browser."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from test_site_browser import ARGUMENTS, CHROMIUM, names

MAIN = Path(__file__).resolve().parent.parent
PAGE = (MAIN / "docs" / "leaderboard.md").read_text()
TASK = "split_digits"
METHODS = ["map", "ewc", "mc_dropout"]

pytestmark = pytest.mark.slow


def block(kind, after):
    """The first block of code of a kind below a heading."""
    return re.search(rf"```{kind}\n(.*?)```", PAGE[PAGE.index(after) :], re.DOTALL)[1]


def is_dirty():
    """Whether the sources hold what no commit holds: then no run of them can be submitted."""
    found = subprocess.run(
        ["git", "status", "--porcelain", "--", "*.py", "*.toml"], cwd=MAIN, capture_output=True, text=True
    )
    return found.returncode != 0 or bool(found.stdout.strip())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder in which every command of the page was given, with what each of them printed."""
    if is_dirty():  # of a developer's tree it may be; a clone that CI tests is never changed
        changed = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        changed("the sources are changed, and no run of them can be submitted: commit, then run again")
    folder = tmp_path_factory.mktemp("tour")
    (folder / "meta.toml").write_text(block("toml", "`meta.toml` holds"))
    (folder / "grid.yaml").write_text(block("yaml", "### The whole way, tried"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    said = {}
    for line in block("sh", "### The whole way, tried").splitlines():
        command, *arguments = shlex.split(line)
        assert command == "bench"
        done = subprocess.run(
            [sys.executable, "-m", "bench", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{line}: {done.stderr[-2000:]}"
        said[arguments[0]] = done.stdout
    return folder, said


def test_submission_is_accepted_as_recomputed_and_its_arrays_are_in_the_store(built):
    folder, said = built
    assert said["verify"].startswith("accepted (recomputed): 9 runs, 3 entries")
    entry = folder / "trial" / "submissions" / "my-methods"
    assert {path.name for path in (entry / TASK).iterdir()} == {f"{m}+learning_rate=0.002" for m in METHODS}
    assert not list(entry.rglob("*.safetensors"))
    assert len(list((folder / "trial" / "store").rglob("*.safetensors"))) == 9


@pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("BENCH_REQUIRE_BROWSER") != "1", reason="no Chromium on this system"
)
def test_page_shows_the_ranking_without_a_network(built):
    folder, _ = built
    table = json.loads((folder / "site" / "tasks" / f"{TASK}.json").read_text())
    expected = [row["name"] for row in table["entries"]]
    assert {row["method"].partition("+")[0] for row in table["entries"]} == set(METHODS)
    means = [row["mean"] for row in table["entries"]]
    assert means == sorted(means, reverse=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        context = browser.new_context(viewport={"width": 360, "height": 780})
        context.set_offline(True)
        page = context.new_page()
        page.goto((folder / "site" / "tasks" / f"{TASK}.html").resolve().as_uri())
        assert [name.removesuffix(" declares none") for name in names(page)] == expected
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.get_by_label("Filter rows").first.fill("ewc")
        assert [name.partition("+")[0] for name in names(page)] == ["ewc"]
        browser.close()


def test_neighbours_have_compare_pages(built):
    folder, _ = built
    assert len(list((folder / "site" / "compare" / TASK).glob("*.html"))) >= 2

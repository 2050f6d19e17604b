"""Pictures of a built board, taken in the system's Chromium.

    python docs/screenshots.py site docs/leaderboard

Takes index, a task page and a compare page, wide and light, wide and dark, and 360 pixels narrow.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
LOOKS = {"light": (1280, 900, "light"), "dark": (1280, 900, "dark"), "narrow": (360, 780, "light")}


def pages(site: Path) -> dict[str, Path]:
    """The pages that are shown: of several tasks and pairs the first that is ranked."""
    every = sorted((site / "compare").glob("*/*.html"))
    compared = [path for path in every if "Example by example" in path.read_text()] or every
    task = compared[0].parent.name
    return {
        "index": site / "index.html",
        "task": site / "tasks" / f"{task}.html",
        "compare": compared[0],
    }


def take(browser: Browser, site: Path, to: Path) -> None:
    """Writes a picture of the first screen of every page in every look."""
    to.mkdir(parents=True, exist_ok=True)
    for look, (width, height, scheme) in LOOKS.items():
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        for name, path in pages(site).items():
            page = context.new_page()
            page.goto(path.resolve().as_uri())
            page.screenshot(path=to / f"{name}-{look}.png")
        context.close()


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, help="folder that bench board build wrote")
    parser.add_argument("to", type=Path, help="folder for the pictures")
    arguments = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        take(browser, arguments.site, arguments.to)
        browser.close()


if __name__ == "__main__":
    main()

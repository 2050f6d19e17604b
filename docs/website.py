"""Builds the site: the pages of this folder, what is made of the code, and the board.

    python docs/website.py

mkdocs calls the functions `on_..` (mkdocs.yml). The reference is made of the parsers and the docstrings,
pages of the notebooks; contributing and changes lie at the root of the project.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from bench import cli

ROOT = Path(__file__).parent.parent
SITE = ROOT / "website"
AT_THE_ROOT = ("CONTRIBUTING.md", "CHANGELOG.md")
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))
NO_VOCABULARY = ("__init__", "__main__", "cli", "peers")
NO_BOARD = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Board</title>
<p>The board is not part of this copy: <code>make site</code> builds it, where the arrays of the submissions
are at hand. <a href="../index.html">Documentation</a></p></html>
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages of a folder to the section of its name, after those that mkdocs.yml names."""
    every = [str(path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs").glob("*/*.md"))]
    every += [name for name, _ in pages()]
    for title, entries in sections(config.nav or []):
        named = {
            page
            for entry in entries
            if isinstance(entry, dict)
            for page in entry.values()
            if isinstance(page, str)
        }
        entries += [page for page in every if page.startswith(f"{title.lower()}/") and page not in named]
    return config


def sections(nav: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Title and entries of every section, those within others too."""
    for title, entries in (item for entry in nav if isinstance(entry, dict) for item in entry.items()):
        if isinstance(entries, list):
            yield title, entries
            yield from sections(entries)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made, and takes the notebooks out."""
    for name, text in pages():
        files.append(File.generated(config, name, content=text))
    for path in NOTEBOOKS:
        files.remove(files.src_uris[path.name])
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Links that leave the folder of the pages lead to the copies here, or are text if there is none."""
    out = "../" * (page.file.src_uri.count("/") + 1)
    for name in AT_THE_ROOT:
        markdown = markdown.replace(f"]({out}{name}", f"]({out.removeprefix('../')}{name}")
    for path in NOTEBOOKS:
        markdown = markdown.replace(f"]({path.name}", f"]({path.stem}.md")
    return re.sub(rf"\[([^\]]+)\]\({re.escape(out)}[^)]*\)", r"\1", markdown)


def pages() -> Iterator[tuple[str, str]]:
    """Name and text of every page that is made."""
    for name in AT_THE_ROOT:
        yield name, (ROOT / name).read_text().replace("](docs/", "](")
    for path in NOTEBOOKS:
        yield f"{path.stem}.md", notebook(json.loads(path.read_text()))
    yield "help.md", helps()
    for path in sorted((ROOT / "bench").glob("*.py")):
        if path.stem not in NO_VOCABULARY:
            yield f"python/{path.stem}.md", f"# bench.{path.stem}\n\n::: bench.{path.stem}\n"
    yield "board/index.html", NO_BOARD


def notebook(read: dict[str, Any]) -> str:
    """A notebook as a page: its text, its code, what the code gave."""
    parts = []
    for cell in read["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for given in cell.get("outputs", []):
            data = {kind: "".join(value) for kind, value in given.get("data", {}).items()}
            if "image/png" in data:
                image = "".join(data["image/png"].split())
                parts.append(f"![what the code draws](data:image/png;base64,{image})")
            elif "text/html" in data:
                table = re.sub(r"<style.*?</style>", "", data["text/html"], flags=re.DOTALL)
                parts.append(re.sub(r"<table[^>]*>", "<table>", table))
            elif "text/plain" in data:
                parts.append(f"```text\n{data['text/plain']}\n```")
    return "\n\n".join(parts) + "\n"


def helps() -> str:
    """Every command with its help, as its own parser prints it."""
    parts = ["# Help of every command\n\nWhat `bench COMMAND --help` prints. METHOD and TASK add settings."]
    for name, (_, says) in cli.COMMANDS.items():
        text = help_of(name)
        parts.append(f"## bench {name}\n\n{says[0].upper()}{says[1:]}.\n\n```text\n{text}\n```")
        actions = re.findall(r"^  (\w+) ", text.partition("actions (each")[2], re.MULTILINE)
        parts += [f"### bench {name} {action}\n\n```text\n{help_of(name, action)}\n```" for action in actions]
    return "\n\n".join(parts) + "\n"


def help_of(*command: str) -> str:
    """What a command prints when it is asked for help, at 80 columns."""
    os.environ["COLUMNS"] = "80"
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        cli.main([*command, "--help"])
    shown = re.sub(r".\x08", "", said.getvalue().strip())  # the parser takes a blank back by a backspace
    return re.sub(r"<function\s+(\w+)\s+at\s+0x\w+>", r"\1", shown)


def add_board(site: Path) -> str:
    """Builds the board below the site, with links back; says in one line what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "board"
        command = [sys.executable, "-m", "bench", "board", "build", "--out", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if not (built / "index.html").is_file():
            why = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
            return f"the board is not part of the site: {why}"
        link_back(built)
        shutil.rmtree(site / "board", ignore_errors=True)
        shutil.copytree(built, site / "board")
    wrong = f", but {done.stderr.strip().splitlines()[-1]}" if done.returncode else ""
    return f"with the board: {site / 'board' / 'index.html'}{wrong}"


def link_back(board: Path) -> None:
    """Puts a link to the documentation, one folder above, into the navigation of each page."""
    start = '<nav aria-label="Pages">\n'
    for path in board.rglob("*.html"):
        home = "../" * len(path.relative_to(board).parts) + "index.html"
        path.write_text(path.read_text().replace(start, f'{start}<a href="{home}">Documentation</a>\n'))


def main() -> int:
    """Builds the site; 1 if a link or a page is wrong."""
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet"], cwd=ROOT, env=quiet)
    if done.returncode:
        return 1
    print(f"built: {SITE / 'index.html'}")
    print(add_board(SITE))
    return 0


if __name__ == "__main__":
    sys.exit(main())

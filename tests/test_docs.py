"""The documentation is followed to the letter: its files are written, its commands are run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def copy_of_the_project(folder: Path) -> dict[str, str]:
    """Copies the source and returns an environment in which `bench` and `python` use the copy."""
    for name in ("bench", "methods", "tasks", "leaderboard", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "records")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("methods", "tasks", "leaderboard"):  # what package-dir does in an installation
        (folder / "bench" / name).symlink_to(folder / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(folder), "COLUMNS": "200"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "listed", "record"),
    [
        ("adding-a-method.md", "fixed_noise", "runs/split_digits*/fixed_noise/smoke-seed0/record.json"),
        ("adding-a-task.md", "digits_iid", "runs/digits_iid*/mfvi/smoke-seed0/record.json"),
    ],
)
def test_the_page_is_right_to_the_letter(page, listed, record, tmp_path):
    environment = copy_of_the_project(tmp_path)
    blocks = FENCE.findall((ROOT / "docs" / page).read_text())
    files = [(name, content) for kind, name, content in blocks if kind == "python" and name]
    commands = [line for kind, _, content in blocks if kind == "sh" for line in content.splitlines()]
    assert len(files) == 2, "adding one must take two files"
    assert len(commands) == 3

    for name, content in files:
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(content)
    outputs = {}
    for command in commands:
        done = subprocess.run(
            command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        outputs[command.split()[0:2][-1]] = done.stdout
    assert listed in outputs["list"]
    assert re.search(r"\d+ passed", outputs["-m"])
    assert list(tmp_path.glob(record))


@pytest.mark.parametrize("page", ["adding-a-method.md", "adding-a-task.md"])
def test_the_code_of_the_page_is_linted(page, tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for kind, name, content in FENCE.findall((ROOT / "docs" / page).read_text()):
        if kind == "python" and name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [Path(sys.executable).parent / "ruff", *command, "."],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_generated_parts_of_the_documentation_are_current():
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
GENERATED = re.compile(r"^<!-- generated: .+? -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def loose_numbers(pages):
    """Every `mean ± error` that stands in the prose of a page and in no generated part of any page."""
    measured = "".join(part for text in pages for part in GENERATED.findall(text))
    prose = [GENERATED.sub("", text).partition("## Published numbers")[0] for text in pages]
    found = [number for text in prose for number in re.findall(r"\d[\d.]* ± \d[\d.]*\d", text)]
    return [number for number in found if number not in measured]


def test_numbers_in_prose_are_those_of_generated_parts():
    assert not loose_numbers([page.read_text() for page in PAGES])
    typed = "<!-- generated: x -->\n0.19 ± 0.01\n<!-- end -->\nIt is 0.19 ± 0.01, not 0.19 ± 0.02."
    assert loose_numbers([typed]) == ["0.19 ± 0.02"]


def anchors(page):
    """Where a link may lead within a page: its headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#]*)#?([^)]*)\)", page.read_text()):
            there = page.parent / target if target else page
            where = f"{page.relative_to(ROOT)} links to {target}#{anchor}"
            assert there.exists(), where
            assert not anchor or anchor in anchors(there), where

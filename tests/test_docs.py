"""The documentation is followed to the letter: its files are written, its commands are run."""

import ast
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pages
import pytest
from stored import at_hand

from bench import cli
from bench.contract import Budget
from bench.leaderboard.evidence.entries import committed
from bench.tasks import own_table

ROOT = Path(__file__).parent.parent


def copy_of_the_project(folder: Path) -> dict[str, str]:
    """Copies the source and returns an environment in which `bench` and `python` use the copy."""
    for name in ("bench", "methods", "tasks", "leaderboard", "tests", "docs"):
        ignored = shutil.ignore_patterns("records", "figures")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(folder), "COLUMNS": "200"}


class Cheat(NamedTuple):
    """A change to the first file of a page, and what of the laws must then fail."""

    honest: str
    cheating: str
    law: str
    said: str


EXAMPLES = {
    "adding-a-method.md": (
        "langevin",
        "runs/iris_depth*/langevin*/smoke-seed0/record.json",
        Cheat(
            "size**0.5 * self.langevin_noise(w)",
            "0.5 * size**0.5 * self.langevin_noise(w)",
            "tests/conformance/test_statements.py -k what_is_declared_holds[langevin]",
            "mean of z0 z0",
        ),
    ),
    "adding-a-task.md": (
        "two_moons",
        "runs/two_moons*/mfvi/smoke-seed0/record.json",
        Cheat(
            'TensorDataset(*self.own_data("train"))',
            'TensorDataset(*map(torch.cat, zip(self.own_data("train"), self.own_data("test"), strict=True)))',
            "tests/conformance/test_truth.py -k moves_nothing_else[two_moons]",
            "held-out truth reaches what is given to fit",
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("page", EXAMPLES)
def test_the_page_is_right_to_the_letter(page, tmp_path):
    """Two files, every law green; and red where one of them cheats, so the laws do reach a new file.

    Further cheats are in `conformance`, made of the same files.
    """
    listed, record, cheat = EXAMPLES[page]
    environment = copy_of_the_project(tmp_path)
    files = [block for block in pages.blocks(page) if block.language == "python" and block.file]
    commands = [line for b in pages.blocks(page) if b.language == "sh" for line in b.text.splitlines()]
    assert len(files) == 2, "adding one must take two files"
    assert len(commands) == 3

    # A test that hangs says where, before the limit ends it: one of hanging, not of a slow machine.
    environment["PYTEST_ADDOPTS"] = "-o faulthandler_timeout=600"

    def call(command):
        try:
            return subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200
            )
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"{command} hangs\n{error.stdout}\n{error.stderr}")

    for block in files:
        assert not (tmp_path / block.file).exists()
        (tmp_path / block.file).write_text(block.text)
    outputs = {}
    for command in commands:
        done = call(command.split())
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        outputs[command.split()[0:2][-1]] = done.stdout
    assert listed in outputs["list"]
    assert re.search(r"\d+ passed", outputs["-m"])
    assert list(tmp_path.glob(record))

    assert files[0].text.count(cheat.honest) == 1
    (tmp_path / files[0].file).write_text(files[0].text.replace(cheat.honest, cheat.cheating))
    done = call(["python", "-m", "pytest", "-q", *cheat.law.split()])
    assert done.returncode == 1, f"{cheat}\n{done.stdout}\n{done.stderr}"
    assert cheat.said in done.stdout, done.stdout
    assert "1 failed" in done.stdout, done.stdout


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_code_of_the_page_is_linted(page, tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for block in pages.blocks(page):
        if block.language == "python" and block.file:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.text)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_generated_parts_of_the_documentation_are_current():
    at_hand((directory for directory, _ in committed()), every=True)
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
PROSE = [page for page in PAGES if not page.relative_to(ROOT).as_posix().startswith("docs/decisions")]
"""What a stranger reads; a page of decisions is looked up, and says what was thought when it was written."""
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


def test_the_first_page_is_short():
    """What a stranger sees first is read in a few minutes; everything else has a page of its own."""
    assert len((ROOT / "README.md").read_bytes()) <= 9000


WORDS = 40
NO_PROSE = re.compile(r"|\|.*|#+ .*|!\[.*|<.*|---+")


def sentences(text):
    """The sentences of a page, as words: of its prose alone, without code, tables and generated parts.

    A paragraph or an item of a list ends a sentence; so does a full stop, question or exclamation mark before
    a blank. Code counts as one word, a link as its text.
    """
    text = re.sub(r"^( *)(```+).*?^\1\2$", "\n", GENERATED.sub("\n", text), flags=re.MULTILINE | re.DOTALL)
    paragraphs = [[]]
    for line in text.splitlines():
        item = re.match(r"\s*([-*+]|\d+\.) +", line)
        is_code = line.startswith("    ") and not paragraphs[-1]
        if item or not line.strip() or is_code or NO_PROSE.fullmatch(line.strip()):
            paragraphs.append([])
        if not (is_code or NO_PROSE.fullmatch(line.strip())):
            paragraphs[-1].append(line[item.end() :] if item else line.strip())
    for lines in paragraphs:
        prose = re.sub(r"`[^`]*`", "code", " ".join(lines))
        prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", prose).replace("*", "")
        prose = re.sub(r"\b(al|Figs?|eqs?|vs|e\.g|i\.e)\. ", r"\1 ", prose)
        yield from (words for part in re.split(r"(?<=[.?!])[\"')]* ", prose) if (words := part.split()))


def too_long(text):
    """Sentences of more than `WORDS` words: their number of words and how they begin."""
    return [(len(words), " ".join(words[:8])) for words in sentences(text) if len(words) > WORDS]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_sentence_is_read_once(page):
    assert not too_long(page.read_text())


def test_long_sentences_are_found_and_short_ones_are_not():
    def words(number, end="."):
        return " ".join(["word"] * number) + end

    lines = "\n".join(["word"] * 41)
    found = {
        f"A first one. {words(41)}": 1,
        f"- {words(38, '')}\n  `some code` word word.": 1,
        f"> {words(41)}": 1,
        f"| a | b |\n\n{lines}\n": 1,
        f"{words(38, '')} [of a link](somewhere/else.md).": 1,
        f"{words(20, ';')} {words(21)}": 1,
        f"{words(40)}\n{words(40)} {words(40, '?')}": 0,
        f"- {words(30, '')}\n- {words(30, '')}\n\n{words(30, '')}\n\n    {words(50)}": 0,
        f"```sh\n{words(50)}\n```\n\n| {words(50)} |\n\n# {words(50)}\n": 0,
        f"   ```sh\n{words(50)}\n   ```\n": 0,
        f"{words(38, '')} `{words(50)}` [word]({words(9)}).": 0,
        f"{words(30)[:-1]} (Farquhar et al. {words(15)[:-1]}).": 1,
        f"<!-- generated: x -->\n{words(50)}\n<!-- end -->\n": 0,
    }
    assert {text: len(too_long(text)) for text in found} == found


def riddles(text):
    """Public docstrings that begin with a preposition or a pronoun: their subject is left to the reader."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            first = (ast.get_docstring(node) or "").split("\n")[0]
            if re.match(r"(Of|Its?|That of|Those|They|On|In|By|From|At|To|With|Without)\b", first):
                yield f"{node.name}: {first}"


@pytest.mark.parametrize("folder", ["bench", "leaderboard"])
def test_a_docstring_names_its_subject(folder):
    """Not yet those of methods and tasks: records know the hashes of their files."""
    files = [path for path in (ROOT / folder).rglob("*.py")]
    assert [riddle for path in files for riddle in riddles(path.read_text())] == []
    posed = "".join(f"def {name}():\n    'Of a cell.'\n" for name in ("note", "_own"))
    assert list(riddles(posed + "def size():\n    'Number of cells.'\n")) == ["note: Of a cell."]


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


def test_the_page_on_own_data_is_right_to_the_letter(tmp_path, monkeypatch, capsys):
    """Its commands and its Python, in its order; 3 epochs in place of 200, since it shows no score."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_table, "Budget", lambda epochs, *others: Budget(3, *others))
    shutil.copy(ROOT / "tests" / "penguins.csv", tmp_path)
    commands = 0
    for block in pages.blocks("own-data.md"):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "python":
            (tmp_path / "typed.py").write_text(block.text)
            runpy.run_path(str(tmp_path / "typed.py"))
        else:
            for command in block.text.splitlines():
                assert cli.main(shlex.split(command)[1:]) == 0, command
                commands += 1
    told = "".join(capsys.readouterr())
    (shown,) = re.findall(
        r"^```\n(penguins.csv: .*?)^```$", (ROOT / "docs/own-data.md").read_text(), re.M | re.S
    )
    assert shown in told
    assert commands == 4
    for words in ("differences hold all at once with 95%", "network my_network:make: ", "'low': "):
        assert words in told

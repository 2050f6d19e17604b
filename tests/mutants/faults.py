"""Planted faults of the science, and whether the tests see them.

A fault is one piece of text in one source file, put in the place of another. The tables beside this file
(`*.toml`, one a subject) hold them. `tried` plants one in a copy of the sources and runs the tests that
should see it there; the working tree is never touched.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LINKED = ("bench", "methods", "tasks", "leaderboard", "tests")
"""Folders of the sources; a copy has links to all else."""
LIBRARIES = (
    *("altair", "hypothesis", "jsonargparse", "pydantic", "pytorch_lightning", "rich", "scipy.optimize"),
    *("scipy.stats", "sklearn.linear_model", "sklearn.metrics", "torch.func"),
)
"""What the tests import, once for all faults."""
EVIDENCE = ("records", "submissions", "store", "manifests")
"""Folders of leaderboard/ that hold no sources."""


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: Words with hyphens between them.
        subject: What it is about.
        means: What goes wrong, in one line.
        file: Of the source, from the root.
        old: Text that stands in the file exactly once.
        new: What stands there instead.
        seen_by: Tests that should see it, as pytest names them.
        mended: The test that was written or sharpened, of a fault that was let pass at first; else empty.
    """

    name: str
    subject: str
    means: str
    file: str
    old: str
    new: str
    seen_by: tuple[str, ...]
    mended: str = ""


class Verdict(NamedTuple):
    """What came of a fault: it dies, survives, or cannot be judged; and why."""

    word: str
    said: str


def planted(folder: Path = HERE) -> list[Fault]:
    """The faults of all tables."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        given = tomllib.loads(path.read_text())
        subject = given.pop("subject")
        for name, fault in given.items():
            found.append(Fault(name, subject, **fault | {"seen_by": tuple(fault["seen_by"])}))
    return found


@cache
def _functions(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text())) if path.is_file() else ()
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def trouble(fault: Fault, root: Path = ROOT) -> str:
    """Why a fault cannot be planted or looked for, in one line; empty if it can."""
    source = root / fault.file
    times = source.read_text().count(fault.old) if source.is_file() else 0
    if times != 1:
        return f"{fault.name}: its old text stands {times} times in {fault.file}, not once"
    if not fault.seen_by:
        return f"{fault.name}: no test is named that should see it"
    for test in (*fault.seen_by, *filter(None, [fault.mended])):
        path, _, function = test.partition("::")
        if function.partition("[")[0] not in _functions(root / path):
            return f"{fault.name}: there is no test {test}"
    return ""


def copied(root: Path, to: Path, fault: Fault | None = None) -> Path:
    """A copy of the sources with a fault in it, all other files hard links; caches are files of its own."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # another file system
            shutil.copy2(source, target)

    to.mkdir()
    for entry in root.iterdir():
        if entry.name in LINKED:
            skipped = EVIDENCE if entry.name == "leaderboard" else ()
            ignore = shutil.ignore_patterns(*skipped)
            shutil.copytree(entry, to / entry.name, symlinks=True, ignore=ignore, copy_function=link)
            for name in skipped:
                if (entry / name).exists():
                    (to / entry.name / name).symlink_to(entry / name)
        elif entry.name not in (".git", ".venv"):
            (to / entry.name).symlink_to(entry)
    if fault is not None:
        path = to / fault.file
        text = path.read_text().replace(fault.old, fault.new)
        path.unlink()  # the file that it is a link to stays as it is
        path.write_text(text)
        for kept in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            kept.unlink()
    return to


class Runner:
    """Runs tests in trees, each time in a fresh fork of a process that has imported libraries (`warm.py`)."""

    def __init__(self, libraries: Sequence[str] = LIBRARIES) -> None:
        own = ("PYTEST_", "COV_", "PYTHONPATH")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        # Plugins that no test here needs take two seconds of every fork.
        environment = inherited | {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "warm.py"), *libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, tree: Path, file: str, tests: Sequence[str]) -> dict[str, Any]:
        """What came of the tests, as `warm.run` writes it; of one that ended before its time, `ended`."""
        told = tree.parent / f"{tree.name}.json"
        job = {"tree": str(tree), "file": file, "tests": list(tests), "told": str(told)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        return json.loads(told.read_text()) if told.exists() else {"ended": status}

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def untouched(root: Path, folder: Path, runner: Runner, tests: Sequence[str]) -> str:
    """Why some of the tests do not pass on the sources as they are, in one line; empty if all pass."""
    found = runner.run(copied(root, folder / "untouched"), "", tests)
    shutil.rmtree(folder / "untouched")
    for why in (found.get("failed"), found.get("broken"), found.get("outside")):
        if why:
            return f"the sources as they are do not pass: {why[0]}"
    return "" if found.get("passed") else f"no test passed on the sources as they are: {found}"


def tried(fault: Fault, root: Path, folder: Path, runner: Runner) -> Verdict:
    """Plants a fault in a copy under an empty folder, and runs the tests that should see it.

    It dies by an assertion of such a test alone: a file that cannot be imported, or code that breaks, shows
    nothing about the science.
    """
    if said := trouble(fault, root):
        return Verdict("cannot be planted", said)
    tree = copied(root, folder / fault.name, fault)
    found = runner.run(tree, fault.file, fault.seen_by)
    shutil.rmtree(tree)
    if "ended" in found:
        return Verdict("cannot be judged", f"the tests ended before their time, with status {found['ended']}")
    if found["broken"] or found["outside"]:
        return Verdict("cannot be judged", (found["broken"] or found["outside"])[0])
    if not found["imported"]:
        return Verdict("cannot be judged", f"no test imports {fault.file}")
    if not found["failed"]:
        if not found["passed"]:
            return Verdict("cannot be judged", "no test ran: all are skipped, or there is none of this name")
        return Verdict("survives", f"{len(found['passed'])} tests pass")
    (failure,) = found["failed"]
    word = "dies" if failure["asserts"] else "cannot be judged"
    return Verdict(word, f"{failure['test']}: {failure['said']}")

"""A method outside the repository goes to the board by the commands of docs/leaderboard.md alone."""

import json
import os
import re
import shlex
import subprocess
import sys

import pages
import pytest
from test_leaderboard_tour import block, is_dirty

HEADING = "### The same for a method outside the repository"
METHOD = "my_package.my_method:MyMethod"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gone(tmp_path_factory):
    """The folder in which the commands were given, and what each printed: output and errors."""
    if is_dirty():
        pytest.skip("the sources are changed, and no run of them can be submitted: commit, then run again")
    folder = tmp_path_factory.mktemp("outside")
    (file,) = [each for each in pages.blocks("leaderboard.md") if each.file]
    (folder / file.file).parent.mkdir()
    (folder / file.file).with_name("__init__.py").touch()
    (folder / file.file).write_text(file.text)
    (folder / "meta.toml").write_text(block("toml", "`meta.toml` holds"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}

    def call(line):
        command, *arguments = shlex.split(line)
        assert command == "bench"
        return subprocess.run(
            [sys.executable, "-m", "bench", *arguments],
            cwd=folder, env=environment, capture_output=True, text=True,
        )  # fmt: skip

    said = {}
    for line in block("sh", HEADING).splitlines():
        done = call(line)
        assert done.returncode == 0, f"{line}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        said[line] = done
    return folder, said, call


def printed(said, command):
    """What the last line that begins so printed."""
    return [done.stdout for line, done in said.items() if line.startswith(f"bench {command}")][-1]


def test_every_step_does_what_the_page_says(gone):
    folder, said, _ = gone
    assert [line.split()[1] for line in said] == [
        "check", "run", "run", "run", "compare", "submit", "verify", "board", "board",
    ]  # fmt: skip
    assert re.search(r"^\d+ ok, 0 failed, \d+ not applicable$", printed(said, "check"), re.MULTILINE)
    assert "your my_package.my_method.MyMethod against" in printed(said, "compare")
    assert printed(said, "verify").startswith("accepted (recomputed): 3 runs, 1 entries")
    (entry,) = json.loads((folder / "site" / "tasks" / "split_digits.json").read_text())["entries"]
    assert entry["method"] == "my_package.my_method.MyMethod"


def test_without_the_import_the_refusal_holds_the_line_that_works(gone):
    """Nothing but that line is needed."""
    folder, _, call = gone
    refused = call("bench submit runs/split_digits --to again --meta meta.toml")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    works = line.partition("the whole line: ")[2]
    assert works == f"bench submit runs/split_digits --to again --meta meta.toml --import {METHOD}"
    assert call(works).returncode == 0
    assert (folder / "again" / "submission.json").is_file()

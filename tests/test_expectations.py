"""What was named before a run, held to the commits: the naming text is older than the first record."""

import re
import subprocess
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
NAMED = yaml.safe_load((ROOT / "docs" / "expectations.yaml").read_text())
FIELDS = {"id", "about", "named", "words", "task", "method", "runs", "expected", "page"}
OPTIONAL = {"where", "claims", "records", "evidence", "remark"}
KEPT = ("leaderboard/records/", "leaderboard/submissions/reference/")
"""Where records stand, or stood: the history is asked, so that no record need still be there."""


def git(*arguments, root=ROOT):
    """What git answers, or None where it refuses."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


@pytest.fixture(scope="module")
def history():
    """Skips where git does not know what came first."""
    if git("rev-parse", "--is-inside-work-tree") is None:
        pytest.skip("no git history: this is an archive of the source")
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("no git history: this clone is shallow (git fetch --unshallow brings it)")


@cache
def added(root=ROOT):
    """Record -> the commits that added it, the record by its path below the folders of `KEPT`."""
    said = git(
        "log", "--no-renames", "--diff-filter=A", "--name-only", "--format=@%H", "--", *KEPT, root=root
    )
    commits, commit = {}, ""
    for line in said.splitlines():
        if line.startswith("@"):
            commit = line[1:]
        elif line.endswith("/record.json"):
            name = re.sub("|".join(map(re.escape, KEPT)), "", line).removesuffix("/record.json")
            commits.setdefault(name, []).append(commit)
    return commits


def came_before(entry, root=ROOT):
    """What is wrong with an entry's order: one sentence each."""
    where = entry.get("where", "docs/decisions.md")
    text = git("show", f"{entry['named']}:{where}", root=root)
    if text is None:
        return [f"{entry['id']}: no commit {entry['named']} has {where}"]
    wrong = []
    if " ".join(entry["words"].split()) not in " ".join(text.split()):
        wrong.append(f"{entry['id']}: {where} of {entry['named']} does not say: {entry['words']}")
    if git("merge-base", "--is-ancestor", entry["named"], "HEAD", root=root) is None:
        wrong.append(f"{entry['id']}: {entry['named']} is no ancestor of this checkout")
    naming = git("rev-parse", entry["named"], root=root).strip()
    for pattern in entry.get("records", []):
        runs = [name for name in added(root) if fnmatchcase(name, pattern)]
        if not runs:
            wrong.append(f"{entry['id']}: no record was ever at {pattern}")
        for commit in {commit for name in runs for commit in added(root)[name]}:
            if commit == naming or git("merge-base", "--is-ancestor", naming, commit, root=root) is None:
                wrong.append(
                    f"{entry['id']}: a record of {pattern} is in {commit[:8]}, not after {naming[:8]}"
                )
    return wrong


@pytest.mark.parametrize("entry", NAMED, ids=[entry["id"] for entry in NAMED])
def test_it_was_named_before_the_first_record(entry, history):
    assert not came_before(entry)


def test_every_entry_says_all_that_a_reader_needs():
    assert len({entry["id"] for entry in NAMED}) == len(NAMED)
    claims = {claim["id"] for claim in yaml.safe_load((ROOT / "docs" / "findings.yaml").read_text())}
    for entry in NAMED:
        assert entry.keys() >= FIELDS, entry["id"]
        assert entry.keys() <= FIELDS | OPTIONAL, entry["id"]
        assert (ROOT / "docs" / entry["page"]).is_file()
        assert claims >= set(entry.get("claims", []))
        verdicts = {expected["verdict"] for expected in entry["expected"]}
        assert verdicts <= {"holds", "fails", "undecided", "answered", "open"}
        for expected in entry["expected"]:
            assert ("found" in expected) == (expected["verdict"] != "open"), entry["id"]
        kept = "records" in entry or (ROOT / entry.get("evidence", "missing")).is_file()
        assert kept == (verdicts != {"open"}), entry["id"]


def test_what_was_named_too_late_is_told(tmp_path):
    """Three histories: named before the record, in the commit of the record, and after it."""

    def commit(name, *files):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        git("init", "-q", root=folder)
        for file, text in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        git("add", ".", root=folder)
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x", root=folder)
        return git("rev-parse", "HEAD", root=folder).strip()

    text = ("docs/decisions.md", "Named before the run:\nit is below 1.")
    record = ("leaderboard/records/task/map/standard-seed0/record.json", "{}")
    entry = {"id": "x", "words": "Named before the run: it is", "records": ["task/map/*"]}

    entry["named"] = commit("right", text)
    commit("right", record)
    assert came_before(entry, tmp_path / "right") == []
    assert "does not say" in came_before(entry | {"words": "other"}, tmp_path / "right")[0]
    assert "no record was ever" in came_before(entry | {"records": ["task/mfvi/*"]}, tmp_path / "right")[0]

    entry["named"] = commit("together", text, record)
    assert "not after" in came_before(entry, tmp_path / "together")[0]

    commit("late", record)
    entry["named"] = commit("late", text)
    assert "not after" in came_before(entry, tmp_path / "late")[0]
    assert "no commit" in came_before(entry | {"named": "0" * 40}, tmp_path / "late")[0]

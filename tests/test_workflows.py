"""The workflows on GitHub: pinned actions, least permissions, and strangers' names that are only names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parent.parent / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.y*ml"))
PINNED = {
    "actions/checkout": ("11bd71901bbe5b1630ceea73d27597364c9af683", "v4.2.2"),
    "actions/setup-python": ("a26af69be951a213d495a4c3e4e4022e16d87065", "v5.6.0"),
    "actions/upload-artifact": ("ea165f8d65b6e75b540449e92b4886f43607fa02", "v4.6.2"),
    "actions/download-artifact": ("d3f86a106a0bac45b974a628896c90dbdf5c8093", "v4.3.0"),
    "pypa/gh-action-pypi-publish": ("ed0c53931b1dc9bd32cbe73a98c7f6766f8a527e", "v1.13.0"),
}
PERMISSIONS = {"board": {"contents": "write"}, "try": {}, "publish": {"id-token": "write"}}
"""Of a job that does not only read the sources."""


def read(path):
    """A workflow; YAML 1.1 reads its key `on` as true."""
    workflow = yaml.safe_load(path.read_text())
    workflow["on"] = workflow.pop(True)
    return workflow


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_are_these():
    assert [path.name for path in FILES] == ["board.yml", "ci.yml", "release.yml", "submission.yml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_action_is_pinned_by_its_digest(path):
    lines = [line.strip().removeprefix("- ") for line in path.read_text().splitlines() if "uses:" in line]
    assert len(lines) == sum("uses" in step for step in steps(read(path))) > 0
    for line in lines:
        name, digest, version = re.fullmatch(r"uses: (\S+)@([0-9a-f]{40}) # (v\S+)", line).groups()
        assert PINNED[name] == (digest, version)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_job_may_read_and_no_more(path):
    """The board alone may write, after a merge; what the code runs in gets neither its token nor PyPI's."""
    workflow = read(path)
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        assert job["permissions"] == PERMISSIONS.get(name, {"contents": "read"})
        assert job["timeout-minutes"] <= 120
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
    assert "secrets." not in path.read_text().replace("secrets.token_hex", "")
    given = [step["name"] for step in steps(workflow) if "github.token" in str(step)]
    assert given == (["Publish"] if path.name == "board.yml" else [])
    if path.name == "board.yml":
        assert set(workflow["on"]) == {"push"}
        assert workflow["on"]["push"]["branches"] == ["main"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_of_a_request_is_pasted_into_a_script(path):
    workflow = read(path)
    assert not {"pull_request_target", "workflow_run", "issue_comment"} & set(workflow["on"])
    for step in steps(workflow):
        assert "${{" not in step.get("run", "")


def test_a_tag_is_built_tried_and_then_published_by_a_job_that_runs_nothing_else():
    workflow = read(FOLDER / "release.yml")
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    build, attempt, publish = (workflow["jobs"][name] for name in ("build", "try", "publish"))
    assert "twine check --strict" in str(build["steps"])
    assert attempt["strategy"]["matrix"] == read(FOLDER / "ci.yml")["jobs"]["run"]["strategy"]["matrix"]
    assert publish["needs"] == ["build", "try"]
    assert publish["environment"] == "pypi"
    assert [step["uses"].split("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]


def test_submissions_are_checked_by_the_code_of_the_base_branch():
    workflow = read(FOLDER / "submission.yml")
    code, data = (step["with"] for step in steps(workflow) if "checkout" in step.get("uses", ""))
    assert (code["ref"], code["path"]) == ("${{ github.event.pull_request.base.sha }}", "base")
    assert (data["ref"], data["path"]) == ("${{ github.sha }}", "head")
    assert data["sparse-checkout-cone-mode"] is False
    assert data["sparse-checkout"].split() == ["/leaderboard/submissions/", "/leaderboard/store/"]
    (install,) = (step for step in steps(workflow) if "pip install" in step.get("run", ""))
    assert install["working-directory"] == "base"


def tool(name):
    """A command of this environment or of the machine; None if there is none."""
    own = str(Path(sys.executable).parent)
    return shutil.which(name, path=os.pathsep.join([own, os.environ["PATH"]]))


def findings(folder):
    """The exit code of zizmor's audit and what it says."""
    command = [tool("zizmor"), "--offline", "--no-progress", "--persona=auditor", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


def test_zizmor_finds_nothing():
    code, said = findings(FOLDER)
    assert code == 0, said


@pytest.mark.parametrize(
    ("file", "sound", "slip", "told"),
    [
        ("submission.yml", "  pull_request:\n", "  pull_request_target:\n", "dangerous-triggers"),
        ("submission.yml", "persist-credentials: false", "persist-credentials: true", "artipacked"),
        (
            "submission.yml",
            'echo "$changed changed',
            'echo "${{ github.event.pull_request.title }}',
            "template-injection",
        ),
        ("ci.yml", "@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2", "@v4", "unpinned-uses"),
        ("ci.yml", "permissions: {}", "permissions: write-all", "excessive-permissions"),
    ],
)
def test_zizmor_finds_slips(tmp_path, file, sound, slip, told):
    text = (FOLDER / file).read_text()
    assert sound in text
    (tmp_path / ".github" / "workflows").mkdir(parents=True)
    (tmp_path / ".github" / "workflows" / file).write_text(text.replace(sound, slip))
    code, said = findings(tmp_path)
    assert code != 0
    assert told in said


def test_actionlint_finds_nothing():
    """Where it is not installed, CI's job `Workflows` has it."""
    command = tool("actionlint")
    if command is None:
        pytest.skip("actionlint is not installed")
    done = subprocess.run([command, *map(str, FILES)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the script that verifies, run on made-up requests


BENCH = """#!/usr/bin/env bash
# Accepts what holds no file `bad`; says what a stranger might have it say.
printf '%s\\n' "$*" >> "$CALLS"
echo '::error::a command to the runner'
[[ ! -e $2/bad ]]
"""


def git(folder, *arguments):
    options = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *options, *arguments], cwd=folder, check=True, capture_output=True)


def committed(folder, submissions):
    """A repository whose submissions hold these files, by path; those that begin with / lie at its root."""
    for path, text in submissions.items():
        file = folder / path[1:] if path[0] == "/" else folder / "leaderboard" / "submissions" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "x")


@pytest.fixture
def verified(tmp_path):
    """Runs the step on a base and a head; gives exit code, output, calls of bench and the summary."""

    def run(base, head, account="somebody", association="NONE"):
        for name, submissions in (("base", base), ("head", head)):
            (tmp_path / name).mkdir()
            committed(tmp_path / name, submissions)
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "bench").write_text(BENCH)
        (tmp_path / "bin" / "bench").chmod(0o755)
        (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (tmp_path / "bin" / "python").chmod(0o755)
        (*_, step) = steps(read(FOLDER / "submission.yml"))
        calls, summary = tmp_path / "calls", tmp_path / "summary"
        calls.touch()
        environment = os.environ | {
            "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(calls),
            "ACCOUNT": account,
            "ASSOCIATION": association,
            "GITHUB_STEP_SUMMARY": str(summary),
        }
        done = subprocess.run(
            ["bash", "-c", step["run"]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines(), summary.read_text()

    return run


OLD = {
    "old/submission.json": "{}",
    "rival/submission.json": "{}",
    "/leaderboard/owners.toml": 'old = "Author"\n',
    "/leaderboard/status.toml": "",
    "/leaderboard/store/ab": "arrays",
    "/bench/code.py": "1",
}
NEW = {"new/submission.json": "{}"}


@pytest.mark.parametrize(
    ("head", "account", "slug"),
    [
        (OLD | NEW, "anybody", "new"),
        (OLD | {"-x/submission.json": "{}"}, "anybody", "-x"),  # hyphens are of a slug
        (OLD | {"old/submission.json": "[]"}, "author", "old"),
    ],
)
def test_one_submission_of_ones_own_is_verified(verified, head, account, slug):
    code, out, calls, summary = verified(OLD, head, account)
    assert code == 0, out
    assert calls == [f"verify ../head/leaderboard/submissions/{slug}"]
    assert f"| {slug} | accepted |\n1 changed, 0 rejected\n" in summary


def without(files, name):
    return {path: text for path, text in files.items() if not path.startswith(name)}


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (OLD | NEW | {"newer/submission.json": "{}"}, "2 submissions are touched"),
        (OLD | {"old/submission.json": "[]"}, "old is on the board already"),
        (OLD | {"rival/submission.json": "[]"}, "rival is on the board already"),
        (without(OLD, "rival/"), "a submission is deleted"),
        (without(OLD, "rival/") | NEW, "2 submissions are touched"),
        (without(OLD, "rival/") | {"rival/more": ""}, "rival is on the board already"),
        (OLD | {"/leaderboard/status.toml": "[rival]"}, "status.toml is touched"),
        (OLD | {"/leaderboard/owners.toml": 'rival = "somebody"'}, "owners.toml is touched"),
        (OLD | NEW | {"/leaderboard/owners.toml": 'new = "me"'}, "owners.toml is touched"),
        (OLD | {"/leaderboard/store/ab": "others"}, "store/ab is touched"),
        (without(OLD, "/leaderboard/store/"), "store/ab is touched"),
        (OLD | {"/leaderboard/check/targets.txt": "mine"}, "targets.txt is touched"),
        (OLD | NEW | {"/bench/code.py": "2"}, "bench/code.py is touched"),
    ],
)
def test_what_is_not_ones_own_is_refused(verified, head, told):
    code, out, calls, summary = verified(OLD, head)
    assert (code, calls) == (1, [])
    assert told in out
    assert out.count("refused: ") == 1
    assert "| (what the request touches) | refused |" in summary


def test_maintainers_may_touch_all_of_it(verified):
    head = without(OLD, "rival/") | NEW | {"old/bad": "", "/leaderboard/status.toml": "[old]"}
    code, _, calls, summary = verified(OLD, head, association="OWNER")
    assert code == 1
    assert len(calls) == 2
    assert "| new | accepted |\n| old | rejected |\n2 changed, 1 rejected\n" in summary


@pytest.mark.parametrize(
    "name", ["$(touch owned)", "a b", "a\nb", "`touch owned`", "A", "a;touch owned", "é"]
)
@pytest.mark.parametrize("association", ["NONE", "MEMBER"])
def test_a_name_that_is_no_slug_is_refused(verified, tmp_path, name, association):
    code, out, calls, summary = verified(OLD, OLD | {f"{name}/submission.json": "{}"}, "x", association)
    assert (code, calls) == (1, [])
    assert "is no slug" in out
    assert name not in summary
    assert not list(tmp_path.rglob("owned"))


@pytest.mark.parametrize("account", ["$(touch owned)", "`touch owned`", "--maintainer"])
def test_an_account_is_only_a_name(verified, tmp_path, account):
    code, _, calls, _ = verified(OLD, OLD | {"rival/submission.json": "[]"}, account)
    assert (code, calls) == (1, [])
    assert not list(tmp_path.rglob("owned"))


def test_what_bench_prints_is_no_command(verified):
    _, out, _, _ = verified(OLD, OLD | NEW)
    lines = out.splitlines()
    at = lines.index("::error::a command to the runner")
    fence = lines[at - 1].removeprefix("::stop-commands::")
    assert re.fullmatch("[0-9a-f]{32}", fence)
    assert lines[at + 1] == f"::{fence}::"


@pytest.mark.parametrize("head", [OLD, OLD | {"/bench/code.py": "2"}])
def test_a_request_without_evidence_passes(verified, head):
    code, out, calls, _ = verified(OLD, head)
    assert (code, calls) == (0, []), out

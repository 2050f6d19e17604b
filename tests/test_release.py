"""What is released: its version, what the archives hold and that they run, the container, how to cite it."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import bench

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FALLBACK = PROJECT["tool"]["setuptools_scm"]["fallback_version"]
SOURCES = ("bench", "methods", "tasks", "leaderboard")
EVIDENCE = ("manifests", "records", "store", "submissions")
SHIPPED = (
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in"),
    *("README.md", "pyproject.toml"),
)
NOT_SHIPPED = (".gitignore", ".pre-commit-config.yaml", "Containerfile", "Makefile", "constraints.txt")


def run(folder, *command):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def git(folder, *arguments):
    return run(folder, "git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments)


# ---- the version


def version_of(folder):
    return run(folder, sys.executable, "-m", "setuptools_scm")


@pytest.fixture
def repository(tmp_path):
    """A repository of one commit that holds nothing but pyproject.toml."""
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(ROOT / "pyproject.toml", folder)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")
    return folder


def test_the_version_is_that_of_the_tag(repository):
    git(repository, "tag", "v1.2.3")
    assert version_of(repository) == "1.2.3"
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "y")
    assert version_of(repository) == "1.2.3+g" + git(repository, "rev-parse", "--short=9", "HEAD")


def test_without_tags_it_is_the_fallback(repository, tmp_path):
    """Of no tag at all, a clone of depth 1 that leaves them behind, and an archive without git."""
    commit = git(repository, "rev-parse", "--short=9", "HEAD")
    assert version_of(repository) == f"{FALLBACK}+g{commit}"

    git(repository, "tag", "v1.2.3")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "y")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth=1", repository.as_uri(), str(shallow))
    assert version_of(shallow).startswith(f"{FALLBACK}+g")

    archive = tmp_path / "archive"
    archive.mkdir()
    git(repository, "archive", f"--output={archive / 'x.tar'}", "HEAD")
    with tarfile.open(archive / "x.tar") as file:
        file.extractall(archive, filter="data")
    assert version_of(archive) == FALLBACK


def test_records_know_the_release_alone():
    assert bench.__version__ == importlib.metadata.version("posterior-bench").partition("+")[0]
    assert re.fullmatch(r"\d+\.\d+\.\d+", bench.__version__)


def test_importing_the_suite_asks_nobody_for_the_version():
    code = "import sys, bench; print('importlib.metadata' in sys.modules, 'subprocess' in sys.modules)"
    assert run(ROOT, sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, '.'); {code}") == (
        "False False"
    )


# ---- the archives


def copied(folder):
    """The sources and root files, with a file that stands for the evidence, in a repository of their own."""
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", *(EVIDENCE if name == "leaderboard" else ()))
        shutil.copytree(ROOT / name, folder / name, ignore=ignored, symlinks=True)
    for name in (*SHIPPED, *NOT_SHIPPED):
        shutil.copy(ROOT / name, folder)
    for name in EVIDENCE:
        (folder / "leaderboard" / name / "task").mkdir(parents=True)
        (folder / "leaderboard" / name / "task" / "arrays.safetensors").write_bytes(b"\0")
    for name in ("docs", "tests", "benchmarks"):
        (folder / name).mkdir()
        (folder / name / "page.md").write_text("x")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")
    git(folder, "tag", "v9.8.7")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the two archives of this tree, built as the workflow builds them."""
    folder = tmp_path_factory.mktemp("source")
    copied(folder)
    run(folder, sys.executable, "-m", "build", "--no-isolation")
    return folder / "dist"


@pytest.mark.slow
def test_the_archives_hold_the_sources_and_no_evidence(built):
    assert sorted(path.name for path in built.iterdir()) == [
        "posterior_bench-9.8.7-py3-none-any.whl",
        "posterior_bench-9.8.7.tar.gz",
    ]
    with tarfile.open(built / "posterior_bench-9.8.7.tar.gz") as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    with zipfile.ZipFile(built / "posterior_bench-9.8.7-py3-none-any.whl") as file:
        installed = {name for name in file.namelist() if ".dist-info/" not in name}

    modules = {
        path.relative_to(ROOT).as_posix()
        for name in SOURCES
        for path in (ROOT / name).rglob("*.py")
        if not (name == "leaderboard" and path.relative_to(ROOT / name).parts[0] in EVIDENCE)
    }
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name for name in installed if name.endswith(".py")} == {
        name if name.startswith("bench/") else f"bench/{name}" for name in modules
    }
    assert {name for name in names if "/" not in name} == {*SHIPPED, "PKG-INFO", "setup.cfg"}
    roots = {name.split("/")[0] for name in names if "/" in name}
    assert roots == {*SOURCES, "posterior_bench.egg-info"}
    assert not {name for name in names | installed if set(name.split("/")[:-1]) & set(EVIDENCE)}
    assert "bench/tasks/references" in {name.rpartition("/")[0] for name in installed}


@pytest.mark.slow
def test_what_pypi_will_show_is_sound(built):
    files = map(str, built.iterdir())
    assert "PASSED" in run(built, sys.executable, "-m", "twine", "check", "--strict", *files)


@pytest.mark.slow
def test_the_wheel_runs_where_nothing_else_of_the_project_is(built, tmp_path):
    """The environment has what the suite needs from this one; the suite itself is that of the wheel."""
    own = tmp_path / "site"
    wheel = built / "posterior_bench-9.8.7-py3-none-any.whl"
    run(tmp_path, sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(own), wheel)
    command = [sys.executable, "-m", "bench", "run", "radial", "split_digits", "--preset", "smoke"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(own)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    record = yaml.safe_load((tmp_path / done.stdout.splitlines()[-1] / "record.json").read_text())
    assert record["provenance"]["version"] == "9.8.7"


# ---- the container


def instructions(text):
    """The instructions of a Containerfile, each as its words; comments are left out."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [line.split() for line in lines if line.strip() and not line.startswith("#")]


def missing(text):
    """What a Containerfile copies and the repository does not have."""
    copies = [words for words in instructions(text) if words[0] in ("COPY", "ADD")]
    return [source for _, *sources, _ in copies for source in sources if not (ROOT / source).exists()]


def test_the_container_has_what_is_there_and_is_nobody_special():
    text = (ROOT / "Containerfile").read_text()
    assert not missing(text)
    assert missing(text + "COPY bench/nothing.py /source/\n") == ["bench/nothing.py"]
    words = instructions(text)
    assert words[0] == ["FROM", "python:3.13-slim"]
    assert [line for line in words if line[0] == "USER"] == [["USER", "bench"]]
    after = words[words.index(["USER", "bench"]) :]
    assert not [line for line in after if line[0] in ("RUN", "COPY", "ADD")]
    assert ["ENTRYPOINT", '["bench"]'] in words
    folders = {line[1] for line in words if line[0] == "COPY" and (ROOT / line[1]).is_dir()}
    packages = PROJECT["tool"]["setuptools"]["package-dir"].values()
    left_out = {package for package in packages if not folders & {package, package.split("/")[0]}}
    assert left_out == {"leaderboard"}
    assert not [folder for folder in folders if folder == "leaderboard" or folder.endswith(EVIDENCE)]


# ---- how to cite it


def test_the_citation_is_of_the_release_and_has_a_place_for_a_doi():
    text = (ROOT / "CITATION.cff").read_text()
    citation = yaml.safe_load(text)
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == FALLBACK
    filled = yaml.safe_load(re.sub(r"^# (identifiers:|  .*)$", r"\1", text, flags=re.MULTILINE))
    (identifier,) = filled["identifiers"]
    assert identifier["type"] == "doi"
    assert re.fullmatch(r"10\.\d{4,9}/\S+", identifier["value"])
    assert filled | {"identifiers": None} == citation | {"identifiers": None}

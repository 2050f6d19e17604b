"""The tables of planted faults are sound, and what plants them can fail; `make test-mutants` plants them."""

from collections import Counter
from dataclasses import replace

import pytest
from mutants.faults import ROOT, Fault, Runner, planted, tried, trouble, untouched

PLANTED = planted()


def test_every_fault_can_be_planted_and_its_tests_are_there():
    """Its old text stands exactly once in its file, and the tests that should see it exist."""
    assert not [said for said in map(trouble, PLANTED) if said]


def test_faults_are_many_and_differ():
    """At least 80, each name once; no two make one change."""
    assert len(PLANTED) >= 80
    assert max(Counter(fault.name for fault in PLANTED).values()) == 1
    assert max(Counter((fault.file, fault.old, fault.new) for fault in PLANTED).values()) == 1
    assert all(fault.old != fault.new and fault.means and "\n" not in fault.means for fault in PLANTED)


def test_faults_that_general_laws_once_passed_are_among_them():
    """And those of the number of draws, and of streams that serve twice."""
    assert {
        *("half-the-samples", "each-twice", "one-stream-for-two-stages"),
        *("langevin-without-noise", "langevin-at-temperature-one-half", "chain-without-prior"),
        *("hamiltonian-chain-with-half-its-friction-noise", "laplace-twice-as-wide"),
        *(
            "laplace-of-one-example",
            "swag-twice-as-wide",
            "stein-without-repulsion",
            "bound-of-importance-weights",
        ),
    } <= {fault.name for fault in PLANTED}


# ---- what plants them, on a project of two files

SOURCE = '''"""Means."""


def mean(values):
    # Of all values.
    return sum(values) / len(values)
'''
TESTS = """import pytest
from bench.toy import mean


def test_mean():
    assert mean([1, 2, 6]) == 3


def test_mean_is_less():
    assert mean([1, 2, 6]) < 3


@pytest.mark.skip
def test_mean_elsewhere():
    assert mean([1, 2, 6]) == 3


def test_nothing():
    assert True
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A package `bench` of one module, and its tests."""
    root = tmp_path_factory.mktemp("project")
    for folder in ("bench", "tests"):
        (root / folder).mkdir()
    (root / "bench" / "__init__.py").write_text("")
    (root / "bench" / "toy.py").write_text(SOURCE)
    (root / "tests" / "test_toy.py").write_text(TESTS)
    (root / "tests" / "conftest.py").write_text("")
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n')
    return root


@pytest.fixture(scope="module")
def runner():
    """The process that runs them."""
    made = Runner(libraries=())
    yield made
    made.close()


def of(old, new, *tests):
    """A fault of the project."""
    tests = tests or ("test_mean",)
    seen_by = tuple(f"tests/test_toy.py::{test}" for test in tests)
    return Fault("a-fault", "means", "it is wrong", "bench/toy.py", old, new, seen_by)


@pytest.mark.parametrize(
    ("fault", "word", "said"),
    [
        (of("/ len", "* len"), "dies", "test_mean: AssertionError"),
        (of("Of all values", "Of all of them"), "survives", "1 tests pass"),
        (of("/ len", "* len", "test_nothing"), "survives", "1 tests pass"),
        (of("/ len(values)", "/ len(values"), "cannot be judged", "was never closed"),
        (of("def mean", "def mode"), "cannot be judged", "cannot import name 'mean'"),
        (of("/ len", "/ length"), "cannot be judged", "NameError"),
        (of("/ len", "* len", "test_mean_elsewhere"), "cannot be judged", "no test ran"),
        (of("/ size", "* size"), "cannot be planted", "its old text stands 0 times in bench/toy.py"),
        (of("values", "numbers"), "cannot be planted", "its old text stands 4 times in bench/toy.py"),
        (of("/ len", "* len", "test_median"), "cannot be planted", "no test tests/test_toy.py::test_median"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_verdicts(fault, word, said, project, runner, tmp_path):
    """A fault dies by an assertion alone; a changed comment survives; what shows nothing is no death."""
    verdict = tried(fault, project, tmp_path, runner)
    assert verdict.word == word
    assert said in verdict.said
    assert (project / "bench" / "toy.py").read_text() == SOURCE
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_sources_as_they_are_must_pass(project, runner, tmp_path):
    """Or a fault would seem seen that is not."""
    assert untouched(project, tmp_path, runner, ["tests/test_toy.py::test_mean"]) == ""
    for test, said in (("test_mean_is_less", "do not pass"), ("test_mean_elsewhere", "no test passed")):
        assert said in untouched(project, tmp_path, runner, [f"tests/test_toy.py::{test}"])


def test_an_import_of_the_working_tree_is_told(project, runner, tmp_path, monkeypatch):
    """A test that reaches the sources by another way than the copy judges nothing."""
    path = project / "tests" / "test_past.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nsys.modules.pop('bench', None)\n"
        "import bench.errors\n\n\ndef test_past():\n    assert False\n"
    )
    fault = replace(of("/ len", "* len"), seen_by=("tests/test_past.py::test_past",))
    verdict = tried(fault, project, tmp_path, runner)
    assert (verdict.word, verdict.said.split(".")[0]) == ("cannot be judged", "bench")

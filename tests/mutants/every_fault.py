"""`make test-mutants`: plants every fault by itself, and asks that a test sees it.

One line a fault. The tests named in a file pass on the sources as they are, or nothing is judged by them.
"""

import json
from pathlib import Path

import pytest
from filelock import FileLock
from mutants.faults import ROOT, Runner, planted, tried, untouched

FAULTS = planted()


@pytest.fixture(scope="session")
def runner():
    """A process per worker that has imported what all tests need."""
    made = Runner()
    yield made
    made.close()


@pytest.fixture(scope="session")
def shared(tmp_path_factory, request):
    """A folder that all workers see."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


def control(path, shared, runner):
    """Why the tests that the tables name in a file do not all pass on the sources as they are."""
    place = shared / path.replace("/", "-")
    with FileLock(f"{place}.lock"):
        told = Path(f"{place}.told")
        if not told.exists():
            place.mkdir()
            named = {test: None for fault in FAULTS for test in fault.seen_by if test.startswith(f"{path}::")}
            told.write_text(json.dumps(untouched(ROOT, place, runner, list(named))))
        return json.loads(told.read_text())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_dies(fault, tmp_path, shared, runner):
    for path in dict.fromkeys(test.partition("::")[0] for test in fault.seen_by):
        if said := control(path, shared, runner):
            pytest.fail(f"{path}: {said}", pytrace=False)
    verdict = tried(fault, ROOT, tmp_path, runner)
    if verdict.word != "dies":
        pytest.fail(f"{fault.name} {verdict.word} ({fault.means}): {verdict.said}", pytrace=False)

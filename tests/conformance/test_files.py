"""Every method has a file of oracles, and every task a file of tests."""

from pathlib import Path

import pytest

from bench.runs import registry

TESTS = Path(__file__).parent.parent


def without(kind, folder):
    """Files of `methods/` or `tasks/` that have no file of tests of their own."""
    files = {entry.file for entry in getattr(registry, kind)().values()}
    return sorted(f"{kind}/{file}.py" for file in files if not (folder / f"test_{file}.py").is_file())


@pytest.mark.parametrize(("kind", "folder"), [("methods", TESTS / "oracles"), ("tasks", TESTS)])
def test_every_file_has_tests_of_its_own(kind, folder):
    """Of a method, whose formulas stand there against a truth that is not our own output."""
    assert without(kind, folder) == [], f"each needs a file test_<name>.py in {folder}"


def test_law_lists_the_files_without(tmp_path):
    """Negative control."""
    (tmp_path / "test_map.py").touch()
    missing = without("methods", tmp_path)
    assert "methods/map.py" not in missing
    assert "methods/hmc.py" in missing

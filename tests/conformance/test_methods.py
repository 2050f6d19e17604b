"""Every discovered method obeys the laws; `pytest tests/conformance -k NAME` checks one method."""

import pytest

from bench.laws.cases import case_of, cases
from bench.laws.methods import LAWS
from bench.runs import registry
from conformance import problems


def held():
    """Each law on every method that it is for, on every problem that it poses.

    The quick tests hold a law once to every method file, on the first problem; all others are slow.
    """
    for name, law in LAWS.items():
        tried = set()
        for entry in registry.methods().values():
            if law.is_not_for(entry):
                continue
            for problem, case in cases(entry, law.problems).items():
                marks = [pytest.mark.slow] if entry.file in tried or law.is_slow else []
                tried.add(entry.file)
                for more in law.each:
                    said = "-".join([name, entry.name, problem, *map(str, more)])
                    yield pytest.param(law, case, more, id=said, marks=marks)


@pytest.mark.parametrize(("law", "case", "more"), list(held()))
def test_law(law, case, more, tmp_path):
    """What each law says, and how often it is broken by chance, stands with it."""
    law.holds(case, *[tmp_path] * law.leaves_files, *more)


def test_methods_are_discovered():
    """The registry knows the first methods, so the suite above is not empty."""
    assert registry.methods().keys() >= {"map", "mfvi", "radial", "mc_dropout"}


@pytest.mark.parametrize("name", registry.methods())
def test_every_method_is_tried(name):
    """What a method refuses it refuses in one line, and it infers something of each kind that it can."""
    entry = registry.method(name)
    for problem in problems.ALL:
        refusal = case_of(entry, problem).refusal()
        assert refusal is None or ("\n" not in refusal and name.split("_")[0] in refusal)
    assert cases(entry, tuple(problems.PROBLEMS))

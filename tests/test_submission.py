"""What a submission is: where its runs lie, and what its manifest may hold."""

import json

import pytest

from bench.errors import UsageError
from bench.leaderboard.check import verify
from bench.leaderboard.check.children import Answer
from bench.leaderboard.evidence import submission

GOOD = {
    "schema_version": 1,
    "slug": "my-method",
    "authors": ["A. Author"],
    "licence": "CC-BY-4.0",
    "paper": None,
    "code": "https://example.org/code",
    "tuning_budget": 10,
    "trained_on": [],
    "environments": [
        {
            "python": "3.11",
            "torch": "2.9",
            "pytorch_lightning": "2.5",
            "system": "linux x86_64",
            "device": "cpu",
            "threads": 1,
        }
    ],
    "hours": 0.5,
    "files": {"split_digits/map/seed0/record.json": "0" * 64},
}


def write(folder, **changes):
    (folder / "submission.json").write_text(json.dumps(GOOD | changes))
    return folder


def test_manifest_is_read_back(tmp_path):
    read = submission.read(write(tmp_path))
    assert read.slug == "my-method"
    assert json.loads(read.model_dump_json()) == GOOD


WRONG = {
    "another schema": ({"schema_version": 2}, "schema_version"),
    "slug that is no folder": ({"slug": "../up"}, "slug"),
    "nobody": ({"authors": []}, "authors"),
    "nameless author": ({"authors": [""]}, r"authors\.0"),
    "licence in prose": ({"licence": "do what you like"}, "licence"),
    "script as address": ({"code": "javascript:alert(1)"}, "code"),
    "markup in an address": ({"paper": "https://example.org/<script>"}, "paper"),
    "tried in words": ({"tuning_budget": "10"}, "tuning_budget"),
    "endless": ({"hours": float("inf")}, "hours"),
    "no file": ({"files": {}}, "files"),
    "hash of another kind": ({"files": {"a": "0" * 40}}, r"files\.a"),
    "another key": ({"rank": 1}, "rank"),
}


@pytest.mark.parametrize(("changes", "where"), WRONG.values(), ids=WRONG)
def test_manifest_of_another_form_is_refused_in_one_line(changes, where, tmp_path):
    with pytest.raises(
        UsageError, match=rf"submission\.json is no submission of schema 1: {where}: "
    ) as caught:
        submission.read(write(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_missing_manifest_is_told(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*submission\.json: No such file"):
        submission.read(tmp_path)


def test_runs_come_in_the_order_of_their_seeds(tmp_path):
    for name in ("b/map/seed0", "a/map/seed10", "a/map/seed9"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "record.json").write_text("{}")
    found = [run.relative_to(tmp_path).as_posix() for run in submission.runs_in(tmp_path)]
    assert found == ["a/map/seed9", "a/map/seed10", "b/map/seed0"]


@pytest.mark.parametrize(
    ("name", "seed"), [("seed0", 0), ("seed12", 12), ("seed01", -1), ("seed", -1), ("seed-1", -1), ("x", -1)]
)
def test_a_directory_names_one_seed_in_one_way(name, seed, tmp_path):
    assert submission.seed_of(tmp_path / name) == seed
    if seed >= 0:
        assert submission.run_name("t", "m~x", seed) == f"t/m-x/{name}"


def test_a_submission_of_many_small_files_has_longer_to_be_read(tmp_path, monkeypatch):
    """A thousand records whose arrays lie in the store took more than five seconds of a slow machine."""
    asked = []
    monkeypatch.setattr(verify, "ask", lambda question: asked.append(question) or Answer("damaged", "", None))
    monkeypatch.setattr(verify, "bring", lambda runs: None)
    limits = []
    for number in (3, 1000):
        for seed in range(number):
            run = tmp_path / str(number) / "t" / "map" / f"seed{seed}"
            run.mkdir(parents=True)
            (run / "record.json").write_text("{}")
        verify.verify(tmp_path / str(number), against=None)
        limits.append(asked[-1].processor_seconds)
        assert asked[-1].kind == "structure"
    assert limits == [5, 15]

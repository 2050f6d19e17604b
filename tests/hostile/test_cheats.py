"""Every cheat of `cheats.py` gets its answer."""

import json
import shutil
from pathlib import Path

import pytest
from hostile import cheats, submissions

from bench.leaderboard.check import request, scoring, structure
from bench.leaderboard.check.codes import Rejected


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Honest submissions, a folder for each task, made once; and the board that stands beside."""
    folder = tmp_path_factory.mktemp("bases")
    return {task: cheats.honest(folder / task, task) for task in ("split_digits", *cheats.MADE)}


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    return cheats.board(tmp_path_factory.mktemp("rivals"))


def answer(directory, board):
    """What `bench verify` answers, without its children."""
    try:
        scored = scoring.score(structure.check(directory, board), None, board)
    except Rejected as reason:
        return reason.code
    held = sorted({screen for _, screen, _ in scored.flags})
    return f"held: {', '.join(held)}" if held else "accepted"


@pytest.mark.parametrize("name", [*cheats.CHEATS, *cheats.FACTS])
def test_a_cheat_gets_its_answer(name, bases, board, tmp_path):
    cheat = (cheats.CHEATS | cheats.FACTS)[name]
    root = Path(shutil.copytree(bases[cheat.base], tmp_path / "handed" / "honest"))
    (tmp_path / "board").symlink_to(board)
    cheat.spoil(root)
    found = [json.loads((run / "record.json").read_text()) for run in submissions.runs_in(root)]
    environments = list({json.dumps(one["environment"]): one["environment"] for one in found}.values())
    submissions.manifest(root, **{"environments": environments} | (cheat.manifest or {}))
    assert answer(root, board) == cheat.answer


@pytest.mark.parametrize("task", ["split_digits", *cheats.MADE])
def test_what_is_spoiled_is_accepted_before(task, bases, board):
    assert answer(bases[task], board) == "accepted"


def test_the_list_is_long():
    refused = {name for name, cheat in cheats.CHEATS.items() if cheat.answer != "accepted"}
    assert len(refused) >= 25
    assert len(cheats.FACTS) >= 60
    assert not cheats.CHEATS.keys() & cheats.FACTS.keys()


@pytest.mark.parametrize("name", cheats.REQUESTS)
def test_a_request_gets_its_answer(name, monkeypatch, tmp_path):
    """By the trees of base and head, made up; the script that git feeds is tried in test_workflows.py."""
    asked = cheats.REQUESTS[name]
    (tmp_path / "leaderboard").mkdir()
    (tmp_path / "leaderboard" / "owners.toml").write_text('rival = "bob"\nadas = "ada"\n')
    after = {path: text for path, text in (cheats.BASE | asked.changes).items() if text is not None}
    monkeypatch.setattr(request, "_tree", lambda place: cheats.BASE if place == tmp_path else after)
    given = tmp_path, tmp_path / "head", asked.account, asked.is_maintainer
    if asked.answer == "refused":
        with pytest.raises(request.Refused) as reason:
            request.slugs(*given)
        assert str(reason.value).isprintable()
    else:
        assert " ".join(request.slugs(*given)) == asked.answer

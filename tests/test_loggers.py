"""Loggers: each holds the numbers while the run goes on, and no run needs one."""

import csv
import io
from contextlib import contextmanager

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bench import cli
from bench.runs import loggers

SMOKE = ["run", "mfvi", "split_digits", "--preset", "smoke", "--threads", "1"]

# ---- csv and tensorboard


def events_of(*, stop=None):
    """Events of two stages, of an ensemble and of one fit; at most `stop` of them."""
    events = []
    for number, fits in ((1, 2), (2, 1)):
        events.append(("stage", {"name": "one name", "number": number, "of": 2}))
        for fit in range(1, fits + 1):
            place = {"fit": fit, "fits": fits, "steps": 3 * number}
            events += [("epoch", {"epoch": e, "loss": number + fit / e, "of": 3, **place}) for e in (1, 2, 3)]
            events.append(("fit", {"was_there": False, **place}))
        events.append(("log", {"name": "accuracy", "value": number / 2, "step": None}))
    return events[:stop]


def rows_of(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))


def in_tensorboard(folder):
    """Tag -> (step, value)s, in order."""
    found = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }


def numbers_in(folder):
    """What both files hold."""
    board = folder / "tensorboard"
    return rows_of(folder / "log.csv"), in_tensorboard(board) if board.exists() else {}


@contextmanager
def both(folder):
    folder.mkdir(exist_ok=True)
    with loggers.opened(("csv", "tensorboard", "csv"), folder, None, {}, None) as observers:
        assert len(observers) == 2

        def notify(events):
            for event in events:
                for observer in observers:
                    observer(*event)

        yield notify


def test_numbers_are_there_while_the_run_goes_on(tmp_path):
    with both(tmp_path) as notify:
        notify(events_of(stop=2))
        rows, board = numbers_in(tmp_path)
        assert rows == [
            {"stage": "one name (1 of 2)", "fit": "1", "step": "1", "name": "loss", "value": "2.0"}
        ]
        assert board == {"one name (1 of 2)/loss": [(1, 2.0)]}


def test_every_number_has_its_place(tmp_path):
    with both(tmp_path) as notify:
        notify(events_of())
    rows, board = numbers_in(tmp_path)
    assert len(rows) == 11
    assert {tag: [step for step, _ in of] for tag, of in board.items()} == {
        "one name (1 of 2)/loss": [1, 2, 3],
        "one name (1 of 2), fit 2/loss": [1, 2, 3],
        "one name (2 of 2)/loss": [1, 2, 3],
        "validation/accuracy": [1, 2],
    }


@pytest.mark.parametrize("stop", [3, 5, 8, 10, 12])
def test_a_run_that_goes_on_appends_without_repeating(tmp_path, stop):
    """The second start tells of finished fits that they are there, and goes on an epoch before the stop."""
    with both(tmp_path / "whole") as notify:
        notify(events_of())
    with both(tmp_path / "stopped") as notify:
        notify(events_of(stop=stop))
    with (tmp_path / "stopped" / "log.csv").open("a") as file:
        file.write("one name (2 o")  # killed within a line
    goes_on = max(stop - 2, 0)
    again = [e for i, e in enumerate(events_of()) if i >= goes_on or e[0] != "epoch"]
    with both(tmp_path / "stopped") as notify:
        notify(again)
    assert numbers_in(tmp_path / "stopped") == numbers_in(tmp_path / "whole")


def test_loggers_hold_the_numbers_of_the_run(tmp_path, capsys):
    """A stacked ensemble too; the flag may be repeated and may hold several names."""
    flags = ["--members", "2", "--logger", "csv", "--logger", "tensorboard,csv", "--out", str(tmp_path)]
    assert cli.main([*SMOKE, *flags]) == 0
    (directory,) = (path.parent for path in tmp_path.rglob("record.json"))
    rows, board = numbers_in(directory)
    curves = rows_of(directory / "curves.csv")
    own = [float(row["value"]) for row in rows if row["name"] == "average_accuracy"]
    assert own == [float(r["value"]) for r in curves if r["curve"] == "average_accuracy (validation)"]
    assert [value for _, value in board["validation/average_accuracy"]] == pytest.approx(own)
    assert {f"step {t} ({t} of 5)/loss" for t in range(1, 6)} <= board.keys()
    capsys.readouterr()

"""Progress: what fits on a terminal of any width, what is written elsewhere, and the share that is done."""

import io
import re
import threading
import time

import pytest
from conformance import problems
from rich.console import Console
from rich.text import Text

from bench.commands.parser import SafeConsole
from bench.contract import Budget
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import Diverged
from bench.methods.map import MAP
from bench.runs.progress import shown

LONG = "3 of 12: nf_gamma_500_5_100_True singular_evidence+hidden=16,prior_mean=0.0,num_train=1000 seed 0"
NUMBER = {"name": "mean_nll_of_an_objective_with_a_long_name", "value": 0.123456, "step": 1}


class Clock:
    """Stands still unless moved."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        """The time."""
        return self.now


@pytest.fixture
def clock():
    return Clock()


def stage(number, of, name="step"):
    return "stage", {"name": f"{name} {number}", "number": number, "of": of}


def epoch(number, of, fit=1, fits=1, together=1):
    place = {"of": of, "together": together, "fit": fit, "fits": fits}
    return "epoch", {"epoch": number, "loss": 0.5} | place


def fitted(fit=1, fits=1, was_there=False):
    return "fit", {"fit": fit, "fits": fits, "was_there": was_there}


def terminal(width):
    environment = {"TERM": "xterm-256color"}
    return Console(file=io.StringIO(), width=width, force_terminal=True, _environ=environment, markup=False)


def pipe():
    return Console(file=io.StringIO(), _environ={"TERM": "dumb"}, highlight=False, markup=False)


def frame(observer, width):
    """The lines of the bar as they are drawn now on a terminal of this width."""
    observer.view.console.width = width
    console = terminal(width)
    console.print(observer.view.frame())
    return Text.from_ansi(console.file.getvalue()).plain.splitlines()


def test_fits_side_by_side_come_as_far_together(clock):
    """Ten of twenty, after three of four epochs, are 3/8 of the stage: they took 60 s, so 100 are left."""
    with shown(terminal(160), "map iris_depth", clock) as observer:
        observer(*stage(1, 1))
        observer(*epoch(1, 4, 1, 20, together=10))
        for number in (1, 2):
            clock.now += 30
            observer(*epoch(number + 1, 4, 1, 20, together=10))
        (line,) = frame(observer, 160)
        assert "fits 1 to 10 of 20, epoch 3 of 4" in line
        assert "  37 % ETA 0:01:40 " in line
        observer(*epoch(1, 4, 11, 20, together=10))
        (line,) = frame(observer, 160)
        assert "fits 11 to 20 of 20, epoch 1 of 4" in line
        assert "  62 % " in line


def a_run(epochs=4):
    """Events of a run of three stages: a fit that stops early, an ensemble, a stage without epochs."""
    yield stage(1, 3)
    for e in range(1, epochs):
        yield epoch(e, epochs)
    yield fitted()
    yield "log", NUMBER
    yield stage(2, 3)
    for fit in (1, 2, 3):
        for e in range(1, epochs + 1):
            yield epoch(e, epochs, fit, 3)
        yield fitted(fit, 3)
    yield "log", NUMBER
    yield epoch(1, epochs)  # of a further call in the same stage, which nobody has announced
    yield "notice", {"text": "compiled"}
    yield stage(3, 3)
    yield fitted()


# ---- on a terminal


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
@pytest.mark.parametrize("title", ["map split_digits", LONG])
def test_bar_percentage_and_time_left_fit_in_every_frame(width, title, clock):
    console = terminal(width)
    percentages = []
    with shown(console, title, clock) as observer:
        for event in a_run():
            clock.now += 10
            observer(*event)
            (line,) = frame(observer, width)
            assert len(line.rstrip()) <= width
            assert "━" in line
            assert re.search(r"━ +\d+ % ETA (-:--:--|\d+:\d\d:\d\d)", line), line
            percentages.append(int(re.search(r"(\d+) %", line)[1]))
    assert percentages == sorted(percentages)
    assert len(set(percentages)) > 8


def test_a_narrow_bar_keeps_the_number_and_gives_up_the_middle(clock):
    with shown(terminal(80), "map split_digits", clock) as observer:
        observer(*stage(2, 5))
        observer(*epoch(30, 100))
        for width, there in ((160, True), (80, False)):
            (line,) = frame(observer, width)
            assert ("epoch 30 of 100" in line) == there
            assert "map split_digits" in line
            assert "loss 0.5" in line


def test_a_terminal_is_clean_after_the_run(clock):
    console = terminal(80)
    with shown(console, "map split_digits", clock) as observer:
        observer(*stage(1, 1))
    assert console.file.getvalue().endswith("\x1b[2K") or "\x1b[2K" in console.file.getvalue()


# ---- the share


def shares(events, clock, seconds=1.0):
    """(percentage, time left) after every event, `seconds` apart."""
    found = []
    with shown(terminal(80), "title", clock) as observer:
        for event in events:
            clock.now += seconds
            observer(*event)
            found.append((observer.course.percentage, observer.course.left))
    return found


def test_time_left_follows_from_the_share_and_the_time_of_this_start(clock):
    found = shares([stage(1, 2), *[epoch(e, 10) for e in range(1, 11)], stage(2, 2), epoch(1, 10)], clock, 10)
    assert found[0] == (0, "-:--:--")
    assert found[1] == (5, "0:03:10")
    assert found[5] == (25, "0:02:30")
    assert found[10] == (50, "0:01:40")
    assert found[12][0] == 55


def test_a_resumed_run_begins_at_the_share_that_was_reached(clock):
    """Stages and fits that were there take no time; a fit goes on at its sixth epoch of ten."""
    events = [stage(1, 4), fitted(was_there=True), stage(2, 4), fitted(was_there=True), stage(3, 4)]
    found = shares([*events, epoch(6, 10), epoch(7, 10)], clock, 10)
    assert [share for share, _ in found] == [0, 25, 25, 50, 50, 65, 67]
    assert found[4][1] == "-:--:--"  # were the earlier starts' stages counted, this were a time
    assert found[5][1] == "0:02:20"  # 2.5 % in 10 s, 35 % left


def test_early_stopping_jumps_forward(clock):
    found = shares([stage(1, 2), epoch(1, 10), fitted(), stage(2, 2)], clock)
    assert [share for share, _ in found] == [0, 5, 50, 50]


def test_at_most_99_percent_and_no_time_left_before_the_end(clock):
    assert shares([stage(1, 1), epoch(10, 10), fitted(), epoch(1, 10)], clock)[2:] == 2 * [(99, "-:--:--")]


def test_a_longer_run_than_a_day_has_hours(clock):
    assert shares([stage(1, 1), epoch(1, 3)], clock, 50 * 3600)[-1] == (33, "100:00:00")


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("stacked", [False, True])
def test_share_of_real_fits_rises_to_the_end(members, stacked, clock, tmp_path):
    """One call of two fits in a stage, then a resumed start, which finds all fits there."""

    def percentages():
        options = TrainerOptions(accelerator="cpu", stacked=stacked)
        engine = Engine(MAP, MAP.settings_class(), 0, tmp_path, options, members)
        found = []
        with shown(terminal(80), "title", clock) as observer:

            def look(event, values):
                observer(event, values)
                found.append(observer.course.percentage)

            engine.observe(look)
            engine.stage("one", 1, 2)
            engine.fit_many([problems.mlp(), problems.mlp()], Budget(epochs=2))
            engine.stage("two", 2, 2)
        return found

    first = percentages()
    assert first == sorted(first)
    assert len(set(first)) >= (4 if not stacked else 3)
    assert first[-2:] == [50, 50]
    again = percentages()
    assert again == sorted(again)
    assert again[-2:] == [50, 50]


# ---- elsewhere


def lines(console):
    text = console.file.getvalue()
    assert all(c.isprintable() or c == "\n" for c in text)
    return text.splitlines()


LINE = re.compile(r"\d\d:\d\d:\d\d  +(\d+) %  (ETA (-:--:--|\d+:\d\d:\d\d)  )?\S.*")


@pytest.mark.parametrize("title", ["map split_digits", LONG])
def test_lines_come_at_every_stage_are_not_wrapped_and_end_at_100_percent(title, clock):
    console = pipe()
    with shown(console, title, clock) as observer:
        for event in a_run():
            clock.now += 1
            observer(*event)
    written = [line for line in lines(console) if "compiled" not in line]
    assert len(written) == 4
    found = [LINE.fullmatch(line) for line in written]
    assert all(found), written
    assert [int(match[1]) for match in found] == [0, 33, 66, 100]
    assert [bool(match[2]) for match in found] == [True, True, True, False]
    assert "step 2 (2 of 3)" in written[1]
    assert "_long_name 0.1235 (validation)" in written[1]
    assert all(title in line for line in written)


def test_a_long_stage_has_a_line_every_half_minute(clock):
    console = pipe()
    with shown(console, "title", clock) as observer:
        observer(*stage(1, 1))
        for e in range(1, 101):
            clock.now += 2
            observer(*epoch(e, 100))
    written = lines(console)
    assert len(written) == 1 + 200 // 30 + 1
    assert "epoch 15 of 100, loss 0.5" in written[1]
    assert "14 %" not in written[1]
    assert " 15 %  ETA 0:02:50" in written[1]


def test_lines_go_on_where_no_event_comes():
    """What follows training may take minutes: a thread writes, and stops with the run."""
    console = pipe()
    with shown(console, "title", seconds=0.02) as observer:
        observer(*stage(1, 1))
        time.sleep(0.3)
        assert len(lines(console)) >= 4
    after = console.file.getvalue()
    assert "100 %" in lines(console)[-1]
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]
    time.sleep(0.1)
    assert console.file.getvalue() == after


def test_lines_of_two_threads_never_lie_within_each_other():
    """Every write to the file is a whole line, however slow the file is."""

    class Slow(io.StringIO):
        def write(self, text):
            for c in text:
                super().write(c)
                if c == "%":
                    time.sleep(0.002)
            return len(text)

    console = Console(file=Slow(), _environ={"TERM": "dumb"}, highlight=False, markup=False)
    with shown(console, "title", seconds=0.001) as observer:
        for number in range(1, 40):
            observer(*stage(number, 40))
    assert all(LINE.fullmatch(line) for line in lines(console))


@pytest.mark.parametrize(
    ("error", "word"),
    [(Diverged("x"), "diverged"), (ValueError("x"), "failed"), (KeyboardInterrupt(), "stopped")],
)
def test_the_last_line_says_how_the_run_ended(error, word, clock):
    console = pipe()
    with pytest.raises(type(error)), shown(console, "title", clock) as observer:  # noqa: PT012
        observer(*stage(2, 4))
        raise error
    assert re.fullmatch(rf"\S+   25 %  title: step 2 \(2 of 4\): {word}", lines(console)[-1])


def test_an_ending_that_the_caller_has_caught_is_told(clock):
    console = pipe()
    with shown(console, "title", clock) as observer:
        observer(*stage(2, 4))
        observer("end", {"status": "diverged"})
    assert lines(console)[-1].endswith("25 %  title: step 2 (2 of 4): diverged")


class Gone(io.StringIO):
    """A reader that is gone, or a full disk."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        """Takes nothing."""
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left")])
@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_run_goes_on_where_nobody_reads_its_progress(error, on_terminal, clock):
    console = SafeConsole(file=Gone(error), width=80, force_terminal=on_terminal, _environ={"TERM": "xterm"})
    with shown(console, "map split_digits", clock) as observer:
        for event, values in a_run():
            observer(event, values)
        observer("notice", {"text": "something"})


def test_nothing_is_shown_of_a_run_without_events(clock):
    """A finished run that is found again; a further process of a distributed run."""
    for console in (pipe(), terminal(80)):
        with shown(console, "title", clock):
            pass
        assert console.file.getvalue() == ""


def test_control_characters_of_names_are_not_written(clock):
    console = pipe()
    with shown(console, "a\x1b[31m", clock) as observer:
        observer("stage", {"name": "x\ny\x1b]0;z\x07", "number": 1, "of": 1})
        observer("log", {"name": "n\r", "value": 1.0, "step": None})
    assert len(lines(console)) == 2


@pytest.mark.parametrize(
    "environment", [{"TERM": "dumb"}, {"TERM": "unknown"}, {"TERM": "xterm", "FORCE_COLOR": "1"}]
)
def test_a_file_and_a_dumb_terminal_get_lines(environment, monkeypatch, clock):
    """The forced colours of continuous integration make no terminal of a file."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = {} if "FORCE_COLOR" in environment else {"force_terminal": True}
    console = Console(file=io.StringIO(), _environ=environment, highlight=False, markup=False, **options)
    assert console.is_terminal
    with shown(console, LONG, clock) as observer:
        observer(*stage(1, 1))
    assert len(lines(console)) == 2

"""Processes in which files of strangers are read: with limits, without network, and with nothing to write.

The parent hands over a question and waits for one line of JSON. A child first imports what it needs, then
confines itself, then opens the first file of the submission: so its limits stand above what its imports take.
Nothing of a submission is ever executed; the confinement is the second wall behind that rule.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.leaderboard.check.codes import ACCEPTED, CODES, Rejected
from bench.system import absent, shells
from bench.text import one_line

_KEPT = ("HOME", "PATH", "LD_LIBRARY_PATH")
_LARGEST_ANSWER = 2**16
_STDOUT = 1


class Question(NamedTuple):
    """What a child is to check.

    Attributes:
        kind: `structure`; or `scores`, which checks the structure once more and then the scores; or
            `scores-by-numpy`, the same where torch stands in by name (`bench.system.absent`).
        directory: The submission.
        against: Folder of submissions that it must not repeat; None for none.
        store: Folder of arrays by their SHA-256.
        data_dir: Folder of data files; None to search the usual places.
        processor_seconds: How long the child may compute; it may take four times as long by the clock.
        memory: Bytes that it may take beside what its imports take.
    """

    kind: str
    directory: str
    against: str | None
    store: str
    data_dir: str | None
    processor_seconds: int
    memory: int


class Answer(NamedTuple):
    """A code of `CODES`, a message in one line, and the tier of an accepted submission.

    `flags` are what the screens saw of its entries: task and method, name of the screen, reason.
    """

    code: str
    message: str
    tier: str | None
    flags: Sequence[tuple[str, str, str]] = ()


def ask(question: Question) -> Answer:
    """Starts a child in an empty folder of its own, and gives its answer or says why there is none."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    seconds = 4 * question.processor_seconds
    with tempfile.TemporaryDirectory(prefix="bench-verify-") as folder:
        environment |= {"TMPDIR": folder, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-B", "-m", __name__],
                input=json.dumps(question).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=environment,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:  # the child is killed by then
            return Answer("time-limit", f"the check took more than {seconds} s", None)
    return _understood(done.stdout, done.returncode, question)


def _understood(said: bytes, exit_code: int, question: Question) -> Answer:
    """The answer in what a child said; a code of its own where it said none."""
    # Beyond its processor time a process gets SIGXCPU, a second later SIGKILL.
    if exit_code in (-signal.SIGXCPU, -signal.SIGKILL):
        return Answer("time-limit", f"the check computed for more than {question.processor_seconds} s", None)
    with suppress(ValueError, TypeError):
        answer = Answer(*json.loads(said[:_LARGEST_ANSWER]))
        if exit_code == 0 and answer.code in CODES:
            return answer
    return Answer("checker-crashed", f"the check of the {question.kind} ended with {exit_code}", None)


# ---------------------------------------------------------------------------------------------- in the child

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FORBIDDEN = (
    *("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pty."),
    *("os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate"),
    *("os.mkdir", "shutil.", "ftplib.", "smtplib.", "urllib.", "http.", "webbrowser.", "pickle.find_class"),
)
"""Events of Python's audit (PEP 578) that a check has no need of, by how they begin."""


def confine(processor_seconds: int, memory: int) -> None:
    """Limits this process for good: memory, processor time, sizes and number of files, network and writing.

    Args:
        processor_seconds: In all, what was used so far included.
        memory: Bytes of address space beside those in use now.
    """
    import resource

    def limit(what: int, most: int) -> None:
        hard = resource.getrlimit(what)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (least, least))

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 2**20)
    limit(resource.RLIMIT_NOFILE, 256)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY or hard > processor_seconds:
        resource.setrlimit(resource.RLIMIT_CPU, (processor_seconds, processor_seconds + 1))
    used = Path("/proc/self/statm")  # Linux alone says it, and Linux alone holds processes to RLIMIT_AS
    if used.exists():
        limit(resource.RLIMIT_AS, int(used.read_text().split()[0]) * resource.getpagesize() + memory)
    here = os.path.realpath(os.getcwd()) + os.sep

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = flags & _WRITES if isinstance(flags, int) else mode and not set(mode) <= set("rbt")
            inside = isinstance(path, str | bytes) and os.path.realpath(os.fsdecode(path)).startswith(here)
            if writes and not inside and not isinstance(path, int) and path != os.devnull:
                raise PermissionError(f"a check writes nothing: {path!r}")
        elif event.startswith(_FORBIDDEN):
            raise PermissionError(f"a check does not {event}")

    sys.addaudithook(audit)


def main() -> None:
    """Reads a question from standard input, and prints the answer; whatever else is printed is dropped."""
    shells.install()
    answers = os.fdopen(os.dup(_STDOUT), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
    question = Question(*json.load(sys.stdin))
    print(json.dumps(answer(question)), file=answers, flush=True)


def answer(question: Question) -> Answer:
    """Confines this process and checks; every failure is an answer."""
    from bench.leaderboard.check.structure import check

    try:
        if question.kind == "scores-by-numpy":
            absent.stand_in()
        if question.kind != "structure":
            from bench.leaderboard.check.scoring import score
        confine(question.processor_seconds, question.memory)
        against = None if question.against is None else Path(question.against)
        checked = check(Path(question.directory), against, Path(question.store))
        if question.kind == "structure":
            return Answer(ACCEPTED, "", None)
        scored = score(checked, question.data_dir, against, Path(question.store))
        return Answer(ACCEPTED, scored.message, scored.tier, scored.flags)
    except Rejected as reason:
        return Answer(reason.code, str(reason), None)
    except absent.Needed as name:
        return Answer("checker-failed", f"{name} needs torch", None)
    except MemoryError:
        return Answer("memory-limit", f"the check needed more than {question.memory // 2**20} MiB", None)
    except Exception as error:
        return Answer("checker-failed", one_line(f"{type(error).__name__}: {error}"), None)


if __name__ == "__main__":
    main()

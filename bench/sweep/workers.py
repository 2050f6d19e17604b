"""Where the cells of a sweep run: processes of this machine, Ray, or Slurm.

`Workers` takes cells and tells how they end; it knows nothing of what they are. Wherever a cell runs, it runs
in a `bench.sweep.worker` process, which a `Process` starts and minds: threads are pinned in its environment
before it imports torch, what it prints is in the cell's log, and it ends when whoever started it does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

from bench.settings import Count, NonNegative, settings
from bench.sweep.worker import GRACE, End

Cells = Mapping[str, str]
"""Cells to run, each a line for `bench.sweep.worker`, by names of the caller's choice."""


@settings
class Cluster:
    """What the cells of a sweep ask of Ray or Slurm."""

    gpus: NonNegative = 0.0
    """GPUs of a cell; on Ray a share such as 0.25 puts four cells on one."""
    placement: Literal["spread", "pack"] = "spread"
    """Ray: over as many nodes as there are, or as few as will do."""
    partition: str | None = None
    """Slurm: partition of the jobs; null is the cluster's default."""
    minutes: Count = 60
    """Slurm: time limit of a job, in minutes; a job that reaches it goes on in a new one."""
    memory: str | None = None
    """Slurm: memory of a job, as sbatch has it: 8GB; null is the cluster's default."""
    at_once: Count = 256
    """Slurm: jobs of the array that run at a time."""
    cells: Count = 1
    """Slurm: cells of a job, one after another; short ones share the wait for a node and the start."""
    manager: Literal["slurm", "local"] = "slurm"
    """Slurm: local is submitit's own processes on this machine, all jobs at once, to try a sweep out."""


class Workers(Protocol):
    """Runs cells somewhere. A cell whose process dies is told as `died`: who submitted it tries it again."""

    def submit(self, cells: Cells) -> None:
        """Takes cells, to be run as soon as there is room; what is submitted first begins first."""

    def ended(self, seconds: float) -> list[tuple[str, End]]:
        """The cells that have ended since the last call; waits so long for the first of them."""

    def close(self) -> None:
        """Stops what is running, and returns when nothing of it is left."""


def environment(threads: int) -> dict[str, str]:
    """The variables in which the process of a cell differs: its threads, and where modules and data are."""
    passed = {name: value for name, value in os.environ.items() if name.startswith("BENCH_")}
    if "PYTHONPATH" in os.environ:
        passed["PYTHONPATH"] = os.environ["PYTHONPATH"]
    counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return passed | dict.fromkeys(counts, str(threads))


class Process:
    """A `bench.sweep.worker` process: started by the first cell, and again by the first after its death.

    It is in a session of its own, so that Ctrl-C in a terminal reaches this process alone, which then stops
    it; should this process be killed, the other's input ends and with it the other.

    Args:
        variables: Of its environment, beside those of this process.
        folder: In which it works.
    """

    def __init__(self, variables: Mapping[str, str], folder: str) -> None:
        self.variables, self.folder = dict(variables), folder
        self._child: subprocess.Popen[str] | None = None
        self._starting = threading.RLock()  # a signal's handler may stop it
        self._is_busy = self._is_stopped = False

    def run(self, line: str) -> End:
        """Runs a cell, and returns what became of it."""
        try:
            child = self._started(Path(json.loads(line)["log"]))
        except OSError as error:
            return End("died", f"no worker can be started: {error}")
        if child is None:
            return End("died", "stopped")
        assert child.stdin is not None
        assert child.stdout is not None
        answer = ""
        self._is_busy = True
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except (BrokenPipeError, ValueError):  # it is gone, or was stopped meanwhile
            pass
        except BaseException:
            self._end(child)
            raise
        finally:
            self._is_busy = False
        if answer.endswith("\n"):
            return End(**json.loads(answer))
        self._end(child)
        return End("died", f"its worker {_words(child.returncode)}")

    def stop(self) -> None:
        """Ends the process, in the middle of a cell as by SIGTERM; kills it if it does not heed that."""
        with self._starting:
            self._is_stopped = True
        if (child := self._child) is not None:
            assert child.stdin is not None
            with suppress(OSError):
                child.stdin.close()
            if self._is_busy:
                child.terminate()
            self._end(child)

    def _started(self, log: Path) -> subprocess.Popen[str] | None:
        with self._starting:
            if self._is_stopped:
                return None
            if self._child is None:
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("ab") as file:  # until its first cell
                    self._child = subprocess.Popen(
                        [sys.executable, "-P", "-m", "bench.sweep.worker"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        text=True,
                        cwd=self.folder,
                        env={**os.environ, **self.variables},
                        start_new_session=True,
                    )
            return self._child

    def _end(self, child: subprocess.Popen[str]) -> None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # what is left of it: loaders' processes, itself
        child.wait()
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            with suppress(OSError, RuntimeError):  # a signal's handler stops it in the middle of a reading
                stream.close()
        self._child = None


def _words(code: int) -> str:
    """How a process ended."""
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


class Local:
    """Processes of this machine.

    Args:
        number: How many at a time.
        threads: Of each.
        devices: Accelerators, as CUDA_VISIBLE_DEVICES names them, dealt out in turn; none where empty.
    """

    def __init__(self, number: int, threads: int, devices: Sequence[str] = ()) -> None:
        self._waiting: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[str, End]] = queue.SimpleQueue()
        self._processes = []
        for place in range(number):
            own = {"CUDA_VISIBLE_DEVICES": devices[place % len(devices)]} if devices else {}
            self._processes.append(Process({**environment(threads), **own}, os.getcwd()))
        self._threads = [threading.Thread(target=self._work, args=(p,)) for p in self._processes]

    def submit(self, cells: Cells) -> None:
        """Queues cells."""
        for thread in self._threads:
            if thread.ident is None:
                thread.start()
        for item in cells.items():
            self._waiting.put(item)

    def ended(self, seconds: float) -> list[tuple[str, End]]:
        """Cells that have ended since the last call, each with its end."""
        return drained(self._ended, seconds)

    def close(self) -> None:
        """Stops all processes."""
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        for _ in self._threads:
            self._waiting.put(None)
        stopping = [threading.Thread(target=process.stop) for process in self._processes]
        for thread in stopping:
            thread.start()
        for thread in (*stopping, *self._threads):
            if thread.ident is not None:
                thread.join()

    def _work(self, process: Process) -> None:
        while (item := self._waiting.get()) is not None:
            name, line = item
            self._ended.put((name, process.run(line)))


def drained(ended: queue.SimpleQueue[tuple[str, End]], seconds: float) -> list[tuple[str, End]]:
    """All that is in a queue, for the first of which there is time."""
    found = []
    with suppress(queue.Empty):
        found.append(ended.get(timeout=seconds))
        while True:
            found.append(ended.get_nowait())
    return found


def devices() -> list[str]:
    """The accelerators that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    if "CUDA_VISIBLE_DEVICES" in os.environ:
        named = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return [name.strip() for name in named[: torch.cuda.device_count()]]
    return [str(number) for number in range(torch.cuda.device_count())]

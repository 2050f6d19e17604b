"""Cells on Slurm, by submitit: a job array, every job of which runs some cells one after another.

A job that is preempted, or reaches its time limit, stops its cell and is put back into the queue, where the
cell goes on from its checkpoint. Jobs outlive the sweep that submitted them if that is killed: the same
command then waits for the cells that they are at, and takes over what they have finished.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from bench.errors import BenchError
from bench.sweep.worker import End
from bench.sweep.workers import Cells, Cluster, Process, environment
from bench.text import one_line

_TIMEOUTS = 1000
"""How often a job that reached its time limit goes back into the queue."""


class Pack:
    """What a job of Slurm runs: cells, one after another in one process."""

    def __init__(self, lines: Sequence[str], variables: dict[str, str], folder: str) -> None:
        self.lines, self.variables, self.folder = list(lines), variables, folder
        self._process: Process | None = None

    def __call__(self) -> list[dict[str, Any]]:
        """What became of every cell."""
        self._process = Process(self.variables, self.folder)
        try:
            return [asdict(self._process.run(line)) for line in self.lines]
        finally:
            self._process.stop()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Stops the cell; what is put back into the queue. Submitit calls this on preemption."""
        if self._process is not None:
            self._process.stop()
        return submitit.helpers.DelayedSubmission(Pack(self.lines, self.variables, self.folder))


class OnSlurm:
    """Workers on a cluster with Slurm.

    Args:
        folder: For what submitit keeps: its jobs, what they print, what they return.
        threads: Of each cell.
        cluster: What a job asks for, and how many cells it runs.

    Raises:
        BenchError: If there is no Slurm here.
    """

    def __init__(self, folder: Path, threads: int, cluster: Cluster) -> None:
        self._variables, self._cells = environment(threads), cluster.cells
        try:
            self._executor = submitit.AutoExecutor(
                folder, cluster=cluster.manager, slurm_max_num_timeout=_TIMEOUTS
            )
        except RuntimeError as error:
            raise BenchError(f"--workers slurm: {one_line(error)}") from None
        asked = {
            "slurm_partition": cluster.partition,
            "slurm_mem": cluster.memory,
            "slurm_gpus_per_node": int(cluster.gpus) or None,
            "slurm_array_parallelism": cluster.at_once,
        }
        self._executor.update_parameters(
            name="bench-sweep",
            timeout_min=cluster.minutes,
            cpus_per_task=threads,
            **{name: value for name, value in asked.items() if value is not None},
        )
        self._running: dict[submitit.Job[list[dict[str, Any]]], tuple[str, ...]] = {}

    def submit(self, cells: Cells) -> None:
        """Submits one job array."""
        if not cells:
            return
        names = list(cells)
        packs = [tuple(names[at : at + self._cells]) for at in range(0, len(names), self._cells)]
        try:
            with self._executor.batch():
                jobs = [
                    self._executor.submit(Pack([cells[name] for name in pack], self._variables, os.getcwd()))
                    for pack in packs
                ]
        except FailedJobError as error:
            raise BenchError(f"--workers slurm: sbatch refused the jobs: {one_line(error)}") from None
        self._running |= zip(jobs, packs, strict=True)

    def ended(self, seconds: float) -> list[tuple[str, End]]:
        """Cells that have ended since the last call, each with its end."""
        found: list[tuple[str, End]] = []
        time.sleep(seconds)
        for job in [job for job in self._running if job.done()]:
            names = self._running.pop(job)
            found += zip(names, _ends(job, len(names)), strict=True)
        return found

    def close(self) -> None:
        """Cancels the jobs that have not ended."""
        for job in self._running:
            job.cancel(check=False)


def _ends(job: submitit.Job[list[dict[str, Any]]], cells: int) -> list[End]:
    """What became of the cells of a job that is done."""
    try:
        return [End(**end) for end in job.result()]
    except (FailedJobError, UncompletedJobError) as error:
        reason = f"its job {job.job_id} was lost ({job.state}): {one_line(error)}"
        return [End("died", reason)] * cells

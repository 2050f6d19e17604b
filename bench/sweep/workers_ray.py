"""Cells on Ray: every cell is a task that asks for its threads as CPUs, and for a share of a GPU if told to.

Ray finds a node, and tells when the node or its worker is lost; who submitted the cell then tries it again.
Ray's own worker does not run the cell, it minds the `bench.sweep.worker` process that does, and that ends
with it. So what Ray imports and prints does not meet the run, and a cell is the same process here as
anywhere. Nodes must see the folder for runs under the same path, and have the suite installed.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import RayError

from bench.errors import BenchError
from bench.sweep.worker import End
from bench.sweep.workers import Cells, Cluster, Process, environment
from bench.text import one_line

_process: Process | None = None
"""In a worker of Ray: the process of the cells, which the next task of this worker uses again."""


def _attend(line: str, variables: dict[str, str], folder: str) -> dict[str, Any]:
    """Runs a cell in a worker of Ray, which has set CUDA_VISIBLE_DEVICES for this task."""
    global _process
    variables = variables | {k: v for k, v in os.environ.items() if k == "CUDA_VISIBLE_DEVICES"}
    if _process is not None and _process.variables != variables:
        _process.stop()
        _process = None
    if _process is None:
        _process = Process(variables, folder)
    return asdict(_process.run(line))


class OnRay:
    """Workers on a cluster of Ray.

    Args:
        address: `ray://HOST:PORT` of a client's port; None is the cluster of RAY_ADDRESS, one that runs on
            this machine, or else a new one of this machine.
        threads: Of each cell.
        cluster: `gpus` of a cell, and its `placement`.

    Raises:
        BenchError: If the cluster cannot be reached.
    """

    def __init__(self, address: str | None, threads: int, cluster: Cluster) -> None:
        self._cleaning = ExitStack()
        self._cleaning.enter_context(redirect_stdout(sys.stderr))  # Ray tells there that a node is lost
        self._cleaning.callback(ray.shutdown)
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            self.close()
            raise BenchError(f"--workers {address or 'ray'}: {one_line(error)}") from None
        self._variables = environment(threads)
        task = ray.remote(_attend)
        self._task = task.options(
            num_cpus=threads,
            num_gpus=cluster.gpus,
            max_retries=0,
            scheduling_strategy="SPREAD" if cluster.placement == "spread" else "DEFAULT",
        )
        self._running: dict[Any, str] = {}

    def submit(self, cells: Cells) -> None:
        """Hands cells to Ray, which queues them."""
        for name, line in cells.items():
            self._running[self._task.remote(line, self._variables, os.getcwd())] = name

    def ended(self, seconds: float) -> list[tuple[str, End]]:
        """Cells that have ended since the last call, each with its end."""
        if not self._running:
            time.sleep(seconds)
            return []
        try:
            ray.wait(list(self._running), num_returns=1, timeout=seconds)
            done, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        except (RayError, ConnectionError) as error:
            raise BenchError(f"--workers ray: the cluster is lost: {one_line(error)}") from None
        return [(self._running.pop(task), _end(task)) for task in done]

    def close(self) -> None:
        """Leaves the cluster, which ends this driver's workers and so the processes of its cells."""
        self._cleaning.close()


def _end(task: Any) -> End:
    try:
        return End(**ray.get(task))
    except RayError as error:
        return End("died", f"its worker was lost: {type(error).__name__}: {one_line(error)}")

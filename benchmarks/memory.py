"""What tensors occupy at the peak of some work, as the profiler counts it; shared by the benchmarks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from torch.profiler import ProfilerActivity, profile


def peak(work: Callable[[], object]) -> int:
    """Most bytes of tensors on the CPU at a time, of those that the work allocates."""
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        kept = work()
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        largest = max(largest, now)
    del kept  # up to here, so that what the work returns counts as allocated
    return largest


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The profiler writes to the process's standard error: not while it runs."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(nowhere)

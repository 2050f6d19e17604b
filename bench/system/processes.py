"""The processes of a run on several devices, one per device, and how they come to one decision.

Every process runs the whole command under the same seeds, so that all of them take the same branches. What
one process alone can know (a file, a clock, a failure, the result of its share of the work) reaches the
others by `from_first` and `from_each`: all then go on with the same value, or raise the same error. The
first process alone writes to the terminal. One that is lost ends all others, with one line.

The processes are started by torchrun, by Slurm, by hand with LOCAL_RANK set, or by the first process of each
machine, which calls its own command again.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bench.errors import BenchError, UsageError

T = TypeVar("T")

_MEETING = timedelta(minutes=10)
"""For so long processes that were started wait for those that are not there yet."""
_WAITING = timedelta(days=30)
"""For so long a process waits for another's work: a fit that is made by one process may take days."""
_EVERY, _GRACE = 0.5, 5.0
"""Seconds between two looks at the other processes; and after which what does not end by itself is ended."""
_STARTED_BY = "BENCH_STARTED_BY"
"""Variable that holds the number of the process that has started this one for a run."""
_GOES_ON = "the same command goes on from here"


class Lost(BenchError):
    """Another process of the run has ended before its time; the run is unfinished."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among those of its run.

    Attributes:
        rank: Its number, from 0.
        world: Number of processes.
        local: Its number on its machine.
        local_world: Number of processes on its machine.
        device: Where it trains.
        address: Of the machine of the first process.
        port: On which the first process listens there.
        is_started: Whether something else has started the processes.
    """

    rank: int
    world: int
    local: int
    local_world: int
    device: torch.device
    address: str = ""
    port: int = 0
    is_started: bool = True

    @property
    def starts_others(self) -> bool:
        """Whether this process starts the others of its machine."""
        return self.world > 1 and self.local == 0 and not self.is_started and not dist.is_initialized()


@dataclass
class _State:
    """What this process knows of the others; without others as it is here."""

    place: Place | None = None
    store: Any = None
    watched: Any = None  # the same for the watching thread: a store is locked while it waits for a key
    group: Any = None  # of objects; tensors travel in torch's default group
    children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    watching: threading.Thread | None = None
    is_left: threading.Event = field(default_factory=threading.Event)  # ends the watching thread
    is_alone: int = 0
    is_running: bool = False
    is_lost: bool = False


_state = _State()


def ranks() -> tuple[int, int]:
    """(rank, number of processes) of this process, in what it is doing at present."""
    if _state.place is None or _state.is_alone:
        return 0, 1
    return _state.place.rank, _state.place.world


@contextmanager
def alone() -> Iterator[None]:
    """Inside the block this process works by itself, as if there were no others."""
    _state.is_alone += 1
    try:
        yield
    finally:
        _state.is_alone -= 1


# ------------------------------------------------------------------------------------- one decision for all


@dataclass(frozen=True)
class _Outcome:
    """What a work gave: a value or an error."""

    value: Any = None
    error: Exception | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


def _tried(work: Callable[[], Any]) -> _Outcome:
    """The outcome of a work, of which every process can be told."""
    try:
        with alone():
            return _Outcome(work())
    except Lost:
        raise
    except Exception as error:
        if rank := ranks()[0]:
            error.add_note(f"in process {rank}:\n{traceback.format_exc()}")
        if not type(error).__module__.startswith("bench."):  # another's may not survive the way
            return _Outcome(error=RuntimeError(f"{type(error).__name__}: {error}"))
        return _Outcome(error=error)


def from_first(work: Callable[[], T]) -> T:
    """What the first process's `work` returns, or raises, in every process; the others do not call it."""
    rank, world = ranks()
    if world == 1:
        return work()
    outcome = [_tried(work) if rank == 0 else _Outcome()]
    _together(lambda: dist.broadcast_object_list(outcome, 0, group=_state.group))
    result: T = outcome[0].get()
    return result


def from_each(work: Callable[[], T]) -> list[T]:
    """What `work` returns in each process, in their order, in every process.

    Raises:
        Exception: In every process, that of the first in which one was raised.
    """
    world = ranks()[1]
    if world == 1:
        return [work()]
    outcome, outcomes = _tried(work), [_Outcome()] * world
    _together(lambda: dist.all_gather_object(outcomes, outcome, group=_state.group))
    return [outcome.get() for outcome in outcomes]


def sum_up(tensor: Tensor) -> Tensor:
    """Replaces a tensor by its sum over the processes: bit for bit the same in each."""
    if ranks()[1] > 1:
        _together(lambda: dist.all_reduce(tensor))
    return tensor


def average_gradients(parameters: Iterator[Tensor], share: float) -> None:
    """Replaces gradients by their mean over the processes, each weighted by its share of the batch.

    A parameter without gradient counts as one of gradient 0, unless it has none in any process.

    Args:
        parameters: Those that are trained.
        share: Examples of this process over examples of the batch; the shares add up to 1.
    """
    trained = [p for p in parameters if p.requires_grad]
    of_type: dict[torch.dtype, list[Tensor]] = {}
    for p in trained:
        of_type.setdefault(p.dtype, []).append(p)
    for same in of_type.values():
        has = torch.tensor([float(p.grad is not None) for p in same], dtype=same[0].dtype)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
        flat = torch.cat([part.flatten() for part in parts])
        # What has no share is no part of the batch, whatever its gradients are.
        flat = flat * share if share else torch.zeros_like(flat)
        flat = sum_up(torch.cat([flat, has.to(flat)]))
        found = flat[-len(same) :].tolist() if not has.all() else [1.0] * len(same)
        for p, total, any_has in zip(
            same, flat.split([p.numel() for p in same] + [len(same)]), found, strict=False
        ):
            if any_has:
                p.grad = total.view_as(p).clone() if p.grad is None else p.grad.copy_(total.view_as(p))


def _together(collective: Callable[[], Any]) -> None:
    """Calls what all processes call at once; raises Lost if one of them is gone."""
    try:
        collective()
    except RuntimeError as error:
        _raise_lost(error)


# -------------------------------------------------------------------------------------- beginning and end


def join(place: Place) -> None:
    """Brings the processes of a run together, and starts those of this machine that nobody has started.

    Raises:
        UsageError: If they cannot be started from here.
        Lost: If they do not meet.
    """
    if place.world == 1:
        _state.place = None
        return
    if dist.is_initialized():
        if (_state.place is None and _state.store is None) or dist.get_world_size() != place.world:
            raise UsageError(
                f"--trainer.devices: this process is one of {dist.get_world_size()}, not of {place.world}"
            )
        _state.place = place
        return
    if place.starts_others:
        _start(place)
    if place.rank > 0:  # the first process alone writes
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    _state.is_running = True
    _state.watching = threading.Thread(target=_watch, args=(place,), daemon=True)
    _state.watching.start()
    try:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        hosts = place.rank == 0 and not agent
        own = dist.TCPStore(
            place.address, place.port, is_master=hosts, timeout=_MEETING, wait_for_workers=False
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _state.store = dist.PrefixStore(f"bench/{attempt}", own)
        backend = "nccl" if place.device.type == "cuda" else "gloo"
        if place.device.type == "cuda":
            torch.cuda.set_device(place.device)
        meeting = dist.PrefixStore("meeting", _state.store)
        dist.init_process_group(
            backend, store=meeting, rank=place.rank, world_size=place.world, timeout=_MEETING
        )
        _state.group = dist.new_group(backend="gloo", timeout=_WAITING)
        _state.watched = _state.store.clone()  # not there: it would wait for the dead
    except RuntimeError as error:
        _raise_lost(error)
    _state.place = place
    atexit.register(_leave)


def divide_threads(place: Place) -> None:
    """Gives each process its share of its machine's cores, unless OMP_NUM_THREADS says how many."""
    if place.local_world > 1 and "OMP_NUM_THREADS" not in os.environ:
        share = (os.cpu_count() or 1) // place.local_world
        torch.set_num_threads(max(1, min(torch.get_num_threads(), share)))


def _start(place: Place) -> None:
    if hasattr(sys, "ps1"):
        raise UsageError("--trainer.devices: several devices need bench run or a script, not an open shell")
    known = {"MASTER_ADDR": place.address, "MASTER_PORT": str(place.port), "WORLD_SIZE": str(place.world)}
    known |= {"NODE_RANK": str(place.rank // place.local_world), _STARTED_BY: str(os.getpid())}
    for number in range(1, place.local_world):
        environment = {**os.environ, **known, "LOCAL_RANK": str(number)}
        command = [sys.executable, *sys.orig_argv[1:]]
        _state.children[place.rank + number] = subprocess.Popen(command, env=environment)


@contextmanager
def running() -> Iterator[None]:
    """Around a run: while it goes on, the end of one process is the end of all."""
    _state.is_running = True
    try:
        yield
    finally:
        _state.is_running = False


def report(error: Exception) -> None:
    """Leaves word for the first process of why this one ends."""
    rank = ranks()[0]
    reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    with suppress(RuntimeError):
        _state.store.set(f"failed/{rank}", f"{reason}\n{traceback.format_exc()}")


def _raise_lost(error: Exception) -> NoReturn:
    """Says which process is gone, and why, as far as can be known."""
    end = time.monotonic() + _GRACE / 2
    world = dist.get_world_size() if dist.is_initialized() else 1
    while not (found := _gone(_state.store, world)) and time.monotonic() < end:
        time.sleep(0.05)
    _state.is_lost = True
    first = (str(error).strip().splitlines() or [""])[0]
    raise _lost(found or f"the connection between the processes of the run broke ({first})") from None


def _lost(text: str) -> Lost:
    line, _, details = text.partition("\n")
    lost = Lost(f"{line}; {_GOES_ON}")
    if details:
        lost.add_note(details)
    return lost


def _gone(store: Any, world: int) -> str:
    """Which process has ended before its time; empty if none is known to have."""
    for rank in range(1, world if store is not None else 1):
        with suppress(RuntimeError):
            if store.check([f"failed/{rank}"]):
                return f"process {rank} failed: {store.get(f'failed/{rank}').decode()}"
    for rank, child in _state.children.items():
        if code := child.poll():
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return f"process {rank} was lost ({how})"
    return ""


def _watch(place: Place) -> None:
    """Sees to it that no process outlives the others: one that waits for a dead one may wait for ever."""
    parent = int(os.environ.get(_STARTED_BY, 0)) if place.rank else 0
    while not (_state.is_lost or _state.is_left.is_set()):
        store = _state.watched
        if place.rank == 0:
            gone = _gone(store, place.world) if _state.is_running else ""
            ends = bool(gone) and not _state.is_left.wait(_GRACE)
            if ends and _state.is_running and not _state.is_lost:  # as on a GPU, where nothing is raised
                _end_at_once(str(_lost(gone)))
        else:
            is_orphan = parent not in (0, os.getppid())
            try:
                if not is_orphan and store is not None and store.check(["ended"]):
                    if _state.is_left.wait(_GRACE / 2):  # by itself, with its last files written
                        return
                    store.add("left", 1)
                    os._exit(0)
            except RuntimeError:
                is_orphan = True
            if is_orphan:
                _end_at_once(f"process 0 was lost; {_GOES_ON}" if place.rank == 1 else "")
        _state.is_left.wait(_EVERY)


def _end_at_once(line: str) -> NoReturn:
    if line and sys.__stderr__ is not None:
        with suppress(OSError):
            print(f"bench: {line}", file=sys.__stderr__, flush=True)
    for child in _state.children.values():
        child.kill()
    os._exit(BenchError.exit_code)


def _leave() -> None:
    """At the end of this process: the first one has the others end, and waits for them.

    Threads of gloo that still stand when a process ends may abort it, with its work done and exit code 0 due
    (https://github.com/pytorch/pytorch/issues/190489). So each process leaves its groups before. The watching
    thread ends before, too: Python ends a thread where it next wants the interpreter, and one that is inside
    the store's C++ then takes the process with it ("terminate called without an active exception").
    """
    place = _state.place
    if place is None:
        return
    _state.is_left.set()
    if _state.watching is not None:
        _state.watching.join(_GRACE)
    if not _state.is_lost:  # else a collective may be under way, for whose end this would wait
        with suppress(RuntimeError):
            dist.destroy_process_group()
    with suppress(RuntimeError):
        if place.rank > 0:
            _state.store.add("left", 1)
            return
        _state.store.set("ended", "")
        end = time.monotonic() + (_GRACE if _state.children or not _state.is_lost else 0)
        while time.monotonic() < end and _state.store.add("left", 0) < place.world - 1:
            if _state.children and all(child.poll() is not None for child in _state.children.values()):
                break
            time.sleep(0.02)
    for child in _state.children.values():
        with suppress(subprocess.TimeoutExpired):
            child.wait(1)
        child.kill()

"""`bench verify --rerun one`: one seed of a submission is made again, and compared with what was handed in.

Which one follows from the SHA-256 of `submission.json`, which fixes every file, and from randomness that is
younger: nobody could choose the seed that is honest. Both are part of the answer, so that everybody can draw
again. The run is made from the commit that its record names, which must be of this project's history, in a
process without network where the system permits that, with limits on memory and time.

**Compared** is every array by the root mean square of its difference. Two runs of one seed differ by rounding
where processor, torch or threads differ, and training makes more of it, so there is no absolute tolerance: a
run may be a tenth as far from what was handed in as the two nearest seeds of the entry are from each other,
or as far as the rounding of float16 reaches. A mean loss over log-probabilities then moves by no more, since
a mean is at most a root mean square.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from bench.errors import BenchError, Diverged, UsageError
from bench.leaderboard.check.codes import ACCEPTED
from bench.leaderboard.check.facts import command
from bench.leaderboard.check.reading import arrays_of, read_header, read_record
from bench.leaderboard.check.structure import HandedIn, check
from bench.leaderboard.check.verify import Verdict
from bench.leaderboard.evidence.manifest import ROOT
from bench.leaderboard.evidence.store import STORE, sha256
from bench.leaderboard.evidence.submission import MANIFEST
from bench.runs import registry
from bench.runs.records import Record
from bench.spec import Arrays
from bench.system import places
from bench.system.files import read
from bench.system.source import source_hash
from bench.text import one_line

SHARE: Final = 0.1
"""How far a run may be from the one handed in, relative to the distance of the entry's two nearest seeds."""
ROUNDING: Final = 2e-3
"""The same relative to the numbers themselves: twice what float16 rounds."""
MEMORY: Final = 16 * 2**30
"""Bytes of data of the process."""
_LONGEST: Final = 24 * 3600
_BEACON: Final = re.compile(r"[A-Za-z0-9.-]{8,128}", re.ASCII)
_KEPT: Final = ("PATH", "LD_LIBRARY_PATH")
_FOLDERS: Final = ("methods", "tasks", "leaderboard")
_RUN: Final = "import sys; from bench.__main__ import main; sys.exit(main())"


class Rerun(NamedTuple):
    """What came of it.

    Attributes:
        verdict: Accepted with the tier `re-run`, or rejected with `rerun-differs` or `rerun-failed`.
        drawn: How the run was drawn, for `leaderboard/status.toml`.
    """

    verdict: Verdict
    drawn: str


def rerun(
    directory: Path,
    beacon: str | None = None,
    trust: bool = False,
    data_dir: str | None = None,
    store: Path = STORE,
) -> Rerun:
    """Makes one run of a submission again; it was verified.

    Args:
        directory: The submission.
        beacon: Public randomness from after the submission was handed in; None takes 256 fresh bits.
        trust: Run a method that is none of the suite's, from the folder where this process works.
        data_dir: Folder of data files.
        store: Folder of arrays by their SHA-256.

    Raises:
        UsageError: If the drawn run cannot be made again here; in one line.
        Rejected: If the submission is not what was verified.
    """
    if beacon is not None and not _BEACON.fullmatch(beacon):
        raise UsageError(f"--beacon {one_line(beacon, 80)!r}: 8 to 128 letters, digits, dots and hyphens")
    checked = check(directory, None, store)
    digest = sha256(read(directory / MANIFEST))
    randomness = os.urandom(32).hex() if beacon is None else beacon
    run = checked.runs[draw(digest, randomness, len(checked.runs))]
    record = run.record
    drawn = f"{run.name}, by submission {digest} and {randomness}"
    with tempfile.TemporaryDirectory(prefix="bench-rerun-") as folder:
        source, told = _source(record, Path(folder), trust)
        isolation = without_network()
        try:
            again, arrays = made_again(record, Path(folder), source, isolation, data_dir, trust)
        except BenchError as error:
            return Rerun(Verdict("rejected", "rerun-failed", f"{drawn}: {error}", None), drawn)
    others = [other for other in checked.runs if other.cell == run.cell]
    is_same, found = compared(run, again, arrays, others)
    told += f"; {'without network' if isolation else 'this system permits no process without network'}"
    if differing := _environment(record, again):
        told += f"; {differing}"
    text = f"{drawn}; {told}; {found}"
    if not is_same:
        return Rerun(Verdict("rejected", "rerun-differs", text, None), drawn)
    return Rerun(Verdict("accepted", ACCEPTED, text, "re-run"), drawn)


def draw(digest: str, randomness: str, number: int) -> int:
    """Which of so many runs is made again, from 0: a hash of both, so neither side chooses alone."""
    return int(hashlib.sha256(f"{digest}/{randomness}".encode()).hexdigest(), 16) % number


# ------------------------------------------------------------------------------------------------ the source


def _source(record: Record, folder: Path, trust: bool) -> tuple[Path | None, str]:
    """A folder with the source of a run, None for the suite that runs here; and what it is, in words.

    Raises:
        UsageError: If it cannot be had, is a stranger's, or the suite has no such method.
    """
    name, made = record.method.name, record.provenance
    if ":" in name and not trust:
        raise UsageError(f"{name} is no method of this suite: --trust runs its code, which is a stranger's")
    if ":" not in name:
        registry.method(name)  # no other name becomes a word of a command
    if ":" in name or made.commit is None:
        if made.source_hash != source_hash():
            raise UsageError(f"{name} was run by another source of the suite than this one: check that out")
        return None, "by this source"
    if _git("merge-base", "--is-ancestor", made.commit, "HEAD") is None:
        raise UsageError(f"commit {made.commit} is none of this project's history: nothing of it is run")
    paths = [*_FOLDERS[:2], "bench", ":(glob)leaderboard/**/*.py"]
    if (archive := _git("archive", made.commit, "--", *paths)) is None:
        raise UsageError(f"commit {made.commit} cannot be read here")
    root = folder / "source"
    with tarfile.open(fileobj=BytesIO(archive)) as content:
        content.extractall(root, filter="data")
    for part in _FOLDERS:  # older commits have no links for them
        if not (root / "bench" / part).exists():
            (root / "bench" / part).symlink_to(Path("..") / part)
    return root, f"by commit {made.commit[:12]}"


def _git(*arguments: str) -> bytes | None:
    """What git says in this project; None if it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT.parent, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


# ------------------------------------------------------------------------------------------------ the process


def without_network() -> list[str]:
    """The command before a command by which that has no network; empty where the system permits none."""
    words = ["unshare", "--map-root-user", "--net"]
    with suppress(OSError):
        if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
            return words
    return []


def made_again(
    record: Record,
    folder: Path,
    source: Path | None,
    isolation: Sequence[str],
    data_dir: str | None,
    trust: bool = False,
) -> tuple[Record, Arrays]:
    """Makes a run again, as its record says; returns the new record and arrays, none where it left none.

    Args:
        record: Of the run.
        folder: Empty, for all that is written.
        source: Folder of the suite's source; None for that which runs here.
        isolation: The command by which the run has no network.
        data_dir: Folder of data files.
        trust: Whether what lies in the folder where this process works may be imported.

    Raises:
        BenchError: If it ends without a record, or beyond its limits, or was made by other source than the
            record says.
    """
    seconds = min(_LONGEST, 600 + 10 * record.seconds * record.environment.threads)
    words = [*shlex.split(command(record))[1:], "--threads", str(record.environment.threads)]
    data = data_dir or os.environ.get("BENCH_DATA") or str(places.CACHE_ROOT)
    words += ["--out", str(folder / "runs"), "--data-dir", os.path.abspath(os.path.expanduser(data))]
    paths = [*([str(source)] if source else []), *([os.getcwd()] if trust else [])]
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment |= {"HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            [*isolation, sys.executable, "-P", "-B", "-c", _RUN, *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            preexec_fn=_limited,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"it took more than {seconds:.0f} s") from None
    made = sorted((folder / "runs").glob("*/*/*/record.json"))
    if done.returncode not in (0, Diverged.exit_code) or len(made) != 1:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise BenchError(f"it ended with {done.returncode}: {one_line(said[-1] if said else 'no word', 200)}")
    again = read_record(read(made[0]), "the new record")
    refuse_other_source(record, again)
    if again.provenance.arrays_digest is None:  # it diverged
        return again, {}
    content = read(made[0].with_name("arrays.safetensors"))
    return again, arrays_of(content, read_header(content, "the new arrays"))


def refuse_other_source(record: Record, again: Record) -> None:
    """Refuses a record whose hashes are not those of the source that it names, which has made the new one.

    Raises:
        BenchError: In one line.
    """
    for name in ("source_hash", "method_file_hash"):
        if getattr(again.provenance, name) != getattr(record.provenance, name):
            raise BenchError(f"the {name} of the record is not that of the source that it names")


def _limited() -> None:
    """Limits the memory of this process."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# --------------------------------------------------------------------------------------------- the comparison


def compared(run: HandedIn, again: Record, arrays: Arrays, seeds: Sequence[HandedIn]) -> tuple[bool, str]:
    """Whether a run made again is the one handed in, but for rounding; and how far it is, in words.

    Args:
        run: As it was handed in.
        again: The new record.
        arrays: The new arrays.
        seeds: All runs of the entry.
    """
    if again.status != run.record.status:
        return False, f"it {again.status}, and was handed in as {run.record.status}"
    if run.arrays_file is None:
        return True, f"it {again.status}, as it was handed in"
    given = run.arrays()
    if given.keys() != arrays.keys() or any(given[name].shape != arrays[name].shape for name in given):
        return False, "its arrays have other names or shapes"
    main = again.task.main_metric
    values = " and ".join(_shown(record.metrics[main]) for record in (again, run.record))
    told = f"{main} is {values}, as handed in"
    if all(np.array_equal(given[name], arrays[name]) for name in given):
        return True, f"the same predictions bit for bit; {told}"
    of_seeds = [seed.arrays() for seed in seeds if seed.arrays_file is not None]
    worst = 0.0
    for name in given:
        found = distance(arrays[name], given[name])
        nearest = min(
            (
                distance(first[name], second[name])
                for first, second in combinations(of_seeds, 2)
                if first[name].shape == second[name].shape
            ),
            default=0.0,
        )
        reach = float(np.sqrt(np.mean(given[name].astype(np.float64) ** 2)))
        allowed = max(SHARE * nearest, ROUNDING * reach)
        if not found <= allowed:
            return False, (
                f"{name} differs by {found:.3g} (root mean square), where {allowed:.3g} is allowed and two "
                f"of its seeds differ by {nearest:.3g}; {told}"
            )
        worst = max(worst, found / allowed if allowed else 0.0)
    return True, f"predictions differ by {worst:.2g} of what is allowed; {told}"


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Root mean square of the difference of two arrays of one shape; infinite if a number is not finite."""
    difference = first.astype(np.float64) - second.astype(np.float64)
    found = float(np.sqrt(np.mean(difference**2)))
    return found if np.isfinite(found) else float("inf")


def _shown(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.6g}"


def _environment(record: Record, again: Record) -> str:
    """What of the environment is another than the record's, in words; empty if nothing is."""
    then, now = record.environment.model_dump(), again.environment.model_dump()
    names = [name for name in then if then[name] != now[name]]
    return f"with another {', '.join(names)}" if names else ""

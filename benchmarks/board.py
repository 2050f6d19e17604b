"""How long the board of 200 made-up entries on 20 tasks takes, and whether built again it is the same.

    python benchmarks/board.py [--check] [--json benchmarks/board.json] [--entries 200] [--tasks 20]

Submissions are made in a temporary folder first, which is not measured: entries of ten seeds with predictions
of 1,000 examples. Then the board is built twice by `bench board build`, the first time without a cache.
Seconds are by the clock; processor seconds are those of all processes of the build. `--check` demands under
60 s and under 15 s by the clock, and equal bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import print_table, write

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

COLD_SECONDS, AGAIN_SECONDS = 60, 15


def made(folder: Path, entries: int, tasks: int, seeds: int, examples: int) -> list[str]:
    """Writes the submissions, ten methods each; returns the names of the tasks."""
    import boards

    per_slug = min(10, entries)
    slugs = ["reference", *(f"group-{number:02}" for number in range(1, entries // per_slug))]
    boards.make(folder, slugs, per_slug, tasks, seeds, examples)
    return boards.task_names(tasks)


def built(name: str, submissions: Path, out: Path, cache: Path, tasks: list[str]) -> dict:
    """Builds the board; returns seconds, processor seconds and a digest of all files."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    arguments = ["--submissions", str(submissions), "--out", str(out), "--cache", str(cache)]
    arguments += [part for task in tasks for part in ("--import", task)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", "board", "build", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - began
    with contextlib.suppress(ChildProcessError):  # what the build leaves ends by itself, and counts
        while True:
            os.wait()
    if done.returncode:
        sys.exit(f"bench board build ended with {done.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    files = sorted(path for path in out.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(out)}\0".encode() + path.read_bytes())
    size = sum(path.stat().st_size for path in files) / 2**20
    return {
        "build": name,
        "seconds": round(seconds, 1),
        "processor seconds": round(spent, 1),
        "files": len(files),
        "MiB": round(size, 1),
        "digest": digest.hexdigest()[:16],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="file for the rows (benchmarks/board.json)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--keep", type=Path, help="folder for the submissions, used again if it is there")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: grandchildren are waited for here
    sizes = {name: getattr(arguments, name) for name in ("entries", "tasks", "seeds", "examples")}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary) / "submissions"
        if folder.exists():
            import boards

            tasks = boards.task_names(arguments.tasks)
        else:
            tasks = made(folder, **sizes)
        paths = folder, Path(temporary) / "site", Path(temporary) / "cache"
        rows = [built(name, *paths, tasks) for name in ("cold", "again")]
    print_table(rows)
    is_kept = (
        rows[0]["seconds"] < COLD_SECONDS
        and rows[1]["seconds"] < AGAIN_SECONDS
        and rows[0]["digest"] == rows[1]["digest"]
    )
    if arguments.json and (is_kept or not arguments.check):
        write(arguments.json, {"cores": os.cpu_count(), **sizes, "rows": rows})
    print("targets are kept" if is_kept else "a target is missed")
    return int(arguments.check and not is_kept)


if __name__ == "__main__":
    sys.exit(main())

"""What the board's tasks came to, kept under a digest of all that they were computed from.

A cache that is damaged, or cannot be written, costs time and nothing else. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import OutputError
from bench.intervals import Interval
from bench.leaderboard.rank.contrasts import Evidence
from bench.leaderboard.rank.ranking import Place, Standing
from bench.leaderboard.rank.rows import Table
from bench.leaderboard.rank.standings import Computed
from bench.system import places
from bench.system.files import write
from bench.system.source import source_hash


def folder(cache: Path | None, submissions: Path) -> Path:
    """Where a board is kept: of each folder of submissions apart, in the user's cache unless told."""
    own = hashlib.sha256(str(submissions.resolve()).encode()).hexdigest()[:12]
    return (places.CACHE_ROOT / "board" if cache is None else cache) / own


class Cache:
    """What tasks came to, by a key of all that it depends on. A cache that is damaged costs time alone."""

    def __init__(self, folder: Path, imports: Sequence[str]) -> None:
        self._folder = folder
        self._source = _fingerprint(imports)
        self._used: set[str] = set()

    def key(self, *parts: str) -> str:
        """The name of what depends on these and on the source."""
        return hashlib.sha256("\n".join([self._source, *parts]).encode()).hexdigest()[:40]

    def read(self, key: str) -> Any:
        """What was kept; None if nothing was."""
        self._used.add(f"{key}.json")
        try:
            content = json.loads((self._folder / f"{key}.json").read_bytes())
            text = json.dumps(content["found"])
            return content["found"] if content["seal"] == hashlib.sha256(text.encode()).hexdigest() else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def write(self, key: str, found: Any) -> None:
        """Keeps it; a cache that cannot be written is none."""
        seal = hashlib.sha256(json.dumps(found).encode()).hexdigest()
        with suppress(OutputError):
            write(self._folder / f"{key}.json", json.dumps({"seal": seal, "found": found}).encode())

    def task(self, key: str) -> Computed | None:
        """What a task came to."""
        self._used.add(f"{key}.npz")
        kept = self.read(key)
        if kept is None:
            return None
        standing = labels = None
        if kept["has_standing"]:
            try:
                with np.load(self._folder / f"{key}.npz", allow_pickle=False) as arrays:
                    standing = _standing(kept["table"], arrays)
                    labels = arrays.get("labels")
            except (OSError, ValueError, KeyError, EOFError):
                return None
        return Computed(kept["table"], kept["pairs"], kept["figures"], standing, labels)

    def keep_task(self, key: str, computed: Computed) -> None:
        """Keeps what a task came to."""
        standing = computed.standing
        if standing is not None and standing.evidence is not None:
            evidence = standing.evidence
            arrays = {name: getattr(evidence, name) for name in _EVIDENCE}
            if computed.labels is not None:
                arrays["labels"] = computed.labels
            content = io.BytesIO()
            np.savez(content, low=standing.low, high=standing.high, names=np.array(evidence.names), **arrays)
            with suppress(OutputError):
                write(self._folder / f"{key}.npz", content.getvalue())
        kept: dict[str, Any] = {"table": computed.table, "pairs": computed.pairs, "figures": computed.figures}
        kept["has_standing"] = standing is not None
        self.write(key, kept)

    def forget_others(self) -> None:
        """Removes what this build did not use."""
        with suppress(OSError):
            for entry in os.scandir(self._folder):
                if entry.name not in self._used:
                    os.unlink(entry.path)


_EVIDENCE = ("means", "seeds", "freedom", "noise", "paired", "share")


def _standing(table: Table, arrays: Mapping[str, np.ndarray]) -> Standing:
    """A standing as it was before it was kept."""
    means, seeds, freedom, noise, paired = (arrays[name] for name in _EVIDENCE[:-1])
    share = float(arrays["share"])
    evidence = Evidence(tuple(map(str, arrays["names"])), means, seeds, freedom, noise, paired, share)
    places = []
    for row in table["entries"]:
        cell = None
        if row["mean"] is not None:
            low, high = (np.nan if x is None else x for x in (row["low"], row["high"]))
            cell = Interval(row["mean"], low, high, row["basis"])
        ranks = (row["ranks"][0], row["ranks"][1]) if row["ranks"] else None
        places.append(Place(row["name"], cell, ranks, row["group"], row["why"]))
    return Standing(tuple(places), arrays["low"], arrays["high"], evidence)


def _fingerprint(imports: Sequence[str]) -> str:
    """A digest of all that computes: source of suite, board and own tasks, versions of libraries."""
    sha = hashlib.sha256(source_hash().encode())
    own = [spec.origin for name in imports if (spec := importlib.util.find_spec(name.partition(":")[0]))]
    folder = Path(__file__).parent.parent
    for path in [*sorted(folder.rglob("*.py")), *(Path(origin) for origin in own if origin)]:
        sha.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    for library in ("numpy", "scipy", "torch", "altair", "vl-convert-python"):
        sha.update(f"{library} {version(library)}\0".encode())
    return sha.hexdigest()

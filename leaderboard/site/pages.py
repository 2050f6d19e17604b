"""The folder of pages: HTML, and CSV and JSON beside every table, an Atom feed, figures and records.

Everything that a stranger wrote passes through the templates' escaping. Equal boards give equal bytes. The
folder is written under another name beside its place and then takes it, so that nobody sees half of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import bench
from bench.errors import UsageError
from bench.leaderboard.evidence.submission import OURS
from bench.leaderboard.rank.board import Board
from bench.leaderboard.rank.pairing import MOST, pair
from bench.leaderboard.rank.rows import EntryRow, Table
from bench.leaderboard.site import fronts, words
from bench.runs.marks import MEANINGS
from bench.runs.registry import nearest
from bench.runs.searches import NONE_TUNED, parted
from bench.system.files import replace_folder
from bench.system.files import write as write_file

MARK = "board.json"
"""By it a folder is known to be a board's, which may be replaced."""
TIERS = {
    "re-run": "re-run by maintainers",
    "recomputed": "recomputed",
    "self-reported": "self-reported",
    "targets unseen": "targets unseen",
}


def write(board: Board, out: Path) -> Path:
    """Writes the pages; returns the path of the first.

    Args:
        board: What they show.
        out: A new or empty folder, or one that holds a board.

    Raises:
        UsageError: If the folder holds something else.
        OutputError: If it cannot be written; the old folder is then as it was.
    """
    if out.exists() and not ((out / MARK).is_file() or (out.is_dir() and not any(out.iterdir()))):
        raise UsageError(f"{out} holds something else than a board: choose another --out")
    site = Site(board)

    def fill(growing: Path) -> None:
        known: set[Path] = set()
        for name, content in site.contents():
            path = growing / name
            if path.parent not in known:
                path.parent.mkdir(parents=True, exist_ok=True)
                known.add(path.parent)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    replace_folder(out, fill, force=True)
    return out / "index.html"


def add_pair(board: Board, out: Path, task: str, first: str, second: str) -> Path:
    """Writes the compare page of any two ranked entries into built pages; returns its path.

    Raises:
        UsageError: If there are no such pages, or no such entries are ranked on the task.
        OutputError: If it cannot be written.
    """
    if not (out / MARK).is_file():
        raise UsageError(f"{out} holds no board: bench board build --out {out}")
    standing = board.standings.get(task)
    if standing is None:
        raise UsageError(f"no task '{task}' is ranked: {nearest(task, sorted(board.standings))}")
    names = [place.name for place in standing.places if place.ranks]
    for name in (first, second):
        if name not in names:
            raise UsageError(f"no entry '{name}' is ranked on {task}: {nearest(name, names)}")
    first, second = sorted((first, second), key=names.index)
    higher = board.tables[task]["higher_is_better"]
    found = pair(standing, first, second, higher, board.labels.get(task))
    page = out / words.pair_page(task, first, second)
    write_file(page, Site(board).pair_page(task, found).encode())
    return page


class Site:
    """What every page may use."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.environment = _environment()
        self.environment.globals.update(site=self, words=words, tiers=TIERS, version=bench.__version__)
        self.environment.globals.update(meanings=MEANINGS, none_tuned=NONE_TUNED)
        self.tables = board.tables
        self._rows: dict[tuple[str, str], dict[str, EntryRow]] = {}
        self._by_name: dict[tuple[str, str], EntryRow] = {}
        for task, table in board.tables.items():
            for row in table["entries"]:
                self._rows.setdefault((row["slug"], row["folder"]), {})[task] = row
                self._by_name[task, row["name"]] = row
        self._links = {name: self.entry(row) for (_, name), row in self._by_name.items()}
        self._declared = {name: row["declares"] for (_, name), row in self._by_name.items()}
        self._pages = {
            words.pair_page(task, found["first"], found["second"])
            for task, pairs in board.pairs.items()
            for found in pairs
        }

    # ---- what templates ask

    @property
    def evidence(self) -> dict[str, list[Table]]:
        """Tables of runs that are kept as evidence, by the name of their task."""
        found: dict[str, list[Table]] = {}
        for _, table in sorted(self.board.recorded.items()):
            found.setdefault(table["task_name"], []).append(table)
        return found

    def row(self, task: str, name: str) -> EntryRow:
        """The row of an entry on a task."""
        return self._by_name[task, name]

    def entry(self, row: Mapping[str, Any]) -> str:
        """The page of a method."""
        return f"methods/{row['slug']}/{row['folder']}.html"

    def entry_of(self, name: str) -> str:
        """The page of the entry of this name."""
        return self._links[name]

    def declared(self, name: str) -> str:
        """What the method of the entry of this name declares of its posterior; empty if that is not known."""
        return self._declared[name]

    def records(self, task: str, row: Mapping[str, Any]) -> str:
        """The file with the records of an entry on a task."""
        return f"runs/{task}/{row['slug']}/{row['folder']}.json"

    def pair(self, task: str, first: str | None, second: str | None) -> str:
        """The compare page of two entries; empty if there is none."""
        if not first or not second or first == second:
            return ""
        page = words.pair_page(task, first, second)
        return page if page in self._pages else ""

    def figure(self, task: str, name: str) -> str:
        """The file of a figure."""
        return f"figures/{task}/{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.svg"

    @property
    def entries(self) -> list[tuple[EntryRow, dict[str, EntryRow]]]:
        """Every entry, ours first, with its rows by task."""
        keys = sorted(self._rows, key=lambda key: (key[0] != OURS, key))
        return [(next(iter(self._rows[key].values())), self._rows[key]) for key in keys]

    @property
    def finding(self) -> dict[str, Any] | None:
        """The difference that is farthest from nothing, by its interval, with its task."""
        found = [t["widest"] | {"task": task} for task, t in self.tables.items() if t["widest"]]
        return max(found, key=lambda pair: (pair["clearness"], pair["task"]), default=None)

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Submissions by the date of their last run, the newest first."""
        found = []
        for slug, submission in self.board.submissions.items():
            rows = [(t, r) for (s, _), of in self._rows.items() if s == slug for t, r in of.items()]
            found.append(
                {
                    "slug": slug,
                    "date": max((r["created"] for _, r in rows), default=""),
                    "methods": sorted({r["method"] for _, r in rows}),
                    "tasks": sorted({t for t, _ in rows}),
                    "runs": sum(len(r["runs"]) for _, r in rows),
                    "submission": submission,
                }
            )
        return sorted(found, key=lambda change: (change["date"], change["slug"]), reverse=True)

    # ---- the files

    def contents(self) -> Iterable[tuple[str, str | bytes]]:
        """Every file by its path in the folder."""
        folder = files("bench.leaderboard.site")
        for name in ("style.css", "table.js"):
            yield name, (folder / name).read_bytes()
        yield "index.html", self._page("index", 0)
        yield "reading.html", self._page("reading", 0, most=MOST)
        yield "submitting.html", self._page("submitting", 0)
        yield "changes.html", self._page("changes", 0)
        yield "feed.xml", self.environment.get_template("feed.xml.j2").render(root="")
        yield from self._across()
        yield MARK, _json(self._whole())
        for task, table in self.board.tables.items():
            yield from self._task(task, table)
        for row, rows in self.entries:
            yield self.entry(row), self._page("method", 2, first=row, rows=rows)
        for name, tables in self.evidence.items():
            yield f"evidence/{name}.html", self._page("evidence", 1, name=name, tables=tables)
            yield f"evidence/{name}.json", _json(tables)
            yield f"evidence/{name}.csv", _csv_of(tables)
        for (task, method), records in sorted(self.board.recorded_files.items()):
            known = {row["folder"]: row for row in self.board.recorded[task]["entries"]}
            yield f"runs/{task}/records/{method}.json", _joined(records, known[method])
        for (task, slug, folder_), records in sorted(self.board.records.items()):
            row = self._rows[slug, folder_][task]
            yield self.records(task, row), _joined(records, row)

    def _page(self, template: str, depth: int, **values: Any) -> str:
        return self.environment.get_template(f"{template}.html.j2").render(root="../" * depth, **values)

    def _task(self, task: str, table: Table) -> Iterable[tuple[str, str | bytes]]:
        ranked = [row for row in table["entries"] if row["ranks"]]
        struck = [row for row in table["entries"] if row["status"] in ("withdrawn", "superseded")]
        below = [row for row in table["entries"] if not row["ranks"] and row not in struck]
        above, under = parted(ranked, lambda row: row["tuned"])
        following = [row["name"] for row in ranked[1:]]
        here = {(row["slug"], row["folder"]) for row in table["entries"]}
        missing = [row for row, _ in self.entries if (row["slug"], row["folder"]) not in here]
        scale = words.Scale.of((row["low"], row["mean"], row["high"]) for row in ranked)
        figures = self.board.figures[task]
        yield (
            f"tasks/{task}.html",
            self._page(
                "task",
                1,
                table=table,
                ranked=ranked,
                above=above,
                under=under,
                followers=dict(zip_longest((row["name"] for row in ranked), following)),
                marked=[row for row in (*above, *under, *below) if row["marks"]],
                below=below,
                struck=struck,
                missing=missing,
                scale=scale,
                figures=sorted(figures),
                has_energy=_has_energy(table),
            ),
        )
        yield f"tasks/{task}.json", _json(table)
        yield f"tasks/{task}.csv", _csv_of_task(table)
        for name, svg in figures.items():
            yield self.figure(task, name), svg
        for found in self.board.pairs[task]:
            yield words.pair_page(task, found["first"], found["second"]), self.pair_page(task, found)

    def pair_page(self, task: str, pair: Mapping[str, Any]) -> str:
        """The page of two entries beside each other."""
        return self._page("pair", 2, table=self.board.tables[task], pair=pair)

    def _across(self) -> Iterable[tuple[str, str]]:
        """The page across tasks, and its tables."""
        overall = self.board.overall
        panels = [found for table in self.tables.values() if (found := fronts.panel_of(table)) is not None]
        costs = fronts.standings(panels)
        drawings = [fronts.drawing(panel, self.tables[panel.task]) for panel in panels]
        yield "overall.html", self._page("overall", 0, drawings=drawings, costs=costs, canvas=fronts.CANVAS)
        of_fronts = fronts.rows(costs, (panel.task for panel in panels))
        yield "fronts.json", _json(of_fronts)
        said = [row | {"on the front of": "; ".join(row["on the front of"])} for row in of_fronts]
        yield (
            "fronts.csv",
            words.table(list(said[0]) if said else ["entry"], [list(row.values()) for row in said]),
        )
        yield "overall.json", _json(overall)
        header = ["entry", "first rank", "last rank", "tie group", "score", "low", "high", "why"]
        rows = [
            [row["name"], *(row["ranks"] or [None, None]), row["group"], *row["score"], row["why"]]
            + [row["scores"][task][0] for task in overall["tasks"]]
            for row in overall["rows"]
        ]
        yield "overall.csv", words.table([*header, *overall["tasks"]], rows)
        header = ["entry", *self.tables]
        places = [
            [row["name"], *(words.ranks(rows[t]["ranks"]) if t in rows else None for t in self.tables)]
            for row, rows in self.entries
        ]
        yield "ranks.csv", words.table(header, places)
        yield "ranks.json", _json([dict(zip(header, place, strict=True)) for place in places])

    def _whole(self) -> dict[str, Any]:
        """What programs find first."""
        return {
            "tasks": {task: f"tasks/{task}.json" for task in self.board.tables},
            "overall": "overall.json",
            "submissions": self.board.submissions,
            "problems": self.board.problems,
            "not_computed_again": self.board.not_again,
        }


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("bench.leaderboard.site", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=words.number,
        duration=words.duration,
        ranks=words.ranks,
        url=words.url,
        plural=words.plural,
    )
    return environment


def _has_energy(table: Table) -> bool:
    """Whether the energy of some entry was counted: else there is no column."""
    return any(row["cost"] and row["cost"]["joules"] is not None for row in table["entries"])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def _joined(records: Mapping[int, bytes | None], row: EntryRow) -> bytes:
    """The records of an entry on a task as one JSON list, as they were handed in, but for unreadable ones."""
    known = {run["seed"] for run in row["runs"] if run["status"] != "unreadable"}
    found = [content.strip() for seed, content in records.items() if content and seed in known]
    return b"[\n" + b",\n".join(found) + b"\n]\n"


def _csv_of(tables: Sequence[Table]) -> str:
    """Rows of evidence: every metric with its mean and interval."""
    header = ["task", "method", "seeds", "metric", "mean", "low", "high"]
    rows = [
        [table["task"], row["method"], row["seeds"], name, *cell]
        for table in tables
        for row in table["entries"]
        for name, cell in row["metrics"].items()
    ]
    return words.table(header, rows)


def _csv_of_task(table: Table) -> str:
    has_energy = _has_energy(table)
    header = ["first rank", "last rank", "tie group", "entry", "method", "slug", "status"]
    header += [
        table["metric"],
        "low",
        "high",
        "seeds",
        "tier",
        "provisional",
        "seconds",
        *(["joules", "counted by"] if has_energy else []),
        "settings",
        "tuned",
        "marks",
        "why",
    ]
    nowhere: list[Any] = [None, None]
    rows = [
        [
            *(row["ranks"] or nowhere),
            *(row["group"], row["name"], row["method"], row["slug"], row["status"]),
            *(row["mean"], row["low"], row["high"]),
            *(row["seeds"], row["tier"], row["provisional"]),
            row["seconds"],
            *([row["cost"] and row["cost"][key] for key in ("joules", "counters")] if has_energy else []),
            *(row["tuning"], row["tuned"]),
            *("; ".join(map(": ".join, row["marks"])), row["why"]),
        ]
        for row in table["entries"]
    ]
    return words.table(header, rows)

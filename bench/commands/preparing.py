"""`bench data prepare`: photographs as downloaded become a memory map, chains a file, packages texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.commands.parser import Parser, errors, output
from bench.errors import UsageError
from bench.runs.progress import shown

Prepare = Callable[[Path | str, Path | str | None], Path]


def prepare_data(arguments: list[str]) -> None:
    """Prepares photographs, or what is missing of them; their folder is the last line of standard output."""
    from bench.photographs import photographs, preparing  # here, for they import NumPy, Pillow and SciPy
    from bench.studies import hmc_predictions, topics

    if hmc_predictions.SOURCES.keys() & set(arguments):
        _prepare_by(hmc_predictions.prepare, "predictions of long chains for scoring", "file", arguments)
        return
    if topics.SOURCES.keys() & set(arguments):
        _prepare_by(topics.prepare, "texts and their encoder", "folder of packages", arguments)
        return
    names = ", ".join([*photographs.SOURCES, *hmc_predictions.SOURCES, *topics.SOURCES])
    parser = Parser("bench data prepare", description="Prepare photographs of the fundus for training.")
    parser.add_argument("NAME", type=str, help=f"where they come from: {names}")
    parser.add_argument(
        "--source",
        type=str | None,
        default=None,
        help="folder (RetinaMNIST: or file) as downloaded; `bench data get NAME` says how to have it",
    )
    parser.add_argument(
        "--size",
        type=int | None,
        default=None,
        help="height and width in pixels; default is the source's own",
    )
    parser.add_argument(
        "--preprocess", type=photographs.Way, default="resize", help="`contrast` raises that of the fundus"
    )
    parser.add_argument("--workers", type=int | None, default=None, help="threads; default is one per core")
    parser.add_argument(
        "--data-dir", type=str | None, default=None, help="folder of data files; also $BENCH_DATA"
    )
    chosen = parser.parse_args(arguments)
    if chosen.source is None:
        raise UsageError(f"--source is required; `bench data get {chosen.NAME}` says how to have it")

    with shown(errors, f"prepare {chosen.NAME}") as observer:
        before: int | None = None

        def show_progress(done: int, of: int) -> None:
            nonlocal before
            if before is None:
                before = done
                observer("stage", {"name": f"{of} photographs, {done} done before", "number": 1, "of": 1})
            if done:
                observer("fit", {"fit": done, "fits": of, "was_there": done == before})

        made = preparing.prepare(
            chosen.NAME,
            chosen.source,
            chosen.data_dir,
            chosen.size,
            chosen.preprocess,
            chosen.workers,
            show_progress,
            wait=False,
        )
    errors.print(f"{chosen.NAME}: {photographs.described(made)}", soft_wrap=True)
    output.print(str(made.folder), soft_wrap=True)


def _prepare_by(prepare: Prepare, what: str, kind: str, arguments: list[str]) -> None:
    """Makes of what was downloaded what is read, with nothing else to choose; prints where it is."""
    parser = Parser("bench data prepare", description=f"Prepare {what}.")
    parser.add_argument("NAME", type=str, help="the data set")
    parser.add_argument(
        "--source",
        type=str | None,
        default=None,
        help=f"{kind} as downloaded; `bench data get NAME` says which",
    )
    parser.add_argument(
        "--data-dir", type=str | None, default=None, help="folder of data files; also $BENCH_DATA"
    )
    chosen = parser.parse_args(arguments)
    if chosen.source is None:
        raise UsageError(f"--source is required; `bench data get {chosen.NAME}` says how to have it")
    output.print(str(prepare(chosen.source, chosen.data_dir)), soft_wrap=True)

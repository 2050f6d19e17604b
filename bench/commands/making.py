"""`bench data make`: data sets that a program draws."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bench.commands.parser import Parser, errors, output
from bench.runs import progress


def make_data(arguments: list[str]) -> None:
    """Makes a data set, or what is missing of it; its folder is the last line of standard output."""
    parser = Parser("bench data make", description="Make a data set of synthetic photographs.")
    parser.add_argument("NAME", type=Literal["retinopathy_synthetic"], help="the data set")
    parser.add_argument("--images", type=int, default=2000, help="number of images, two of each patient")
    parser.add_argument("--size", type=int, default=64, help="height and width in pixels")
    parser.add_argument("--seed", type=int, default=0, help="which patients; the same bytes every time")
    parser.add_argument(
        "--data-dir", type=str | None, default=None, help="folder of data files; also $BENCH_DATA"
    )
    parser.add_argument("--workers", type=int | None, default=None, help="processes; default is every core")
    chosen = parser.parse_args(arguments)

    from bench.photographs import fundus, fundus_population  # here, for they import Pillow and SciPy

    with progress.shown(errors, f"{chosen.images} images of {chosen.size} px") as shown:

        def show_progress(done: int, images: int) -> None:
            shown("fit", {"fit": done, "fits": images, "was_there": False})

        folder: Path = fundus.find_or_make(
            chosen.data_dir, chosen.images, chosen.size, chosen.seed, chosen.workers, show_progress
        )
    value, error = fundus_population.bayes_auc()
    errors.print(f"AUC that no reader of these photographs exceeds on average: {value:.4f} +- {error:.4f}")
    output.print(str(folder), soft_wrap=True)

"""Progress of a run on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn


@contextmanager
def shown(console: Console, title: str) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """An observer that shows stage, epoch, loss, remaining time and the last logged number.

    Args:
        console: Where to, standard error.
        title: What is run.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    now: dict[str, Any] = {"name": "", "number": 1, "of": 1, "epoch": 0, "epochs": 1, "loss": "", "note": ""}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=1.0, note="")

        def stage() -> str:
            return f"{now['name']} ({now['number']} of {now['of']})" if now["of"] > 1 else now["name"]

        def observe(event: str, values: dict[str, Any]) -> None:
            if event == "stage":
                now.update(values, epoch=0, loss="")
            elif event == "epoch":
                now.update(epoch=values["epoch"], epochs=values["of"], loss=f", loss {values['loss']:.4g}")
            elif event == "log":
                now["note"] = f"{values['name']} {values['value']:.4g} (validation)"
                if not console.is_terminal:
                    console.print(f"{title}: {stage()}: {now['note']}")
            elif event == "notice":
                console.print(f"{title}: {values['text']}")
            done = (now["number"] - 1 + now["epoch"] / now["epochs"]) / now["of"]
            text = f"{stage()}, epoch {now['epoch']} of {now['epochs']}{now['loss']}"
            bar.update(task, completed=done, description=f"{title}: {text}", note=now["note"])

        yield observe

"""`bench wandb dashboard`: a Weights & Biases workspace that compares methods, as a specification or saved.

Runs that were logged with `--logger wandb` have the names of `bench.runs.wandb_run`. The workspace has a
section for every task, whose charts group runs by method and show the range over seeds, and sections of
training and system.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from bench.commands.parser import Parser, output
from bench.errors import BenchError, UsageError

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

    from bench.spec import Spec

_METHODS = 100
"""Groups, at most, that a chart shows; W&B's own choice is 10."""


def wandb(arguments: list[str]) -> None:
    """Prints the specification of the workspace as JSON, or saves it."""
    parser = Parser(
        "bench wandb", description="Build a Weights & Biases workspace that compares methods task by task."
    )
    parser.add_argument("action", type=Literal["dashboard"], help="dashboard builds the workspace")
    parser.add_argument("--project", type=str, required=True, help="the project that the runs were logged to")
    parser.add_argument("--entity", type=str | None, default=None, help="user or team; also $WANDB_ENTITY")
    parser.add_argument(
        "--save", action="store_true", help="save it there; without it its specification is printed as JSON"
    )
    chosen = parser.parse_args(arguments)
    for package in ("wandb", "wandb_workspaces"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"bench wandb needs {package}: pip install 'posterior-bench[wandb]'")
    entity = chosen.entity or os.environ.get("WANDB_ENTITY", "")
    if chosen.save and not entity:
        raise UsageError("--save needs --entity, the user or team whose project it is")
    built = workspace(chosen.project, entity, _specs())
    if chosen.save:
        output.print(_saved(built), soft_wrap=True)
    else:
        output.print(json.dumps(specification(built), indent=2), soft_wrap=True)


def workspace(project: str, entity: str, specs: Mapping[str, Spec]) -> Workspace:
    """The workspace of a project, for tasks and what they measure; those that rank methods come first."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.expr import Config

    tasks = sorted(specs, key=lambda name: not specs[name].ranked)
    return ws.Workspace(
        entity=entity,
        project=project,
        name="posterior-bench",
        sections=[*(_comparison(name, specs[name]) for name in tasks), _training(tasks), _system()],
        settings=ws.WorkspaceSettings(max_runs=_METHODS),
        runset_settings=ws.RunsetSettings(groupby=[Config("task.identity"), Config("method.identity")]),
    )


def specification(built: Workspace) -> dict[str, Any]:
    """What W&B is sent of a workspace; the ids of its panels are new each time."""
    found: dict[str, Any] = built._spec
    return found


def _specs() -> dict[str, Spec]:
    """Task -> what it measures."""
    from bench.runs import registry
    from bench.settings import build

    return {
        name: entry.cls(build(entry.cls.settings_class, dict(entry.fixed), "task")).spec
        for name, entry in registry.tasks().items()
    }


def _by_method() -> dict[str, Any]:
    """The options of a chart: a mean over the seeds of every method, and their range around it."""
    from wandb_workspaces.reports.v2 import Config

    return {
        "groupby": Config("method.identity"),
        "groupby_aggfunc": "mean",
        "groupby_rangefunc": "minmax",
        "max_runs_to_show": _METHODS,
    }


def _comparison(task: str, spec: Spec) -> Section:
    """The main metric of the finished runs and, where there is one, that on validation data on the way."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.reports.v2 import BarPlot, LinePlot, SummaryMetric

    from bench.runs.wandb_run import key

    metric = spec.metrics[spec.main_metric]
    better = "higher" if metric.higher_is_better else "lower"
    title = f"{spec.main_metric} ({metric.unit}, {better} is better): mean and range over seeds"
    final = SummaryMetric(key(task, "metrics", spec.main_metric))
    panels: list[Any] = [BarPlot(title=title, metrics=[final], **_by_method())]
    if (name := spec.validation_metric) is not None:
        curve, step = key(task, "validation", name), key(task, "validation", "step")
        panels.append(LinePlot(title=f"{name} on validation data", x=step, y=[curve], **_by_method()))
    return ws.Section(name=task, panels=panels, is_open=spec.ranked)


def _training(tasks: list[str]) -> Section:
    """The losses of every task's stages, by epochs and by steps."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.reports.v2 import LinePlot

    from bench.runs.wandb_run import STEPS, key

    panels: list[Any] = [
        LinePlot(
            title=f"{task}: loss, mean over {over}",
            x=STEPS,
            metric_regex=f"^{key(task, kind)}/.*/loss$",
            **_by_method(),
        )
        for task in tasks
        for kind, over in (("epochs", "an epoch"), ("steps", "50 training steps"))
    ]
    return ws.Section(name="Training dynamics", panels=panels)


def _system() -> Section:
    """What the runs took of their machines, by W&B's own names."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.reports.v2 import LinePlot

    shown = {
        "memory of the process (MB)": r"^system/proc\.memory\.rssMB$",
        "threads of the process": r"^system/proc\.cpu\.threads$",
        "use of the GPU (%)": r"^system/gpu\.\d+\.gpu$",
        "memory of the GPU (%)": r"^system/gpu\.\d+\.memoryAllocated$",
    }
    panels: list[Any] = [
        LinePlot(title=title, x="RelativeTime(Process)", metric_regex=name) for title, name in shown.items()
    ]
    return ws.Section(name="System", panels=panels)


def _saved(built: Workspace) -> str:
    """Saves a workspace; its address.

    Raises:
        UsageError: If there is no key, or the project is not there.
        BenchError: If W&B cannot be reached or refuses.
    """
    from wandb import errors

    try:
        return str(built.save().url)
    except (errors.UsageError, errors.AuthenticationError) as error:
        raise UsageError(f"--save: {' '.join(str(error).split())}") from None
    except Exception as error:  # of the transport, of several libraries
        first = (str(error).strip().splitlines() or [""])[0]
        raise BenchError(f"W&B did not save the workspace: {type(error).__name__}: {first}") from None

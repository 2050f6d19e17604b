"""The W&B workspace: its specification against a committed one, and saving without a network."""

import json
import os
import re
import warnings
from pathlib import Path

import pytest
import wandb

from bench import cli
from bench.commands import dashboard
from bench.runs import registry, wandb_run
from bench.spec import Metric, Spec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it uses pydantic's older names
    from wandb_workspaces.workspaces import interface, internal

SNAPSHOT = Path(__file__).with_name("dashboard.json")

ACCURACY = Metric("share of right answers", "fraction", best=1.0, worst=0.0)
NLL = Metric("of the test data", "nats", best=-float("inf"), worst=float("inf"))
SPECS = {
    "unranked": Spec("Is it close?", "nobody", 1, {"nll": NLL}, "nll", ranked=False),
    "ranked": Spec(
        "Does it remember?", "nobody", 1, {"accuracy": ACCURACY}, "accuracy", validation_metric="accuracy"
    ),
}


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


def sections(specification):
    """The sections, without the ids of the panels, which are new each time, and without their places."""
    found = specification["spec"]["section"]["panelBankConfig"]["sections"]
    return [
        {
            "name": section["name"],
            "isOpen": section["isOpen"],
            "panels": [{"viewType": p["viewType"], "config": p["config"]} for p in section["panels"]],
        }
        for section in found
    ]


def test_specification_is_the_committed_one():
    """With BENCH_WRITE=1 in the environment it is written anew: read the difference."""
    specification = dashboard.specification(dashboard.workspace("a project", "a team", SPECS))
    found = sections(specification)
    if os.environ.get("BENCH_WRITE"):
        SNAPSHOT.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(SNAPSHOT.read_text())
    assert (specification["entity"], specification["project"]) == ("a team", "a project")
    (runs,) = specification["spec"]["section"]["runSets"]
    grouping = [(key["section"], key["name"]) for key in runs["grouping"]]
    assert grouping == [("config", "task.value.identity"), ("config", "method.value.identity")]


def test_every_task_has_a_section_whose_charts_show_seeds_as_bands(capsys):
    assert cli.main(["wandb", "dashboard", "--project", "a project"]) == 0
    found = sections(json.loads(capsys.readouterr().out))
    tasks = registry.tasks()
    assert {section["name"] for section in found} == {*tasks, "Training dynamics", "System"}
    training = found[-2]
    for section in found[:-1]:
        for panel in section["panels"]:
            config = panel["config"]
            grouped = (config["groupBy"], config["groupAgg"], config["groupArea"], config["aggregate"])
            assert grouped == ("method.value.identity", "mean", "minmax", True)
    for section in found[:-2]:
        (bar, *_) = section["panels"]
        (metric,) = bar["config"]["metrics"]
        assert metric.startswith(f"summary_metrics.{section['name']}/metrics/")
    assert len(training["panels"]) == 2 * len(tasks)


def test_its_names_are_those_that_runs_log():
    """The regular expressions of training match the keys of stages, and of no other task or kind."""
    training = sections(dashboard.specification(dashboard.workspace("p", "", SPECS)))[-2]["panels"]
    patterns = {panel["config"]["metricRegex"] for panel in training}
    for kind in ("epochs", "steps"):
        logged = wandb_run.key("ranked", kind, "step 1 (1 of 5), fit 2", "loss")
        assert [p for p in patterns if re.search(p, logged)] == [f"^ranked/{kind}/.*/loss$"]
    assert not [p for p in patterns if re.search(p, wandb_run.key("ranked", "validation", "loss"))]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--save"], "bench: --save needs --entity, the user or team whose project it is"),
        (["--save", "--entity", "a"], "bench: --save: No API key configured. Use `wandb login` to log in."),
    ],
)
def test_saving_without_a_name_or_a_key_is_one_line(capsys, monkeypatch, flags, line):
    monkeypatch.setattr(dashboard, "_specs", lambda: SPECS)
    assert cli.main(["wandb", "dashboard", "--project", "p", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip().splitlines() == [line]


def test_saving_sends_the_specification_and_prints_its_address(capsys, monkeypatch):
    sent = []

    def upsert(view):
        sent.append(view)
        return {"upsertView": {"view": {"name": "nw-abc-v", "id": "1"}}}

    monkeypatch.setattr(dashboard, "_specs", lambda: SPECS)
    monkeypatch.setattr(internal, "upsert_view2", upsert)
    monkeypatch.setattr(wandb, "Api", lambda: None)
    monkeypatch.setattr(interface, "get_app_url", lambda api: "https://example.org")
    assert cli.main(["wandb", "dashboard", "--project", "p", "--entity", "e", "--save"]) == 0
    assert capsys.readouterr().out.strip() == "https://example.org/e/p?nw=abc"
    (view,) = sent
    assert sections(view.model_dump(by_alias=True, exclude_none=True)) == json.loads(SNAPSHOT.read_text())


def test_a_server_that_refuses_is_one_line(capsys, monkeypatch):
    def refuse(view):
        raise ConnectionError("no route\nto anywhere")

    monkeypatch.setattr(dashboard, "_specs", lambda: SPECS)
    monkeypatch.setattr(internal, "upsert_view2", refuse)
    assert cli.main(["wandb", "dashboard", "--project", "p", "--entity", "e", "--save"]) == 1
    line = "bench: W&B did not save the workspace: ConnectionError: no route"
    assert capsys.readouterr().err.strip().splitlines() == [line]

"""Several processes of one run: whatever they do together must be what one process would have done.

The laws run in two processes that are started once, as by srun, and small runs of all tasks in two that are
started once, as by torchrun (`devices.py`). `make test-ddp` runs every method on every task in two and in
three processes, and compares with one.
"""

import math
import os
import signal
import sys
import time
from pathlib import Path

import devices
import generated
import numpy as np
import pytest
import torch
import toys
from conformance import problems
from torch.testing import assert_close

from bench.contract import Budget
from bench.engine import trainer
from bench.engine.trainer import TrainerOptions
from bench.errors import BenchError, Diverged, UsageError
from bench.laws.truth import small_topics
from bench.runs import records, registry
from bench.runs.runner import load_scores
from bench.studies import hmc_predictions, topics

HERE = Path(__file__).parent
DDP = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
GOES_ON = "the same command goes on from here"
MATRIX = "BENCH_TEST_DDP" in os.environ
"""Whether this is `make test-ddp`."""


def in_processes(what, world, folder, variables, *rest, seconds=300):
    """What laws or cells gave in each process."""
    folder.mkdir(parents=True, exist_ok=True)

    def arguments(rank):
        return [str(HERE / "devices.py"), what, str(folder / f"{rank}.pt"), str(world), *rest]

    for out, err, code in devices.end(devices.start(arguments, world, variables, folder), seconds):
        assert code == 0, out + err
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def laws(request, tmp_path_factory):
    """What every law gave in each of several processes, which srun would have started so."""
    folder = tmp_path_factory.mktemp(f"laws{request.param}")
    return in_processes("laws", request.param, folder, devices.slurm)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a law gives in one process."""
    found, every = {}, devices.laws(tmp_path_factory.mktemp("alone"))

    def of(name):
        if name not in found:
            found[name] = every[name]()
        return found[name]

    return of


def close(found, expected):
    """Weights and losses to 1e-5."""
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


def distance(found, expected):
    """The largest difference of weights."""
    return max((found[name].double() - expected[name].double()).abs().max().item() for name in expected)


# ------------------------------------------------------------------------------------------ weights and ELBO


@pytest.mark.parametrize("name", devices.DETERMINISTIC)
def test_a_fit_is_that_of_one_process(laws, alone, name):
    for found in laws:
        close(found[name], alone(name))
        assert_close(found[name], laws[0][name], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["unweighted", "own batches"])
def test_a_fit_would_differ_otherwise(laws, alone, name):
    """The law above finds shares that count alike, and batches that grow with the number of processes."""
    assert distance(laws[0][name]["weights"], alone("map, sgd")["weights"]) > 1e-3


def test_loss_is_the_negative_log_joint_of_all_data(laws):
    """In closed form: 20 normal targets about a line, and two normal weights."""
    found, (x, y) = laws[0]["joint"], problems.straight_line().train.tensors
    slope, intercept = found["weights"]["network.1.weight"], found["weights"]["network.1.bias"]
    errors = ((y - x * slope - intercept) / 0.5).double()
    nll = 0.5 * errors.square().sum() + len(y) * (math.log(0.5) + 0.5 * math.log(2 * math.pi))
    weights = torch.stack([slope.squeeze(), intercept.squeeze()]).double()
    prior = 0.5 * ((weights - 0.1) / 0.8).square().sum() + 2 * (math.log(0.8) + 0.5 * math.log(2 * math.pi))
    assert found["loss"] == pytest.approx(float(nll + prior) / len(y), rel=1e-5)


def test_elbo_is_that_of_one_process_under_the_same_noise(laws, alone):
    for found in laws:
        assert found["same noise"]["losses"] == laws[0]["same noise"]["losses"]
        for row, expected in zip(found["same noise"]["losses"], alone("same noise")["losses"], strict=True):
            assert row == pytest.approx(expected, rel=1e-5)
        close(found["same noise"]["weights"], alone("same noise")["weights"])


def test_elbo_on_the_scale_of_a_share_would_be_found(laws, alone):
    ours, whole = (rows["own scale"]["losses"][0] for rows in (laws[0], {"own scale": alone("same noise")}))
    assert ours["likelihood_term"] < 0.8 * whole["likelihood_term"]


def test_noise_differs_between_processes_and_is_reproducible(laws):
    drawn = [found["noise"] for found in laws]
    assert all(first == second and len(first) == 9 for first, second in drawn)
    for step in zip(*(first for first, _ in drawn), strict=True):
        assert len(set(step)) == len(laws)
    assert len({number for found in laws for number in found["global noise"]}) == 9 * len(laws)


def test_noise_of_the_first_process_is_that_of_one(laws, alone):
    assert laws[0]["noise"] == alone("noise")
    assert laws[0]["global noise"] == alone("global noise")


def test_parameters_that_are_not_always_trained(laws, alone):
    for found in laws:
        close(found["unused"], alone("unused"))


def test_mixed_precision(laws):
    for found in laws:
        assert found["mixed"]["kinds"] == ["torch.bfloat16"]
        assert_close(found["mixed"]["weights"], laws[0]["mixed"]["weights"], rtol=0, atol=0)


# ----------------------------------------------------------------------------------------------- predictions


def test_predictions_are_whole_and_in_order(laws):
    expected = [[[float(i) for i in range(number)]] * 3 for number in range(1, 8)]
    for found in laws:
        assert found["echoed"] == (expected, 6.0)


def test_predictions_share_the_draws_of_one_process(laws, alone):
    for found in laws:
        close(found["by posterior"], alone("by posterior"))


# ------------------------------------------------------------------------------------------------- decisions


def test_one_process_s_nan_ends_all(laws):
    for found in laws:
        loss, prediction, finish, failure = found["diverged"]
        assert loss == "Diverged: diverged at stage 'fit', epoch 1, step 3: the loss is nan"
        assert prediction.startswith("Diverged: diverged at stage 'fit': the prediction's log_probs")
        assert finish == "Diverged: found by process 0"
        assert failure == "BenchError: no such fit"


@pytest.mark.parametrize("name", ["patience", "patience on the loss"])
def test_early_stopping_is_that_of_one_process(laws, alone, name):
    assert 3 < alone(name)["epochs"] < 40
    for found in laws:
        assert found[name]["epochs"] == alone(name)["epochs"]
        close(found[name]["weights"], alone(name)["weights"])


def test_what_is_kept_is_the_first_process_s(laws):
    assert len({found["kept"]["own"][0] for found in laws}) == len(laws)
    for found in laws:
        assert found["kept"]["first"] == found["kept"]["again"] == laws[0]["kept"]["own"]
        assert found["kept"]["agreed"] is True


def test_a_stopped_fit_goes_on_with_the_noise_of_every_process(laws):
    for found in laws:
        assert found["resumed"]["stopped"] == "RuntimeError: stopped"
        assert found["resumed"]["left"] == ["000-fit.partial"]
        first, second = found["resumed"]["digests"]
        assert first == second == laws[0]["resumed"]["digests"][0]
        assert found["resumed"]["history"] == [True, 5]
        assert found["resumed"]["steps"] == 15


def test_noise_of_one_process_alone_would_be_found(laws):
    first, second = laws[0]["forgets"]["digests"]
    assert first != second


def test_a_damaged_checkpoint_is_made_again_by_all(laws):
    for found in laws:
        assert len({*found["damaged"], laws[0]["damaged"][0]}) == 1


# ---------------------------------------------------------------------------------------------------- spread


@pytest.mark.parametrize("kind", ["many", "ensemble", "stages"])
def test_independent_fits_are_made_each_by_one_process(laws, alone, kind):
    """So they are, bit for bit, those of one process; the others learn of them."""
    name, world = f"spread {kind}", len(laws)
    expected = alone(name)
    assert {maker for maker, _ in expected["makers"]} == {0}
    for rank, found in enumerate(laws):
        assert found[name]["digests"] == expected["digests"]
        assert found[name]["makers"] == [[i % world, 1] for i in range(len(expected["makers"]))]
        assert found[name]["files"] == len(expected["makers"])
        for part in ("stages", "steps"):
            assert found[name][part] == expected[part]
        kinds = {"epoch", "fit", "stage"}
        events = [event for event in expected["events"] if event[0] in kinds]
        told = [event for event in found[name]["events"] if event[0] in kinds]
        assert (told == events) == (rank == 0)  # the others' are told to nobody


def test_a_single_fit_is_shared(laws):
    """The negative control of the law above: what is no fit of many is made by all."""
    assert laws[0]["noise"][0] != laws[1]["noise"][0]


def test_fits_side_by_side_are_spread_too(laws, alone):
    for found in laws:
        for ours, expected in zip(
            found["spread stacked"]["weights"], alone("spread stacked")["weights"], strict=True
        ):
            close(ours, expected)


# ------------------------------------------------------------------------------------------ small whole runs


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Small runs of all tasks in two processes, which torchrun would have started so."""
    folder = tmp_path_factory.mktemp("cells")
    return in_processes("cells", 2, folder, devices.torchrun, str(folder), *devices.names("mfvi"))


def test_tasks_of_every_file_are_run():
    tasks = registry.tasks()
    assert {tasks[name].file for name in devices.TASKS} == {entry.file for entry in tasks.values()}


@pytest.mark.parametrize("name", devices.names("mfvi"))
def test_a_run_of_two_processes_is_complete(cells, name, monkeypatch):
    monkeypatch.setattr(hmc_predictions, "load", generated.chains)  # as the processes have it
    monkeypatch.setattr(topics, "load", small_topics)
    first, second = (found[name] for found in cells)
    assert first == second
    directory = Path(first["directory"])
    record = records.read_record(directory)
    assert record.status == "completed"
    assert record.trainer["devices"] == 2
    assert "--trainer.devices 2" in record.command
    scored, arrays = load_scores(directory)
    assert records.split_metrics(scored.score(arrays), scored.spec)[0] == record.metrics
    assert (directory / "log.txt").read_text().count(f"bench run {name.split(':')[0]}") == 1
    assert not (directory / "unfinished.json").exists()


def test_splits_and_repetitions_are_those_of_one_process(cells, tmp_path):
    """Every fit is made by one process: their arrays are equal but for the rounding of predictions."""
    name = "mfvi:diabetes_regression"
    one = load_scores(Path(devices.cell(name, tmp_path)["directory"]))[1]
    two = load_scores(Path(cells[0][name]["directory"]))[1]
    assert one.keys() == two.keys()
    for key in one:
        np.testing.assert_allclose(two[key], one[key], rtol=1e-3, atol=1e-3)


# -------------------------------------------------------------------------------------- beginning and end


@pytest.mark.parametrize("variables", [devices.torchrun, devices.slurm, devices.machines])
def test_place_is_what_the_environment_says(monkeypatch, variables):
    for name, value in variables(1, 2, 15123).items():
        monkeypatch.setenv(name, str(value))
    nodes = 2 if variables is devices.machines else 1
    options = TrainerOptions(accelerator="cpu", devices=2 // nodes, num_nodes=nodes)
    place = trainer.place(options)
    assert (place.rank, place.world, place.local_world) == (1, 2, 2 // nodes)
    assert (place.address, place.port) == ("127.0.0.1", 15123)
    assert not place.starts_others
    if nodes == 1:
        with pytest.raises(UsageError, match=r"^--trainer.*devices=3"):
            trainer.place(TrainerOptions(accelerator="cpu", devices=3))


def test_torchrun_says_how_many_devices_of_a_cpu(monkeypatch):
    for name, value in devices.torchrun(0, 2, 15123).items():
        monkeypatch.setenv(name, str(value))
    assert trainer.place(TrainerOptions(accelerator="cpu")).world == 2


def test_strategies_that_do_not_share_batches_are_refused():
    with pytest.raises(UsageError, match=r"^--trainer.strategy ddp_spawn: .* ddp alone$"):
        trainer.place(TrainerOptions(accelerator="cpu", devices=2, strategy="ddp_spawn"))


def test_one_process_is_alone_whatever_the_environment(monkeypatch):
    for name, value in devices.slurm(1, 2, 15123).items():
        monkeypatch.setenv(name, str(value))
    assert trainer.place(TrainerOptions(accelerator="cpu", devices=1)).world == 1


def run(method, folder, *more, wait=None):
    """A run of two processes under way; with `wait`, once its further process waits in its third fit."""
    command = ["run", method, "split_digits", "--preset", "smoke", "--threads", "1", *DDP, *more]
    given = {"WAITS": str(wait)} if wait else {}
    process = toys.start(command, folder, env=toys.environment(**given), start_new_session=True)
    end = time.monotonic() + 300
    while wait and not wait.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    return process


def ended(process, seconds=300):
    """Exit code and the lines for the user; nothing may be left of the run's processes."""
    out, err = process.communicate(timeout=seconds)
    end = time.monotonic() + 5  # the kernel closes a process's files a moment before it calls it dead
    while (left := devices.living(group=process.pid)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left
    assert "Traceback" not in err, err
    lines = [line for line in toys.told(err).splitlines() if line.startswith("bench: ")]
    return process.returncode, lines, out


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_the_command_goes_on(tmp_path):
    for number, victim in enumerate((1, 0)):
        process = run("devices:LastWaits", tmp_path, wait=tmp_path / f"waits{number}")
        (child,) = devices.living(parent=process.pid)
        if victim == 0:
            process.kill()
        else:
            os.kill(child, signal.SIGKILL)
        code, lines, out = ended(process)
        reason = "process 1 was lost (SIGKILL)" if victim else "process 0 was lost"
        assert lines == [f"bench: {reason}; {GOES_ON}"]
        assert code == (BenchError.exit_code if victim else -signal.SIGKILL)
        assert out == ""
        assert not list(tmp_path.rglob("record.json"))
    code, lines, _ = ended(run("devices:LastWaits", tmp_path))
    assert (code, lines) == (0, [])
    (tmp_path / "whole").mkdir()
    assert ended(run("devices:LastWaits", tmp_path / "whole"))[0] == 0
    resumed, whole = (records.read_record(p.parent) for p in sorted(tmp_path.rglob("record.json")))
    assert resumed.provenance.arrays_digest == whole.provenance.arrays_digest


@pytest.mark.slow
def test_ctrl_c_and_a_nan_and_a_bug_are_one_line(tmp_path):
    process = run("devices:LastWaits", tmp_path, wait=tmp_path / "waits")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    code, lines, _ = ended(process)
    assert (code, lines) == (130, [f"bench: stopped; {GOES_ON}"])
    code, lines, _ = ended(run("devices:LastTurnsNaN", tmp_path, "--method.at_step", "3"))
    assert code == Diverged.exit_code
    assert len(lines) == 1
    assert "step 3: the loss is nan; recorded in" in lines[0]
    code, lines, _ = ended(run("devices:LastFails", tmp_path))
    assert code == BenchError.exit_code
    assert lines == [
        "bench: process 1 failed: RuntimeError: this method has a bug; the same command goes on from here"
    ]
    code, lines, _ = ended(run("toys:HasBug", tmp_path))
    assert code == BenchError.exit_code
    assert len(lines) == 1
    assert lines[0].startswith("bench: failed: RuntimeError: this method has a bug; the traceback is in")


def test_processes_end_without_a_word_while_they_are_watched(tmp_path):
    """A thread that Python ends inside the store's C++ would abort its process, whose work is done."""

    def arguments(rank):
        return [str(HERE / "devices.py"), "leave", str(tmp_path / str(rank)), "2"]

    ends = devices.end(devices.start(arguments, 2, devices.torchrun, tmp_path))
    assert [(err, code) for _, err, code in ends] == [("", 0)] * 2
    assert all((tmp_path / str(rank)).exists() for rank in range(2))


# -------------------------------------------------------------------------------------------- make test-ddp


@pytest.fixture(scope="module", params=registry.methods())
def one_process(request, tmp_path_factory):
    """Cells of all tasks by a method, and what they gave in one process; made once for two and three."""
    names, folder = devices.names(request.param), tmp_path_factory.mktemp(request.param)
    (found,) = in_processes("cells", 1, folder, lambda *_: {}, str(folder), *names, seconds=3600)
    return names, found


@pytest.mark.skipif(not MATRIX, reason="make test-ddp runs it")
@pytest.mark.parametrize("world", [2, 3])
def test_every_method_on_every_task(tmp_path, one_process, world):
    """Refused or diverged in several processes if and only if in one; else complete, of as many steps."""
    names, alone = one_process
    found = in_processes("cells", world, tmp_path, devices.torchrun, str(tmp_path), *names, seconds=3600)
    wrong = []
    for name in names:
        ours, one = found[0][name], alone[name]
        if any(other[name] != ours for other in found):
            wrong.append(f"{name}: {[other[name] for other in found]}")
        elif "error" in ours or "error" in one:
            said = [row.get("error", "").partition("; recorded in ")[0] for row in (ours, one)]
            if said[0] != said[1] or not said[0].startswith(("UsageError: ", "Diverged: ")):
                wrong.append(f"{name}: {ours} alone {one}")
            else:
                print(f"{name}: {ours['error']}", file=sys.stderr)
        else:
            wrong += [
                f"{name}: {text}" for text in differences(Path(ours["directory"]), Path(one["directory"]))
            ]
    assert not wrong, "\n".join(wrong)


def differences(ours, one):
    """Where a run of several processes is not what one would be."""
    a, b = records.read_record(ours), records.read_record(one)
    if (a.status, [fit.steps for fit in a.fits]) != (b.status, [fit.steps for fit in b.fits]):
        yield f"{a.status}, steps {[fit.steps for fit in a.fits]} and {[fit.steps for fit in b.fits]}"
    (task, arrays), (_, expected) = load_scores(ours), load_scores(one)
    if {k: (v.shape, v.dtype) for k, v in arrays.items()} != {
        k: (v.shape, v.dtype) for k, v in expected.items()
    }:
        yield "arrays of other shapes"
    if a.status == "completed" and records.split_metrics(task.score(arrays), task.spec)[0] != a.metrics:
        yield "other metrics than those of its arrays"


def test_budget_of_the_laws_is_uneven():
    """Of two processes one has more examples of a batch, and in the end one has none."""
    assert Budget(3, 7) == devices.UNEVEN
    assert problems.TRAIN % devices.SINGLE.batch_size == 1

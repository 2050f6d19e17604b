"""What a stage keeps, what a task draws, and epochs of so many draws; a run killed and started again."""

import signal
import time
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
import toys
from conformance import problems
from torch.utils.data import TensorDataset

import bench
from bench import cli
from bench.batches import batches
from bench.contract import Budget
from bench.data import array_digest
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods.laplace import Laplace
from bench.methods.map import MAP
from bench.methods.mfvi import MFVI
from bench.runs.records import read_arrays, read_record
from bench.tasks.active_learning import ActiveLearning, Settings

BUDGET = Budget(epochs=2, batch_size=6)
CPU = TrainerOptions(accelerator="cpu")


def make(folder=None, cls=MFVI, seed=0, members=1):
    """An engine for a method with its default settings, on one CPU process."""
    return Engine(cls, cls.settings_class(), seed, folder, CPU, members)


def names(folder, ending):
    """Files of a kind in a folder."""
    return sorted(path.name for path in folder.glob(f"*.{ending}"))


# ---- what a stage keeps


def sequence(engine, stages, stop=None):
    """Stages that each fit, predict, log, and go on from what the last one kept."""
    kept = []
    for stage in range(stages):
        engine.stage(f"stage {stage}")

        def compute(stage=stage):
            if stage == stop:
                raise MemoryError
            method = engine.fit(problems.mlp(), BUDGET)
            prediction = engine.predict(method, torch.ones(3, 4), 4)
            engine.log("number", float(stage), stage)
            before = kept[-1]["numbers"].sum() if kept else 0.0
            numbers = prediction.average().numpy() + before
            return {"numbers": numbers, "count": np.array(stage), "few": numbers.astype(np.float16)}

        kept.append(engine.cached(compute))
    return kept


def test_stopped_chain_reads_what_was_kept_and_ends_alike(tmp_path):
    whole = make(tmp_path / "whole")
    expected = sequence(whole, 4)
    with pytest.raises(MemoryError):
        sequence(make(tmp_path / "stopped"), 4, stop=2)
    again = make(tmp_path / "stopped")
    fitted = []
    again.observe(lambda event, values: fitted.append(event) if event == "epoch" else None)
    found = sequence(again, 4)
    assert len(fitted) == 2 * BUDGET.epochs
    for a, b in zip(expected, found, strict=True):
        assert array_digest(a) == array_digest(b)
    assert [f | {"seconds": 0} for f in again.fits] == [f | {"seconds": 0} for f in whole.fits]
    assert again.logged == whole.logged
    assert again.histories == whole.histories


def test_chain_without_a_folder_computes_and_keeps_nothing(tmp_path):
    with_folder = sequence(make(tmp_path), 3)
    for a, b in zip(with_folder, sequence(make(), 3), strict=True):
        assert array_digest(a) == array_digest(b)


@pytest.mark.parametrize("members", [1, 2])
def test_only_the_last_fit_leaves_a_checkpoint(tmp_path, members):
    sequence(make(tmp_path, members=members), 3)
    assert names(tmp_path, "kept") == ["001.kept", "002.kept", "003.kept"]
    last = [f"{count:03d}-stage-2.ckpt" for count in range(2 * members, 3 * members)]
    assert names(tmp_path, "ckpt") == last


def test_checkpoints_of_fits_outside_stay(tmp_path):
    engine = make(tmp_path)
    engine.stage("before")
    engine.fit(problems.mlp(), BUDGET)
    sequence(engine, 2)
    assert names(tmp_path, "ckpt") == ["000-before.ckpt", "002-stage-1.ckpt"]


def test_stopped_inside_a_stage_finished_fits_are_found_again(tmp_path):
    def stage(engine, stop):
        def compute():
            first = engine.fit(problems.mlp(), BUDGET)
            if stop:
                raise MemoryError
            second = engine.fit(problems.mlp(), BUDGET, start=first)
            return {"numbers": engine.predict(second, torch.ones(3, 4), 4).average().numpy()}

        return engine.cached(compute)

    with pytest.raises(MemoryError):
        stage(make(tmp_path), True)
    assert names(tmp_path, "ckpt") == ["000-fit.ckpt"]
    engine = make(tmp_path)
    epochs = []
    engine.observe(lambda event, values: epochs.append(event) if event == "epoch" else None)
    found = stage(engine, False)
    assert len(epochs) == BUDGET.epochs
    assert array_digest(found) == array_digest(stage(make(), False))


# ---- what a task draws


def test_generator_follows_seed_and_purpose_and_no_method():
    def numbers(engine, *purpose):
        return torch.rand(3, generator=engine.generator(*purpose)).tolist()

    assert numbers(make(), "a", 1) == numbers(make(cls=MAP), "a", 1) == numbers(make(), "a", 1)
    assert len({tuple(numbers(make(seed=s), "a", i)) for s in (0, 1) for i in (1, 2)}) == 4


# ---- epochs of so many draws


def rows_seen(loader, epoch):
    """Rows in the order of one pass over `rows`."""
    loader.sampler.set_epoch(epoch)
    return [b.inputs[:, 0].int().tolist() for b in loader]


def flat_rows(loader):
    """Rows of one pass in their order."""
    return list(chain.from_iterable(rows_seen(loader, 3)))


@pytest.mark.parametrize(("size", "draws"), [(7, 20), (7, 21), (7, 5), (1, 4), (7, 7)])
def test_draws_go_over_the_data_again_and_again(size, draws):
    data = TensorDataset(torch.arange(size).float()[:, None], torch.arange(size))
    loader = batches(data, 4, 0, draws=draws)
    passes = [rows_seen(loader, epoch) for epoch in (0, 1, 0)]
    assert passes[0] == passes[2]
    for batch_rows in passes:
        assert [len(b) for b in batch_rows] == [4] * (draws // 4) + [draws % 4] * (draws % 4 > 0)
        flat = list(chain.from_iterable(batch_rows))
        for start in range(0, draws - size + 1, size):
            assert sorted(flat[start : start + size]) == list(range(size))
        assert len(set(flat[draws - draws % size :])) == draws % size
    if size > 1:
        assert passes[0] != passes[1]
    assert len(loader) == -(-draws // 4)


def test_full_batch_is_each_example_once_whatever_the_draws():
    data = TensorDataset(torch.arange(7).float()[:, None], torch.arange(7))
    assert rows_seen(batches(data, None, 0, draws=20), 0) == [list(range(7))]


def test_processes_share_the_draws():
    data = TensorDataset(torch.arange(7).float()[:, None], torch.arange(7))
    parts = [flat_rows(batches(data, 4, 0, (rank, 2), draws=20)) for rank in (0, 1)]
    whole = flat_rows(batches(data, 4, 0, draws=20))
    assert parts == [whole[0::2], whole[1::2]]


def test_data_of_no_known_kind_are_refused():
    with pytest.raises(UsageError, match="TensorDataset or a Stored, not a list"):
        batches([1, 2, 3], 2, 0)


def test_budget_of_draws_is_kept_and_what_follows_training_sees_each_example_once():
    seen = []

    class Sees(Laplace):
        def training_step(self, batch, batch_idx):
            seen.append(len(batch.inputs))
            return super().training_step(batch, batch_idx)

        def finish_fit(self, loader):
            seen.append(sum(len(batch.inputs) for batch in loader))
            super().finish_fit(loader)

    engine = Engine(Sees, Laplace.settings_class(), 0, None, CPU)
    engine.fit(problems.mlp(), Budget(epochs=2, batch_size=16, draws=50))
    assert seen == [16, 16, 16, 2] * 2 + [20]
    assert engine.fits[0]["steps"] == 8


def test_an_epoch_of_draws_estimates_the_same_loss():
    """Mean over many epochs of the batches' losses is that of the full batch, weights and all."""
    problem = problems.mlp()
    weights = torch.linspace(0.2, 3, len(problem.train))
    problem = replace(problem, train=TensorDataset(*problem.train.tensors[:2], weights))
    method = MAP(problem, MAP.settings_class())
    (whole,) = batches(problem.train, None, None)
    expected = method.loss_terms(whole, {})[0].item()
    loader = batches(problem.train, 16, 0, draws=50)
    losses = []
    for epoch in range(400):
        loader.set_epoch(epoch)
        terms = [(method.loss_terms(b, {})[0].item(), len(b.inputs)) for b in loader]
        losses.append(sum(loss * rows for loss, rows in terms) / 50)
    error = np.std(losses) / np.sqrt(len(losses))
    assert abs(np.mean(losses) - expected) < 5 * error  # false alarms: one in 10^6


# ---- a run that is killed

FEW = ["--task.acquired", "5", "--task.epochs", "1", "--task.acquisition_samples", "5"]


def test_stopped_run_of_active_learning_goes_on_to_the_same_acquisitions(tmp_path, monkeypatch):
    values = {"acquired": 3, "epochs": 1, "acquisition_samples": 2, "test_samples": 2}

    def run(out):
        return bench.run("mfvi", "active_digits", task_settings=values, out=tmp_path / out)

    whole = run("whole")
    acquire, calls = ActiveLearning._acquire, []

    def stops(self, engine, points, oracle):
        calls.append(len(points))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return acquire(self, engine, points, oracle)

    monkeypatch.setattr(ActiveLearning, "_acquire", stops)
    with pytest.raises(KeyboardInterrupt):
        run("stopped")
    again = run("stopped")
    assert calls == [10, 11, 12, 12]
    assert again.record.provenance.arrays_digest == whole.record.provenance.arrays_digest
    assert again.record.metrics == whole.record.metrics
    assert again.record.validation == whole.record.validation
    assert len(again.record.fits) == len(whole.record.fits) == 9
    assert isinstance(bench.load(again.directory), MFVI)


@pytest.mark.slow
def test_killed_run_goes_on_to_the_same_acquisitions(tmp_path):
    """`kill -9` after the second acquisition, and the same command again."""
    command = ["run", "mfvi", "active_digits", *FEW, "--threads", "1", "--out"]
    process = toys.start([*command, "killed"], tmp_path)
    end = time.monotonic() + 240
    while len(list(tmp_path.glob("killed/*/*/*/checkpoints/*.kept"))) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (directory,) = tmp_path.glob("killed/*/*/*")
    assert not (directory / "record.json").exists()
    for out in ("killed", "whole"):
        assert cli.main([*command, str(tmp_path / out)]) == 0
    (whole,) = tmp_path.glob("whole/*/*/*")
    assert read_arrays(directory)["index"].tolist() == read_arrays(whole)["index"].tolist()
    records = [read_record(d) for d in (directory, whole)]
    assert records[0].provenance.arrays_digest == records[1].provenance.arrays_digest
    assert records[0].metrics == records[1].metrics
    assert len(list(directory.glob("checkpoints/*.ckpt"))) == 1


def test_settings_of_the_paper_are_those_of_its_table():
    settings = Settings(dataset="mnist", epochs=100, patience=20)
    assert (settings.acquired, settings.temperature, settings.acquisition_samples) == (60, 1e4, 100)
    assert (settings.test_samples, settings.score, settings.proposal) == (8, "bald", "softmax")

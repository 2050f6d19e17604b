"""The engine: fits, predictions, batches, checkpoints, and going on after a stop."""

import os
import platform
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import toys
from conformance import problems
from torch.utils.data import TensorDataset

import bench
from bench.batches import batches
from bench.contract import Batch, Budget
from bench.data import array_digest
from bench.diagnostics import gradient_norms
from bench.engine import trainer, watch
from bench.engine.engine import Engine, TrainerOptions
from bench.engine.spreading import FitRequest
from bench.errors import Diverged, OutputError, UsageError
from bench.laws.problems import OnDisk
from bench.methods.map import MAP
from bench.methods.mfvi import MFVI
from bench.runs import registry

BUDGET = Budget(epochs=4, batch_size=6)
CPU = TrainerOptions(accelerator="cpu")


def make(cls=MFVI, seed=0, folder=None, **options):
    """An engine for a method with its default settings, on one CPU process."""
    values = options.pop("values", {})
    return Engine(cls, cls.settings_class(**values), seed, folder, CPU, **options)


def digest(method):
    """One string for all weights."""
    return array_digest({name: value.numpy() for name, value in method.state_dict().items()})


def rows(*columns, number=10):
    """Inputs `[N, 2]` that tell their row, targets, and further columns."""
    inputs = torch.arange(number).float()[:, None].repeat(1, 2)
    return (inputs, torch.arange(number) % 3, *columns)


def seen(loader, epoch=0):
    """Rows in the order of one pass."""
    getattr(loader, "sampler", loader).set_epoch(epoch)
    return [int(x) for batch in loader for x in batch.inputs[:, 0]]


# ---- fits


def test_every_fit_has_its_own_trainer():
    """A Trainer that is used twice silently trains nothing: the second fit must move its weights too."""
    engine, problem = make(), problems.mlp()
    first = engine.fit(problem, BUDGET)
    before = digest(first)
    second = engine.fit(problem, BUDGET, start=first)
    assert [fit["steps"] for fit in engine.fits] == [16, 16]
    assert len(second.history) == 4
    assert digest(second) != before
    assert digest(first) == before


def test_same_seed_same_weights_and_other_seed_others():
    fitted = [digest(make(seed=seed).fit(problems.mlp(), BUDGET)) for seed in (3, 3, 4)]
    assert fitted[0] == fitted[1] != fitted[2]


def test_each_fit_of_a_run_draws_its_own_start_and_noise():
    engine = make()
    assert digest(engine.fit(problems.mlp(), BUDGET)) != digest(engine.fit(problems.mlp(), BUDGET))


def test_order_of_the_examples_follows_seed_and_fit():
    orders = []

    class Sees(MAP):
        def training_step(self, batch, batch_idx):
            orders.append(batch.inputs[:, 0].tolist())
            return super().training_step(batch, batch_idx)

    def first_orders(seed):
        orders.clear()
        engine = make(Sees, seed)
        for _ in range(2):
            engine.fit(problems.mlp(), Budget(epochs=2, batch_size=19))
        return orders[::2]  # the first batch of every epoch

    a, b = first_orders(0), first_orders(1)
    assert a == first_orders(0)
    assert len({tuple(order) for order in a + b}) == 8


def test_global_random_state_does_not_matter_and_is_left_alone():
    fitted = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        engine = make()
        method = engine.fit(problems.mlp(), BUDGET)
        engine.predict(method, torch.zeros(2, 4), 3)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.array_equal(np.random.get_state()[1], before[1])
        fitted.append(digest(method))
    assert fitted[0] == fitted[1]


@pytest.mark.parametrize(("batch_size", "steps"), [(6, 4), (20, 1), (None, 1), (1000, 1), (7, 3)])
def test_budget_is_kept(batch_size, steps):
    engine = make()
    engine.fit(problems.mlp(), Budget(epochs=3, batch_size=batch_size))
    assert engine.fits[0]["epochs"] == 3
    assert engine.fits[0]["steps"] == 3 * steps


def test_pretraining_epochs_come_on_top_and_are_counted():
    engine = make(values={"pretrain_epochs": 2})
    method = engine.fit(problems.mlp(), BUDGET)
    assert engine.fits[0]["epochs"] == 6
    assert [row["prior_term"] == 0 for row in method.history] == [True] * 2 + [False] * 4


def test_full_batch_is_the_whole_data_set():
    sizes = []

    class Sees(MAP):
        def training_step(self, batch, batch_idx):
            sizes.append(len(batch.inputs))
            return super().training_step(batch, batch_idx)

    make(Sees).fit(problems.mlp(), Budget(epochs=2))
    assert sizes == [20, 20]


def test_patience_stops_and_keeps_the_best_epoch():
    """A step size at which MAP overfits: it must stop early and give back the epoch of least NLL."""
    engine = make(MAP, values={"learning_rate": 0.3})
    problem = problems.mlp()
    method = engine.fit(problem, Budget(epochs=60, batch_size=5, patience=3))
    nlls = [row["val_nll"] for row in method.history]
    best = int(np.argmin(nlls))
    assert len(nlls) == best + 1 + 3 < 60
    inputs, targets = problem.val.tensors
    score = method.predict(inputs, 1, torch.Generator()).log_score(targets)
    torch.testing.assert_close(-score.mean().item(), nlls[best], rtol=1e-5, atol=1e-6)
    assert nlls[best] < nlls[-1]


def test_history_tells_every_epoch():
    method = make().fit(problems.mlp(), BUDGET)
    assert [row["epoch"] for row in method.history] == [1, 2, 3, 4]
    for row in method.history:
        terms = row["likelihood_term"] + row["prior_term"]
        torch.testing.assert_close(row["loss"], terms, rtol=1e-6, atol=0)


def test_history_weighs_batches_by_their_rows():
    """20 rows in batches of 19 and 1: the epoch's loss is the mean over rows, not over batches."""
    losses = []

    class Sees(MAP):
        def training_step(self, batch, batch_idx):
            terms = super().training_step(batch, batch_idx)
            losses.append((len(batch.inputs), terms["loss"].item()))
            return terms

    method = make(Sees).fit(problems.mlp(), Budget(epochs=1, batch_size=19))
    assert [n for n, _ in losses] == [19, 1]
    expected = sum(n * value for n, value in losses) / 20
    torch.testing.assert_close(method.history[0]["loss"], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("cls", [MAP, MFVI])
def test_probe_adds_gradient_norms_to_the_history_and_changes_nothing_else(cls):
    plain, probed = make(cls), make(cls)
    first, second = (
        plain.fit(problems.mlp(), BUDGET),
        probed.fit(problems.mlp(), BUDGET, probe=gradient_norms),
    )
    assert digest(first) == digest(second)
    norms = {"likelihood_gradient", "prior_gradient"}
    for row, more in zip(first.history, second.history, strict=True):
        assert more.keys() - row.keys() == norms
        assert {name: value for name, value in more.items() if name not in norms} == row
    assert len({row["likelihood_gradient"] for row in second.history}) == BUDGET.epochs


def test_probe_measures_at_the_start_of_an_epoch():
    """At its own prior as start a KL has no gradient yet; after an epoch it has."""
    engine, problem = make(), problems.mlp()
    first = engine.fit(problem, BUDGET)
    second = engine.fit(replace(problem, prior=first.as_prior()), BUDGET, start=first, probe=gradient_norms)
    assert second.history[0]["prior_gradient"] == pytest.approx(0, abs=1e-6)
    assert second.history[1]["prior_gradient"] > 1e-4


def test_divergence_names_stage_and_step():
    engine = make(toys.TurnsNaN, values={"at_step": 7})
    engine.stage("task 3", 3, 5)
    with pytest.raises(Diverged, match=r"stage 'task 3', epoch 2, step 7: the loss is nan$") as caught:
        engine.fit(problems.mlp(), BUDGET)
    assert "\n" not in str(caught.value)
    (fit,) = engine.fits  # what it did is told all the same
    assert (fit["epochs"], fit["steps"], fit["diagnostics"]) == (1, 7, {"diverged": 1.0})


def test_divergence_is_named_though_losses_are_looked_at_once_in_a_while(monkeypatch):
    """As on an accelerator, which would have to end its queue of work at every look."""
    looks, look = [], watch.Watch._look
    monkeypatch.setattr(watch, "AT_ONCE", frozenset())
    monkeypatch.setattr(watch.Watch, "_look", lambda self, of: looks.append(self.steps) or look(self, of))
    for told, expected in ((watch.STEPS_TOLD, [4, 8]), (3, [3, 4, 6, 8])):  # an epoch has four steps
        monkeypatch.setattr(watch, "STEPS_TOLD", told)
        looks.clear()
        engine = make(toys.TurnsNaN, values={"at_step": 7})
        with pytest.raises(Diverged, match=r"epoch 2, step 7: the loss is nan$"):
            engine.fit(problems.mlp(), BUDGET)
        assert looks == expected
        assert engine.fits[0]["steps"] == 8


def test_prediction_that_is_not_finite_diverges():
    engine = make(toys.PredictsNaN)
    engine.stage("task 2")
    method = engine.fit(problems.mlp(), BUDGET)
    with pytest.raises(Diverged, match=r"stage 'task 2'.*NaN"):
        engine.predict(method, torch.zeros(2, 4), 3)


def test_fit_many_is_fits_one_by_one():
    posed = [problems.mlp(), replace(problems.mlp(), train=problems.mlp().val, num_train=12)]
    many, single = make(), make()
    together = many.fit_many(posed, BUDGET)
    assert [digest(m) for m in together] == [digest(single.fit(problem, BUDGET)) for problem in posed]
    again = many.fit_many(posed, BUDGET, together)
    assert [digest(m) for m in again] == [
        digest(single.fit(p, BUDGET, s)) for p, s in zip(posed, together, strict=True)
    ]
    with pytest.raises(ValueError, match="shorter"):
        many.fit_many(posed, BUDGET, together[:1])


def test_method_that_does_not_train_takes_no_step():
    class Closed(MAP):
        trains = False

        def finish_fit(self, loader):
            self.rows = sum(len(batch.inputs) for batch in loader)

    engine = make(Closed)
    assert engine.fit(problems.mlp(), BUDGET).rows == 20
    assert engine.fits[0]["steps"] == engine.fits[0]["epochs"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"accelerator": "abacus"},
        {"precision": "16-mixed"},
        {"strategy": "chaos"},
        {"devices": 0},
        {"devices": -3},
    ],
    ids=str,
)
def test_options_that_lightning_refuses_are_one_line(options):
    values = {"accelerator": "cpu"} | options
    with pytest.raises(UsageError, match="--trainer") as caught:
        Engine(MAP, MAP.settings_class(), 0, trainer=TrainerOptions(**values)).check()
    assert "\n" not in str(caught.value)


def test_precision_is_passed_through():
    kinds = []

    class Sees(MAP):
        def loss_terms(self, batch, noise):
            terms = super().loss_terms(batch, noise)
            kinds.append((self.network[1].weight @ batch.inputs.T).dtype)
            return terms

    options = TrainerOptions(accelerator="cpu", precision="bf16-mixed")
    Engine(Sees, MAP.settings_class(), 0, trainer=options).fit(problems.mlp(), Budget(epochs=1))
    assert kinds == [torch.bfloat16]


def test_no_installed_package_adds_callbacks_to_a_fit(monkeypatch):
    """Lightning takes them from any package; no record would tell of them."""
    foreign = pl.Callback()
    offered = SimpleNamespace(name="foreign", load=lambda: lambda: [foreign])
    monkeypatch.setattr("lightning_fabric.utilities.registry.entry_points", lambda group: [offered])
    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    assert foreign in pl.Trainer(**quiet).callbacks
    assert foreign not in trainer.make(CPU, BUDGET, trainer.place(CPU)).callbacks
    assert foreign in pl.Trainer(**quiet).callbacks  # Lightning is left as it was


@pytest.mark.parametrize("precision", ["64-true", "16-true", "bf16-true", "transformer-engine", "7-odd"])
def test_precision_that_cannot_work_is_one_line_and_writes_nothing(tmp_path, precision):
    """Of weights in another type, which predictions in float32 cannot take."""
    choices = f"^--trainer.precision {precision}: .*'32-true'.*'bf16-mixed'"
    with pytest.raises(UsageError, match=choices) as caught:
        bench.run("map", "iris_depth", preset="smoke", out=tmp_path, trainer={"precision": precision})
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


SMALL_GENERATOR = {"generator_steps": 2, "generator_hidden": 8, "generator_latent": 3}


@pytest.mark.parametrize(
    ("name", "pose", "values"), [("map", problems.mlp, {}), ("vgr", problems.pixels, SMALL_GENERATOR)]
)
def test_mixed_precision_predicts_in_float32_while_it_trains_too(name, pose, values):
    """Rows of probabilities in bfloat16 do not sum to one: the fit was said to have diverged."""
    cls, options = registry.method(name).cls, TrainerOptions(accelerator="cpu", precision="bf16-mixed")
    engine = Engine(cls, cls.settings_class(**values), 0, trainer=options)
    first = engine.fit(pose(), replace(BUDGET, patience=2))
    method = engine.fit(pose(), replace(BUDGET, patience=2), first)
    inputs, targets = pose().val.tensors
    if name == "map":
        score = method.predict(inputs, 1, torch.Generator()).log_score(targets)
        nlls = [row["val_nll"] for row in method.history]
        torch.testing.assert_close(-score.mean().item(), min(nlls), rtol=1e-6, atol=0)


def test_precision_of_a_method_without_training_steps_is_refused():
    cls, options = registry.method("linear").cls, TrainerOptions(accelerator="cpu", precision="bf16-mixed")
    with pytest.raises(UsageError, match=r"^--trainer\.precision .* takes none"):
        Engine(cls, cls.settings_class(), 0, trainer=options).fit(problems.linear(), BUDGET)


def test_observer_hears_of_stages_epochs_and_numbers():
    heard = []
    engine = make()
    engine.observe(lambda event, values: heard.append((event, values)))
    engine.stage("one", 1, 2)
    engine.fit(problems.mlp(), BUDGET)
    engine.log("accuracy", 0.5, 7)
    assert [event for event, _ in heard] == ["stage", *["epoch"] * 3, "steps", "epoch", "fit", "log"]
    assert heard[0][1] == {"name": "one", "number": 1, "of": 2}
    assert heard[2][1].keys() >= {"epoch", "of", "loss", "fit", "fits"}
    steps = engine.fits[0]["steps"]
    assert [values["steps"] for event, values in heard if event in ("steps", "fit")] == [steps, steps]
    assert heard[-2][1] == {"fit": 1, "fits": 1, "was_there": False, "steps": steps}
    assert heard[-1][1] == {"name": "accuracy", "value": 0.5, "step": 7}
    assert engine.logged == [("accuracy", "one", 7.0, 0.5)]


FAULTS = """
import resource, torch
from bench.engine import trainer

def faults():
    first = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        kept = torch.ones(2**20)
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - first

before = faults()
trainer.keep_memory()
faults()
print(before, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_memory_of_freed_tensors_is_kept_for_the_next_step():
    """Twenty tensors of 1024 pages, one after another: up to 20,480 page faults, then next to none."""
    done = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert after < before / 10


# ---- predictions


@pytest.mark.parametrize("piece", [1, 3, 5, 11])
def test_prediction_in_pieces_is_the_prediction_at_once(monkeypatch, piece):
    inputs = torch.randn(11, 4)
    whole, engine = make(), make()
    at_once = whole.predict(whole.fit(problems.mlp(), BUDGET), inputs, 8)
    method = engine.fit(problems.mlp(), BUDGET)
    monkeypatch.setattr("bench.batches._LARGEST_PIECE", piece * 50 * 8)
    sizes = []
    predict = method.predict
    method.predict = lambda x, s, g: sizes.append(len(x)) or predict(x, s, g)
    torch.testing.assert_close(engine.predict(method, inputs, 8).log_probs, at_once.log_probs)
    assert max(sizes) == piece
    assert sum(sizes) == 11


def test_pieces_bound_the_memory_of_wide_inputs(monkeypatch):
    monkeypatch.setattr("bench.batches._LARGEST_PIECE", 1200)
    method, sizes = MAP(problems.mlp(), MAP.settings_class()), []
    predict = method.predict
    method.predict = lambda x, s, g: sizes.append(len(x)) or predict(x[:, :4], s, g)
    make(MAP).predict(method, torch.zeros(7, 600), 1)
    assert sizes == [2, 2, 2, 1]


def test_two_predictions_draw_anew():
    engine = make()
    method = engine.fit(problems.mlp(), BUDGET)
    a, b = (engine.predict(method, torch.ones(3, 4), 4).log_probs for _ in range(2))
    assert not torch.equal(a, b)


# ---- batches


@pytest.mark.parametrize("kind", [TensorDataset, OnDisk])
@pytest.mark.parametrize("size", [1, 3, 10, None])
def test_every_example_once_an_epoch_in_a_new_order(kind, size):
    loader = batches(kind(*rows()), size, seed=5)
    assert len(list(loader)) == len(loader) == (1 if size is None else -(-10 // size))
    passes = [seen(loader, epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in passes)
    assert seen(loader, 1) == passes[1]
    if size is not None and size < 10:
        assert passes[0] != passes[1] != passes[2] != sorted(passes[2])
        assert seen(batches(kind(*rows()), size, seed=6)) != passes[0]


@pytest.mark.parametrize(
    ("kind", "weighted"), [(TensorDataset, False), (TensorDataset, True), (OnDisk, False)]
)
def test_batches_have_one_form(kind, weighted):
    weights = (torch.arange(10).float() / 10,) if weighted else ()
    for batch in batches(kind(*rows(*weights)), 4, seed=0):
        assert isinstance(batch, Batch)
        index = batch.inputs[:, 0].long()
        assert torch.equal(batch.targets, index % 3)
        assert (batch.weights is not None) == weighted
        if weighted:
            torch.testing.assert_close(batch.weights, index / 10)


@pytest.mark.parametrize("kind", [TensorDataset, OnDisk])
def test_without_seed_the_order_is_that_of_the_data(kind):
    loader = batches(kind(*rows()), 4, None)
    assert [int(x) for batch in loader for x in batch.inputs[:, 0]] == list(range(10))


@pytest.mark.parametrize("kind", [TensorDataset, OnDisk])
@pytest.mark.parametrize(("number", "size"), [(10, 4), (11, 3), (10, None), (9, 8)])
def test_processes_share_every_batch(kind, number, size):
    whole = batches(kind(*rows(number=number)), size, 5)
    shares = [batches(kind(*rows(number=number)), size, 5, (rank, 3)) for rank in range(3)]
    for epoch in range(2):
        for loader in (whole, *shares):
            loader.set_epoch(epoch)
        for batch, *parts in zip(whole, *shares, strict=True):
            counted = [loader.handed_out for loader in shares]
            assert {of for _, of in counted} == {len(batch.inputs)}
            own = [part.inputs[:count, 0] for part, (count, _) in zip(parts, counted, strict=True)]
            assert sorted(torch.cat(own).tolist()) == sorted(batch.inputs[:, 0].tolist())
            assert all(
                len(part.inputs) == max(count, 1) for part, (count, _) in zip(parts, counted, strict=True)
            )


def test_data_set_from_disk_trains_like_one_in_memory():
    problem = problems.mlp()
    from_disk = replace(problem, train=OnDisk(*problem.train.tensors), val=OnDisk(*problem.val.tensors))
    budget = Budget(epochs=3, batch_size=6, patience=3)
    a, b = (make().fit(p, budget) for p in (problem, from_disk))
    assert digest(a) == digest(b)


# ---- checkpoints


def test_checkpoints_bear_their_stage_and_load_without_pickle(tmp_path):
    engine = make(folder=tmp_path)
    for number, name in enumerate(["Task 1", "task 2: FGSM / L∞"], 1):
        engine.stage(name, number, 2)
        method = engine.fit(problems.mlp(), BUDGET)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000-task-1.ckpt", "001-task-2-fgsm-l-.ckpt"]
    checkpoint = torch.load(tmp_path / names[1], weights_only=True)
    assert checkpoint["fit"]["steps"] == 16
    assert array_digest({k: v.numpy() for k, v in checkpoint["state_dict"].items()}) == digest(method)


def test_finished_fit_takes_no_step_again(tmp_path, monkeypatch):
    first = make(folder=tmp_path)
    method = first.fit(problems.mlp(), BUDGET)
    prediction = first.predict(method, torch.ones(3, 4), 4)
    monkeypatch.setattr(MFVI, "training_step", lambda *_: pytest.fail("trained again"))
    second = make(folder=tmp_path)
    again = second.fit(problems.mlp(), BUDGET)
    assert digest(again) == digest(method)
    assert again.history == method.history
    assert second.fits == first.fits
    assert torch.equal(second.predict(again, torch.ones(3, 4), 4).log_probs, prediction.log_probs)


@pytest.mark.parametrize("name", ["map", "mfvi", "radial", "mc_dropout"])
@pytest.mark.parametrize("stop", [2, 5, 9, 15])
def test_stopped_fit_goes_on_to_the_same_weights(tmp_path, name, stop):
    """Stopped in the middle of an epoch; the unfinished fit is saved at every epoch's end."""
    cls = registry.method(name).cls
    undisturbed = make(cls, folder=tmp_path / "whole").fit(problems.mlp(), BUDGET)

    class Stops(cls):
        taken = 0

        def training_step(self, batch, batch_idx):
            self.taken += 1
            if self.taken == stop:
                raise MemoryError
            return super().training_step(batch, batch_idx)

    folder = tmp_path / "stopped"
    with pytest.raises(MemoryError):
        make(Stops, folder=folder, checkpoint_seconds=0).fit(problems.mlp(), BUDGET)
    assert [path.suffix for path in folder.glob("*")] == ([".partial"] if stop > 4 else [])
    engine = make(cls, folder=folder, checkpoint_seconds=0)
    steps = []
    engine.observe(lambda event, values: steps.append(values["epoch"]) if event == "epoch" else None)
    method = engine.fit(problems.mlp(), BUDGET)
    assert steps == list(range((stop - 1) // 4 + 1, 5))
    assert digest(method) == digest(undisturbed)
    assert [r["loss"] for r in method.history] == [r["loss"] for r in undisturbed.history]
    assert engine.fits[0]["steps"] == 16
    assert [path.suffix for path in folder.iterdir()] == [".ckpt"]


def test_stopped_fit_with_patience_still_keeps_the_best_epoch(tmp_path):
    budget = Budget(epochs=60, batch_size=5, patience=3)
    values = {"learning_rate": 0.3}
    whole = make(MAP, folder=tmp_path / "whole", values=values).fit(problems.mlp(), budget)
    best = int(np.argmin([row["val_nll"] for row in whole.history]))

    class Stops(MAP):
        def on_train_epoch_start(self):
            super().on_train_epoch_start()
            if self.current_epoch == best + 2:  # the best epoch lies before the stop
                raise MemoryError

    folder = tmp_path / "stopped"
    with pytest.raises(MemoryError):
        make(Stops, folder=folder, checkpoint_seconds=0, values=values).fit(problems.mlp(), budget)
    method = make(MAP, folder=folder, checkpoint_seconds=0, values=values).fit(problems.mlp(), budget)
    assert digest(method) == digest(whole)
    assert [r["val_nll"] for r in method.history] == [r["val_nll"] for r in whole.history]


@pytest.mark.parametrize("patience", [None, 3])
def test_stopped_between_training_and_its_checkpoint_goes_on_too(tmp_path, patience):
    budget = Budget(epochs=30, batch_size=5, patience=patience)
    values = {"learning_rate": 0.3}
    whole = make(MAP, values=values).fit(problems.mlp(), budget)

    class Stops(MAP):
        def finish_fit(self, loader):
            raise MemoryError

    with pytest.raises(MemoryError):
        make(Stops, folder=tmp_path, checkpoint_seconds=0, values=values).fit(problems.mlp(), budget)
    method = make(MAP, folder=tmp_path, checkpoint_seconds=0, values=values).fit(problems.mlp(), budget)
    assert digest(method) == digest(whole)
    assert len(method.history) == len(whole.history)


def test_ctrl_c_in_a_fit_is_a_keyboard_interrupt_and_the_next_one_works_too():
    """Lightning would end the process with exit code 1."""

    class Interrupted(MAP):
        def training_step(self, batch, batch_idx):
            os.kill(os.getpid(), signal.SIGINT)
            return super().training_step(batch, batch_idx)

    before = signal.getsignal(signal.SIGINT)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            make(Interrupted).fit(problems.mlp(), BUDGET)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_full_disk_leaves_no_half_checkpoint(tmp_path, monkeypatch, fails):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        with pytest.raises(OutputError, match="No space left on device"):
            make(folder=tmp_path).fit(problems.mlp(), BUDGET)
    assert list(tmp_path.iterdir()) == []
    engine = make(folder=tmp_path)
    assert digest(engine.fit(problems.mlp(), BUDGET)) == digest(make().fit(problems.mlp(), BUDGET))


def test_full_disk_at_an_unfinished_checkpoint_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match=r"\.partial: No space left on device"):
        make(folder=tmp_path, checkpoint_seconds=0).fit(problems.mlp(), BUDGET)


def test_fit_without_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(checkpoint_seconds=0).fit(problems.mlp(), BUDGET)
    assert list(tmp_path.iterdir()) == []


def test_what_follows_training_sees_all_examples_in_every_process(monkeypatch):
    """A covariance from a process's own share would differ between the processes."""
    monkeypatch.setattr("bench.engine.fitting.ranks", lambda: (1, 2))
    monkeypatch.setattr("bench.engine.fitting.from_first", lambda work: work())
    job = make(MAP)._fits._begin(FitRequest(0, "fit", problems.mlp(), None), BUDGET)
    assert sum(len(batch.inputs) for batch in job.loader) == 10
    rows = torch.cat([batch.inputs for batch in job.everything])
    everything = problems.mlp().train.tensors[0]
    assert sorted(rows.tolist()) == sorted(everything.tolist())

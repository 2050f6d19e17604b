"""Training steps as compiled code: the same numbers, one after another, and eager where nothing compiles."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
from conformance import problems
from torch._inductor.utils import clear_caches
from torch.testing import assert_close

import bench
from bench import cli
from bench.contract import Budget
from bench.diagnostics import gradient_norms
from bench.engine import compiled
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.methods.hmc import HMC
from bench.methods.map import MAP
from bench.methods.nf_gamma import NFGamma
from bench.runs import registry

BUDGET = Budget(epochs=3, batch_size=6)
NEEDS_COMPILER = pytest.mark.skipif(
    not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")),
    reason="no C++ compiler here",
)
NO_COMPILER = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})


def engine(cls=MAP, folder=None, **options):
    return Engine(cls, cls.settings_class(), 0, folder, TrainerOptions(accelerator="cpu", **options))


def notices(engine):
    """A list that fills with what the engine tells the user."""
    told = []
    engine.observe(lambda event, values: told.append(values["text"]) if event == "notice" else None)
    return told


@pytest.fixture
def asked(monkeypatch):
    """The methods that were to be compiled; they train eagerly."""
    methods, compiling = [], compiled.compiling

    def spy(method, tell):
        methods.append(method)
        return compiling(method, tell)

    monkeypatch.setattr(compiled, "compiling", spy)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return methods


@pytest.mark.slow
@NEEDS_COMPILER
def test_flow_trains_as_it_does_eagerly(tmp_path):
    """With implicit gradients, through the tanh network."""
    settings = {"hidden": 5, "num_train": 45, "epochs": 3, "repetitions": 1, "draws": 5}
    runs = [
        bench.run(
            "nf_gamma", "singular_evidence", task_settings=settings, out=tmp_path / str(on),
            trainer={"accelerator": "cpu", "compiled": on},
        )
        for on in (False, True)
    ]  # fmt: skip
    assert [run.record.fits[0].compiled for run in runs] == [False, True]
    eagerly, fused = (bench.load(run.directory).state_dict() for run in runs)
    for name, value in eagerly.items():
        assert_close(fused[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@NEEDS_COMPILER
@torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True)
def test_fits_one_after_another_are_all_compiled():
    """More of them than torch compiles of one function before it silently gives up: 2 sizes each."""
    problem, made = problems.regression(), engine(compiled=True)
    told = notices(made)
    alone = [engine().fit(problem, BUDGET)]
    fitted = made.fit_many(3 * [problem], BUDGET)
    assert [fit["compiled"] for fit in made.fits] == 3 * [True]
    assert len(told) == 1
    for name, value in alone[0].state_dict().items():
        assert_close(fitted[0].state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert all("loss_terms" not in vars(method) for method in fitted)


@pytest.mark.slow
@NO_COMPILER
def test_without_compiler_training_is_eager_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = engine(compiled=True)
    told = notices(made)
    found, expected = (e.fit(problems.regression(), BUDGET).state_dict() for e in (made, engine()))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert made.fits[0]["compiled"] is False
    assert "training runs eager" in told[1]
    assert "No working C++ compiler found" in told[1]
    assert "\n" not in told[1]


COMPILES = """
from test_compiled import BUDGET, engine, notices, problems
made = engine(compiled=True)
told = notices(made)
made.fit(problems.regression(), BUDGET)
assert made.fits[0]["compiled"] is True
assert len(told) == 1, told
"""


@pytest.mark.slow
@NEEDS_COMPILER
def test_library_that_a_stopped_process_left_unfinished_is_made_anew(tmp_path, monkeypatch):
    """As a kill while they are written leaves them; those of the backward pass are among them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    clear_caches()  # of the tests before
    engine(compiled=True).fit(problems.regression(), BUDGET)
    libraries = list(tmp_path.rglob("*.main.so"))
    assert len(libraries) > 1
    for library in libraries:
        library.unlink()  # this process has loaded it
        library.touch()
    subprocess.run([sys.executable, "-c", COMPILES], check=True)
    assert all(library.stat().st_size for library in libraries)


def test_only_a_library_of_the_cache_is_removed_and_only_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    function = compiled.Compiled(engine().fit(problems.regression(), BUDGET), lambda text: None)
    own, other = tmp_path / "cache" / "ab" / "own.main.so", tmp_path / "other.so"
    own.parent.mkdir(parents=True)
    for library in (own, other):
        library.touch()
    assert function.removes_damaged(f"ImportError: {own}: file too short")
    assert not own.exists()
    own.touch()
    for reason in (f"ImportError: {own}: file too short", f"OSError: {other}: file too short", "no compiler"):
        assert not function.removes_damaged(reason)
    assert own.exists()
    assert other.exists()


@pytest.mark.slow
@NO_COMPILER
def test_command_says_that_training_is_eager(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    few = "--task.hidden 3 --task.num_train 20 --task.epochs 2 --task.repetitions 1 --trainer.accelerator cpu"
    command = f"run nf_gaussian singular_evidence {few} --trainer.compiled true --out {tmp_path}"
    assert cli.main(command.split()) == 0
    assert "training runs eager" in " ".join(capsys.readouterr().err.split())
    (path,) = tmp_path.glob("singular_evidence*/*/*/record.json")
    assert json.loads(path.read_text())["fits"][0]["compiled"] is False


def test_defect_of_a_method_stays_its_own():
    class Broken(MAP):
        def loss_terms(self, batch, noise):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        engine(Broken, compiled=True).fit(problems.regression(), BUDGET)


def test_only_long_fits_of_methods_that_gain_are_compiled(asked, monkeypatch):
    """20 examples in batches of 6: 4 steps in each of 3 epochs."""
    monkeypatch.setattr(compiled, "SHORTEST", 13)
    two = 2 * [problems.regression()]
    made = engine(NFGamma)
    made.fit_many(two, BUDGET)
    assert not asked  # side by side
    monkeypatch.setattr(compiled, "SHORTEST", 12)
    made.fit_many(two, BUDGET)
    assert len(asked) == 2
    engine(NFGamma, stacked=True).fit_many(two, BUDGET)
    engine(NFGamma, compiled=False).fit_many(two, BUDGET)
    engine(MAP).fit_many(two, BUDGET)
    assert len(asked) == 2
    engine(MAP, compiled=True).fit_many(two, BUDGET)
    assert len(asked) == 4
    assert [fit["compiled"] for fit in made.fits] == [False, False, True, True]


def test_probed_fit_is_eager(asked):
    """Gradients are measured on other batches than it is trained on."""
    made = engine(compiled=True)
    told = notices(made)
    method = made.fit(problems.regression(), BUDGET, probe=gradient_norms)
    assert not asked
    assert "training runs eager" in told[0]
    assert "likelihood_gradient" in method.history[0]


def test_fit_that_diverges_leaves_the_method_as_it_was(asked, monkeypatch):
    nan = lambda self, batch, noise: 2 * (math.nan * self.network(batch.inputs).sum(),)  # noqa: E731
    monkeypatch.setattr(MAP, "loss_terms", nan)
    made = engine(compiled=True)
    (method,) = made.fit_many([problems.regression()], BUDGET)
    assert method.diverged
    assert "loss_terms" not in vars(method)
    assert made.fits[0]["compiled"] is True


class ReadsEpoch(MAP):
    """Its loss depends on the number of the epoch in Python, so that every epoch is compiled anew."""

    fastest = ("compiled",)

    def loss_terms(self, batch, noise):
        """The terms of MAP."""
        likelihood_term, prior_term = super().loss_terms(batch, noise)
        return likelihood_term, prior_term * (1.0 if self.epoch < 100 else 2.0)


@pytest.mark.slow
def test_fit_that_is_compiled_again_and_again_is_eager_and_says_so(monkeypatch, capfd):
    """At torch's limit; torch itself would print a warning, go on eagerly, and be recorded as compiled."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_(f, backend="eager", dynamic=False))
    made = engine(ReadsEpoch, compiled=True)
    told = notices(made)
    method = made.fit(problems.regression(), Budget(epochs=12, batch_size=10))
    assert [fit["compiled"] for fit in made.fits] == [False]
    assert "training runs eager" in told[1]
    assert "\n" not in told[1]
    expected = engine(ReadsEpoch).fit(problems.regression(), Budget(epochs=12, batch_size=10))
    for name, value in expected.state_dict().items():
        assert_close(method.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "values"), [("mfvi", {"pretrain_epochs": 2}), ("radial", {})])
def test_new_epoch_is_no_reason_to_compile_anew(monkeypatch, capfd, name, values):
    """Twice at most: while the means are pretrained, and afterwards."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_(f, backend="eager", dynamic=False))
    cls = registry.method(name).cls
    made = Engine(
        cls, cls.settings_class(**values), 0, trainer=TrainerOptions(accelerator="cpu", compiled=True)
    )
    told = notices(made)
    with torch._dynamo.config.patch(recompile_limit=2):
        method = made.fit(problems.mlp(), Budget(epochs=6, batch_size=10))
    assert len(method.history) > 5
    assert [fit["compiled"] for fit in made.fits] == [True]
    assert len(told) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@NEEDS_COMPILER
def test_sampler_walks_as_it_does_eagerly():
    """Its gradient is compiled, through layers of few units; ten short trajectories differ by rounding."""
    settings = {"chains": 2, "burn": 2, "kept": 8, "leapfrog_steps": 6}
    fits = []
    for on in (False, True):
        options = TrainerOptions(accelerator="cpu", compiled=on)
        made = Engine(HMC, HMC.settings_class(**settings), 0, trainer=options)
        fits.append(made.fit(problems.mlp(), BUDGET))
        assert [fit["compiled"] for fit in made.fits] == [on]
    assert_close(fits[1].draws, fits[0].draws, rtol=1e-4, atol=1e-4)
    assert "stride" not in vars(fits[1])


def test_sampler_of_another_library_is_not_compiled(asked):
    settings = HMC.settings_class(kernel="nuts", burn=1, kept=4)
    made = Engine(HMC, settings, 0, trainer=TrainerOptions(accelerator="cpu", compiled=True))
    with pytest.raises(UsageError, match=r"^hmc: the kernel nuts is not compiled: ") as caught:
        made.fit(problems.mlp(), BUDGET)
    assert "\n" not in str(caught.value)


def test_method_without_loss_terms_is_refused_in_one_line(tmp_path):
    for name in ("sgld", "linear"):
        cls = registry.method(name).cls
        options = TrainerOptions(accelerator="cpu", compiled=True)
        with pytest.raises(UsageError, match=r"^--trainer\.compiled: .*this method has none$") as caught:
            Engine(cls, cls.settings_class(), 0, trainer=options).check()
        assert "\n" not in str(caught.value)


def test_side_by_side_and_compiled_exclude_each_other():
    with pytest.raises(UsageError, match=r"--trainer\.stacked and --trainer\.compiled: ") as caught:
        engine(stacked=True, compiled=True).check()
    assert "\n" not in str(caught.value)

"""What several processes of a run do, as functions whose results the tests compare with those of one process.

`python tests/devices.py laws FILE WORLD` runs every law in this process, one of WORLD, and leaves what it has
found in FILE; `cells FILE WORLD OUT METHOD:TASK ..` makes small runs, one after another; `leave FILE WORLD`
only meets the other processes and ends.
"""

# ruff: noqa: E402
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.system import shells

shells.install()  # as the command does

import torch
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parent))

import generated
import toys
from conformance import problems
from given import GIVEN

import bench
from bench import cifar, figures, priors
from bench.contract import Budget
from bench.data import array_digest
from bench.engine import watch
from bench.engine.engine import Engine
from bench.engine.trainer import TrainerOptions, place
from bench.errors import BenchError, Diverged
from bench.laws.truth import small_topics
from bench.methods.map import MAP
from bench.methods.mfvi import MFVI
from bench.runs import registry
from bench.studies import hmc_predictions, topics
from bench.system import processes

WORLD = 1
"""Processes of this run; 1 in the tests themselves."""
UNEVEN = Budget(epochs=3, batch_size=7)
"""Of 20 examples: batches of 7, 7 and 6, of which two processes get 4 and 3, or 3 and 3."""
SINGLE = Budget(epochs=2, batch_size=19)
"""Of 20 examples: the last batch has one, and the further processes have none of it."""
SGD = {"optimizer": "sgd", "learning_rate": 0.05}


# ------------------------------------------------------------------------------------------ of one process


def engine(cls=MAP, folder=None, members=1, seed=0, trainer=None, **values):
    """An engine on as many processes as this run has."""
    options = TrainerOptions(accelerator="cpu", devices=WORLD, **(trainer or {}))
    made = Engine(cls, cls.settings_class(**values), seed, folder, options, members, checkpoint_seconds=0)
    made.check()
    return made


def weights(method):
    """The state dictionary, its tensors copied."""
    return {name: tensor.detach().clone() for name, tensor in method.state_dict().items()}


def digest(method):
    """One string for all weights."""
    return array_digest({name: t.contiguous().numpy() for name, t in method.state_dict().items()})


def error_of(work):
    """What a work raises, as text."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# -------------------------------------------------------------------------------------------- weights, ELBO


def fitted(name, budget, problem=problems.mlp, **values):
    """Weights and losses after a fit of a method by name."""
    entry = registry.method(name)
    method = engine(entry.cls, **{**entry.fixed, **values}).fit(problem(), budget)
    return {"weights": weights(method), "losses": [row["loss"] for row in method.history]}


def classes_on_disk():
    """As `problems.mlp`, on disk, its examples augmented."""
    return problems.on_disk(problems.mlp(), num_uniforms=2)


def weighted():
    """As `problems.mlp`, its examples weighted."""
    problem = problems.mlp()
    inputs, targets = problem.train.tensors
    return replace(problem, train=TensorDataset(inputs, targets, torch.linspace(0.5, 2, len(inputs))))


DETERMINISTIC = {
    "map, sgd": partial(fitted, "map", UNEVEN, **SGD),
    "map, adam": partial(fitted, "map", UNEVEN),
    "map, one example left": partial(fitted, "map", SINGLE, **SGD),
    "map, full batch": partial(fitted, "map", Budget(epochs=3), **SGD),
    "map, batches larger than the data": partial(fitted, "map", Budget(epochs=3, batch_size=50), **SGD),
    "map, draws": partial(fitted, "map", replace(UNEVEN, draws=33), **SGD),
    "map, weighted": partial(fitted, "map", UNEVEN, weighted, **SGD),
    "map, on disk": partial(fitted, "map", UNEVEN, classes_on_disk, **SGD),
    "map, convolutions": partial(fitted, "map", UNEVEN, problems.cnn, **SGD),
    "map, learned noise": partial(fitted, "map", UNEVEN, problems.regression, **SGD),
    "laplace": partial(fitted, "laplace", UNEVEN, **SGD),
    "laplace, kronecker": partial(fitted, "laplace", UNEVEN, curvature="kronecker", **SGD),
    "swag": partial(fitted, "swag", replace(UNEVEN, epochs=6)),
    "ewc": partial(fitted, "ewc", UNEVEN, **SGD),
    "ewc, sampled": partial(fitted, "ewc", UNEVEN, fisher="sampled", **SGD),
    "linear": partial(fitted, "linear", UNEVEN, problems.straight_line),
    "hmc": partial(fitted, "hmc", UNEVEN, problems.straight_line, chains=2, burn=3, kept=4, leapfrog_steps=3),
}
"""Fits that do not depend on the number of processes; where two or more have none of a batch, too."""


def unweighted():
    """The cheat: gradients averaged over processes as if they had equally many examples."""
    fair = watch.average_gradients
    watch.average_gradients = lambda parameters, share: fair(parameters, 1 / WORLD)
    try:
        return fitted("map", UNEVEN, **SGD)
    finally:
        watch.average_gradients = fair


def own_batches():
    """The cheat: every process takes batches of the size asked for."""
    return fitted("map", replace(UNEVEN, batch_size=7 * WORLD), **SGD)


class SameNoise(MFVI):
    """MFVI whose noise is that of the first process in every process."""

    def draw_noise(self, num_samples, generator):
        """The same in every process, another at every step."""
        self.steps_drawn = getattr(self, "steps_drawn", 0) + 1
        return super().draw_noise(num_samples, torch.Generator().manual_seed(self.steps_drawn))


class OwnScale(SameNoise):
    """The cheat: the likelihood is of a process's share of the data."""

    def loss_terms(self, batch, noise):
        """Likelihood and prior term."""
        likelihood_term, prior_term = super().loss_terms(batch, noise)
        return likelihood_term / WORLD, prior_term


def losses(cls):
    """Losses and weights of a fit, UNEVEN."""
    method = engine(cls, learning_rate=0.05, optimizer="sgd").fit(problems.mlp(), UNEVEN)
    return {"losses": method.history, "weights": weights(method)}


def joint():
    """Loss before training, and the weights that it is of."""
    made = engine(MAP, optimizer="sgd", learning_rate=1e-30)
    method = made.fit(problems.straight_line(), Budget(epochs=1, batch_size=7))
    return {"loss": method.history[0]["loss"], "weights": weights(method)}


class Noisy(MFVI):
    """MFVI that keeps its noise."""

    def draw_noise(self, num_samples, generator):
        """Keeps what it draws."""
        noise = super().draw_noise(num_samples, generator)
        vars(self).setdefault("drawn", []).append(next(iter(noise.values())).flatten()[0].item())
        return noise


def noise():
    """First numbers of the noise of every step, twice; and what the global generator gives in training."""
    return [engine(Noisy).fit(problems.mlp(), UNEVEN).drawn for _ in range(2)]


def global_noise():
    """Numbers of torch's global generator in training, of this process."""
    drawn = []

    class Draws(MAP):
        def draw_noise(self, num_samples, generator):
            drawn.append(torch.rand(()).item())
            return {}

    engine(Draws).fit(problems.mlp(), UNEVEN)
    return drawn


# ------------------------------------------------------------------------------------------------ going on


class Stops(MFVI):
    """MFVI that is stopped at a step, in every process."""

    stops_at = 0

    def training_step(self, batch, batch_idx):
        """A step, or the end."""
        Stops.stops_at -= 1
        if Stops.stops_at == 0:
            raise RuntimeError("stopped")
        return super().training_step(batch, batch_idx)


def resumed(folder, forgets=False):
    """Digests of a fit in one go, and of one that is stopped in epoch 3 and goes on."""
    keeps = watch.Watch.on_load_checkpoint
    if forgets:  # the cheat: noise goes on where that of the first process was
        watch.Watch.on_load_checkpoint = lambda *arguments: None
    try:
        budget = replace(UNEVEN, epochs=5)
        whole = engine(Stops).fit(problems.mlp(), budget)
        Stops.stops_at = 8
        stopped = error_of(lambda: engine(Stops, folder).fit(problems.mlp(), budget))
        left = processes.from_first(lambda: sorted(p.name for p in Path(folder).iterdir()))
        again = engine(Stops, folder)
        method = again.fit(problems.mlp(), budget)
    finally:
        watch.Watch.on_load_checkpoint = keeps
    return {
        "stopped": stopped,
        "left": left,
        "digests": [digest(whole), digest(method)],
        "steps": again.fits[0]["steps"],
        "history": [whole.history == method.history, len(method.history)],
    }


def damaged(folder):
    """A finished fit whose checkpoint is damaged is made again, by all."""
    first = engine(MAP, folder).fit(problems.mlp(), UNEVEN)
    processes.from_first(lambda: next(Path(folder).glob("*.ckpt")).write_bytes(b"nothing"))
    return [digest(first), digest(engine(MAP, folder).fit(problems.mlp(), UNEVEN))]


# ------------------------------------------------------------------------------------------------ decisions


def own_rank():
    """The number of this process, whoever asks."""
    return 0 if processes._state.place is None else processes._state.place.rank


class LastTurnsNaN(toys.TurnsNaN):
    """The loss of step 3 is NaN in the last process alone."""

    def training_step(self, batch, batch_idx):
        """A step of MAP, whose loss may be NaN."""
        if own_rank() == WORLD - 1:
            return super().training_step(batch, batch_idx)
        return MAP.training_step(self, batch, batch_idx)


class LastPredictsNaN(MAP):
    """Predictions are NaN in the last process alone."""

    def predict(self, inputs, num_samples, generator):
        """A prediction, or none."""
        prediction = super().predict(inputs, num_samples, generator)
        factor = float("nan") if own_rank() == WORLD - 1 else 1.0
        return type(prediction)(prediction.log_probs * factor)


class LastWaits(MFVI):
    """MFVI; where WAITS in the environment names a file, all but the first process wait in the third fit."""

    def __init__(self, problem, settings, start=None):
        super().__init__(problem, settings, start)
        self.number = 1 if start is None else start.number + 1

    def training_step(self, batch, batch_idx):
        """A step, or a wait for a signal."""
        if "WAITS" in os.environ and self.number == 3 and own_rank() > 0:
            Path(os.environ["WAITS"]).touch()
            time.sleep(600)
        return super().training_step(batch, batch_idx)


class LastFails(toys.HasBug):
    """Has a bug that the data of the last process alone bring to light."""

    def loss_terms(self, batch, noise):
        """Those of MAP, or none."""
        return (super() if own_rank() > 0 else super(toys.HasBug, self)).loss_terms(batch, noise)


class FirstFinishesNaN(MAP):
    """What follows training diverges; the first process alone does it."""

    def finish_fit(self, loader):
        """Never returns."""
        raise Diverged(f"found by process {own_rank()}")


class LastFitFails(MAP):
    """The fit of the last process cannot be made."""

    def training_step(self, batch, batch_idx):
        """A step, or an error."""
        if own_rank() == WORLD - 1:
            raise BenchError("no such fit")
        return super().training_step(batch, batch_idx)


def diverged():
    """What is raised where one process has found a NaN."""

    def predicted():
        made = engine(LastPredictsNaN)
        made.predict(made.fit(problems.mlp(), UNEVEN), problems.mlp().val.tensors[0], 2)

    return [
        error_of(lambda: engine(LastTurnsNaN).fit(problems.mlp(), UNEVEN)),
        error_of(predicted),
        error_of(lambda: engine(FirstFinishesNaN).fit(problems.mlp(), UNEVEN)),
        error_of(lambda: engine(LastFitFails).fit_many([problems.mlp()] * 3, UNEVEN)),
    ]


def early(val):
    """Epochs and weights of a fit with patience, on validation data or without."""
    problem = problems.mlp() if val else replace(problems.mlp(), val=None)
    method = engine(MAP, optimizer="sgd", learning_rate=0.5).fit(
        problem, replace(UNEVEN, epochs=40, patience=2)
    )
    return {"epochs": len(method.history), "weights": weights(method)}


def kept(folder):
    """Arrays that differ between the processes, as `once` gives them at first and again; and on `agree`."""
    own = {"drawn": torch.tensor([own_rank() + 7.0]).numpy()}
    first = engine(MAP, folder).cached(lambda: own)["drawn"].tolist()
    again = engine(MAP, folder).cached(lambda: 1 / 0)["drawn"].tolist()
    agreed = MAP(problems.mlp(), MAP.settings_class()).agree(own_rank() == 0)
    return {"own": own["drawn"].tolist(), "first": first, "again": again, "agreed": agreed}


# ---------------------------------------------------------------------------------- predictions, and spread


class Echoes(MAP):
    """Predicts of every input the input itself."""

    def predict(self, inputs, num_samples, generator):
        """Log-odds that are the input."""
        from bench.predictions import Bernoulli

        return Bernoulli(inputs.expand(num_samples, -1))

    def diagnostics(self, inputs=None):
        """The largest input."""
        return {} if inputs is None else {"largest": float(inputs.max())}


def echoed():
    """Predictions for 1 to 7 inputs, and the largest of them as their diagnostics say."""
    made = engine(Echoes)
    method, found = Echoes(problems.mlp(), Echoes.settings_class()), []
    for number in range(1, 8):
        prediction = made.predict(method, torch.arange(float(number)), 3)
        found.append(prediction.log_odds.tolist())
    return found, made.diagnostics["largest"]


def by_posterior():
    """Predictions of MFVI, whose draws are shared by all inputs."""
    made = engine(MFVI)
    method = made.fit(problems.mlp(), Budget(epochs=0))
    return made.predict(method, problems.mlp().train.tensors[0], 5).log_probs


class KnowsItsMaker(MFVI):
    """MFVI that keeps which process has trained it, with how many others."""

    def __init__(self, problem, settings, start=None):
        super().__init__(problem, settings, start)
        self.register_buffer("maker", torch.tensor([-1, 0]))

    def on_train_epoch_start(self):
        """Keeps it."""
        super().on_train_epoch_start()
        self.maker.copy_(torch.tensor([own_rank(), processes.ranks()[1]]))


def spread(kind, folder, stacked=False):
    """Digests, makers and events of five fits, or of an ensemble of three, or of five stages."""
    members = 3 if kind == "ensemble" else 1
    made = engine(KnowsItsMaker, folder, members, trainer={"stacked": stacked})
    events = []
    made.observe(lambda event, values: events.append((event, values.get("fit"), values.get("epoch"))))
    numbers = range(5)
    shifted = [replace(problems.mlp(), prior=priors.normal(0.1 * k, 1)) for k in numbers]
    if kind == "stages":
        methods = list(made.fit_stages([f"part {k}" for k in numbers], shifted.__getitem__, UNEVEN))
    elif kind == "ensemble":
        methods = made.fit(problems.mlp(), UNEVEN).members
    else:
        methods = made.fit_many([problems.mlp()] * 5 if stacked else shifted, UNEVEN)
    makers = [method.maker.tolist() for method in methods]
    for method in methods:
        method.maker.zero_()
    return {
        "digests": [digest(method) for method in methods],
        "weights": [weights(method) for method in methods],
        "makers": makers,
        "events": events,
        "stages": [fit["stage"] for fit in made.fits],
        "steps": [fit["steps"] for fit in made.fits],
        "files": processes.from_first(lambda: len(list(Path(folder).glob("*.ckpt")))),
    }


def mixed():
    """Under bf16: the type of products in training, and weights."""
    kinds = set()

    class Sees(MAP):
        def loss_terms(self, batch, noise):
            kinds.add(str((self.network[1].weight @ batch.inputs.T).dtype))
            return super().loss_terms(batch, noise)

    method = engine(Sees, trainer={"precision": "bf16-mixed"}, **SGD).fit(problems.mlp(), UNEVEN)
    return {"kinds": sorted(kinds), "weights": weights(method)}


class Pretrains(MAP):
    """MAP with a parameter that no loss knows, and one that the loss knows from the second epoch on."""

    def __init__(self, problem, settings, start=None):
        super().__init__(problem, settings, start)
        self.unused, self.later = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))

    def loss_terms(self, batch, noise):
        """Likelihood and prior term."""
        likelihood_term, prior_term = super().loss_terms(batch, noise)
        return likelihood_term, prior_term + (self.later.square().sum() if self.epoch else 0)


def unused():
    """Weights of a method with parameters that are not always trained."""
    return weights(engine(Pretrains, **SGD).fit(problems.mlp(), UNEVEN))


def laws(folder):
    """Every law by name; each gets a folder of its own."""
    found = {name: law for name, law in DETERMINISTIC.items()}
    found |= {"unweighted": unweighted, "own batches": own_batches, "joint": joint}
    found |= {"same noise": partial(losses, SameNoise), "own scale": partial(losses, OwnScale)}
    found |= {"noise": noise, "global noise": global_noise, "diverged": diverged}
    found |= {"resumed": partial(resumed, folder / "a"), "forgets": partial(resumed, folder / "b", True)}
    found |= {"damaged": partial(damaged, folder / "c"), "kept": partial(kept, folder / "d")}
    found |= {"patience": partial(early, True), "patience on the loss": partial(early, False)}
    found |= {"echoed": echoed, "by posterior": by_posterior, "mixed": mixed, "unused": unused}
    for i, kind in enumerate(("many", "ensemble", "stages")):
        found[f"spread {kind}"] = partial(spread, kind, folder / f"e{i}")
    found["spread stacked"] = partial(spread, "many", folder / "f", True)
    return found


# ----------------------------------------------------------------------------------------- several processes


def free_port():
    """A port on which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def torchrun(rank, world, port):
    """The variables that torchrun sets."""
    return {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip


def slurm(rank, world, port):
    """The variables that srun sets."""
    return {
        "SLURM_NTASKS": world, "SLURM_NTASKS_PER_NODE": world, "SLURM_PROCID": rank, "SLURM_LOCALID": rank,
        "SLURM_NODEID": 0, "SLURM_NNODES": 1, "SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_NAME": "bench",
        "SLURM_JOB_ID": 100_000 + port - 15000 if port < 25000 else 1, "MASTER_PORT": port,
    }  # fmt: skip


def machines(rank, world, port):
    """The variables that a user sets who starts a process on each of several machines."""
    return {"NODE_RANK": rank, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def start(arguments, world, variables, cwd):
    """Processes of one run, started as by somebody else; `arguments(rank)` are those of Python."""
    port, started = free_port(), []
    for rank in range(world):
        own = {name: str(value) for name, value in variables(rank, world, port).items()}
        started.append(
            subprocess.Popen(
                [sys.executable, *arguments(rank)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **own},
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def end(started, seconds=600):
    """Waits for processes; the exit code and the output of each."""
    try:
        return [(*process.communicate(timeout=seconds), process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()


def living(parent=None, group=None):
    """Numbers of the processes of a parent, or of a group, that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, of, its = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if state != "Z" and (int(of) == parent or int(its) == group):
            found.append(int(path.parent.name))
    return found


TASKS = {
    "active_digits": {"acquired": 1},
    "active_regression": {"trajectories": 2, "epochs": 2},
    "active_testing_digits": {"train_images": 100, "trajectories": 20},
    "gradient_variance_digits": {"channels": 4, "batch_size": 500, "pairs": 2},
    "fidelity_cifar10": {"num_train": 60, "channels": 2, "epochs": 2},
    "fidelity_iris": {"epochs": 2},
    "iris_depth": {"epochs": 2, "repetitions": 3},
    "oracle_classification": {"epochs": 2},
    "oracle_regression": {"epochs": 2},
    "ood_digits": {"num_train": 200, "epochs": 1, "test_images": 40},
    "own_images": {"epochs": 1, **GIVEN["own_images"]},
    "own_table": {"epochs": 1, **GIVEN["own_table"]},
    "permuted_digits": {},
    "retinopathy_synthetic": {"images": 50, "size": 32},
    "retinopathy_robustness": {"images": 50},
    "singular_evidence": {"epochs": 2, "repetitions": 3, "draws": 4},
    "sbc": {"worlds": 3, "epochs": 2},
    "shift_digits": {"num_train": 200, "epochs": 1, "test_images": 40},
    "split_digits": {},
    "split_digits_multi_head": {"test_samples": 2},
    "text_adapters": {},
    "text_topics": {"epochs": 2},
    "training_dynamics_digits": {"images": 20, "epochs": 2},
    "toy_regression": {"epochs": 2, "test_samples": 4, "hidden": 10},
    "sine_regression": {"epochs": 2, "test_samples": 4},
    "diabetes_regression": {"splits": 3, "epochs": 1},
    "depth_covariance_cifar10": {"images": 60, "tested": 20, "channels": 2, "epochs": 2},
    "mean_field_cost": {"epochs": 2, "start_steps": 2},
    "trained_product_matrix_digits": {"num_train": 200},
    "invariance_gap": {"num_weights": 100, "units": 4, "wide_units": 6, "draws": 4},
    "product_matrix": {"draws": 100},
}
"""A task of every file in `tasks/`, on data always there or made up -> settings below those of smoke."""
CLOSED_FORM = ("invariance_gap", "product_matrix")
"""Those of METHOD `none`."""
METHODS = {"hmc": {"chains": 2, "burn": 2, "kept": 4, "leapfrog_steps": 2}}
"""Method -> settings below those of smoke."""
LINEAR = {"singular_evidence": {"model": "linear", "hidden": 4}}
"""Task -> settings that pose a linear model."""


def names(method):
    """Cells of all tasks, by this method where there is one."""
    return [f"{'none' if task in CLOSED_FORM else method}:{task}" for task in TASKS]


def cell(name, out):
    """A small run: its directory, or why there is none."""
    method, _, task = name.partition(":")
    settings = dict(TASKS[task])
    if method == "linear":
        settings |= LINEAR.get(task, {})
    options = {"preset": "smoke", "threads": 1, "out": Path(out) / f"{WORLD}"}
    trainer = {"accelerator": "cpu", "devices": WORLD}
    try:
        done = bench.run(
            *(method, task),
            method_settings=METHODS.get(method, {}),
            task_settings=settings,
            trainer=trainer,
            **options,
        )
    except BenchError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"directory": str(done.directory)}


def leave(path):
    """Meets the others and ends at once, while its watching thread asks the store without a pause."""
    processes._EVERY = 0
    processes.join(place(TrainerOptions(accelerator="cpu", devices=WORLD)))
    time.sleep(0.2)  # so that it has begun to ask
    Path(path).touch()


def main(what, path, world, *rest):
    """Runs laws or cells in this process, or leaves it at once."""
    global WORLD
    torch.set_num_threads(1)
    WORLD = int(world)
    if what == "leave":
        leave(path)
        return
    figures.save = lambda *arguments: []  # drawing takes most of a small run's time
    cifar.load, hmc_predictions.load = generated.cifar, generated.chains
    topics.load = small_topics
    if what == "laws":
        works = laws(Path(path).parent / "folders")
    else:
        works = {name: partial(cell, name, rest[0]) for name in rest[1:]}
    found = {}
    for name, work in works.items():
        began = time.perf_counter()
        try:
            found[name] = work()
        except BenchError as error:
            found[name] = f"{type(error).__name__}: {error}"
        print(f"{time.perf_counter() - began:6.2f} s  {name}", file=sys.stderr)
    torch.save(found, path)


if __name__ == "__main__":
    main(*sys.argv[1:])

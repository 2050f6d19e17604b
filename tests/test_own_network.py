"""A network of one's own: what is in the posterior, what is frozen or refused, and that it is loaded."""

import math

import pytest
import torch
from given import PENGUINS
from plans import resolved
from torch import nn

import bench
from bench import own_network
from bench.engine import checkpoints
from bench.errors import UsageError
from bench.networks import Dropout, dropout_masks
from bench.runs import registry
from bench.studies import trying
from bench.tasks.own_table import OwnTable, Settings
from bench.weights import forward

INPUTS = torch.linspace(-2, 2, 12).view(4, 3)


def plain(inputs, outputs):
    """Two layers, and all that is looked after: BatchNorm with statistics, dropout, a frozen bias."""
    made = nn.Sequential(
        nn.Linear(inputs[0], 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, outputs)
    )
    made[1].running_mean.copy_(torch.arange(5.0))
    made[1].running_var.copy_(torch.arange(1, 6.0))
    made[0].bias.requires_grad_(False)
    return made


def make(monkeypatch, factory=plain, **values):
    """The network that a task would make of a factory."""
    monkeypatch.setitem(own_network.imported, "own:net", factory)
    return own_network.network("own:net", (3,), 2, **values)


def test_batchnorm_is_that_of_torch_in_eval_mode_whatever_the_mode(monkeypatch):
    torch.manual_seed(0)
    expected = plain((3,), 2).eval()
    torch.manual_seed(0)
    made = make(monkeypatch)
    for mode in (True, False):
        torch.testing.assert_close(made.train(mode)(INPUTS), expected(INPUTS))
    images = nn.BatchNorm2d(3).eval()
    images.running_mean.uniform_()
    stored = own_network.StoredNorm(images)
    inputs = torch.rand(2, 3, 4, 4)
    torch.testing.assert_close(stored(inputs), images(inputs))
    assert {*dict(stored.named_parameters())} == {"weight", "bias"}


def test_what_is_frozen_is_a_buffer(monkeypatch):
    made = make(monkeypatch)
    assert {*dict(made.named_parameters())} == {"0.weight", "1.weight", "1.bias", "4.weight", "4.bias"}
    assert "0.bias" in dict(made.named_buffers())
    last = make(monkeypatch, freeze=True)
    assert {*dict(last.named_parameters())} == {"4.weight", "4.bias"}
    last(INPUTS).sum().backward()
    _, (said,) = trying.network(lambda: make(monkeypatch, freeze=True), "own:net", INPUTS, 2)
    assert said.startswith(
        "network own:net: 12 weights in the posterior (4.weight, 4.bias), 30 frozen; BatchNorm layers at "
    )


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.bias"])
def test_stacked_draws_see_frozen_weights(frozen, monkeypatch):
    """In a plain stack of linear layers, which has a faster walk that knows of no buffers."""

    def factory(inputs, outputs):
        made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        made.get_parameter(frozen).requires_grad_(False)
        return made

    made = make(monkeypatch, factory)
    draws = {name: torch.stack([w.detach(), w.detach()]) for name, w in made.named_parameters()}
    torch.testing.assert_close(forward(made, draws, INPUTS), made(INPUTS).expand(2, -1, -1))


def test_dropout_is_that_of_the_method(monkeypatch):
    made = make(monkeypatch, dropout=0.25)
    assert [layer.p for layer in made if isinstance(layer, Dropout)] == [0.25]
    before = made(INPUTS)
    with dropout_masks(made, torch.Generator().manual_seed(0), shared=False):
        assert not torch.equal(made(INPUTS), before)
    assert torch.equal(made(INPUTS), before)
    with pytest.raises(UsageError, match=r"needs layers of nn.Dropout, and it has none"):
        make(monkeypatch, lambda inputs, outputs: nn.Sequential(nn.Linear(3, 2)), dropout=0.1)


class Couples(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, inputs):
        """Outputs that depend on the batch."""
        return self.linear(inputs) - self.linear(inputs).mean(0)


WRONG = {
    "must return a torch.nn.Module, not int": lambda i, o: 3,
    r"must turn inputs \[B, ...\] into outputs \[B, 2\], not \[2, 3\]": lambda i, o: nn.Linear(3, 3),
    "has no weights to infer": lambda i, o: nn.Sequential(nn.Flatten()),
    "normalises by the batch and keeps no statistics": lambda i, o: nn.Sequential(
        nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False)
    ),
    "gives an input another output in another batch": lambda i, o: Couples(),
    "outputs that are not finite": lambda i, o: nn.Sequential(nn.Linear(3, 2), nn.Threshold(1e9, math.inf)),
}


@pytest.mark.parametrize("said", WRONG)
def test_networks_that_cannot_be_used_are_refused_in_one_line(said, monkeypatch):
    with pytest.raises(UsageError, match=said) as caught:
        trying.network(lambda: make(monkeypatch, WRONG[said]), "own:net", INPUTS, 2)
    assert "\n" not in str(caught.value)


def test_looking_at_a_network_leaves_torchs_generator_alone(monkeypatch):
    before = torch.get_rng_state()
    trying.network(lambda: make(monkeypatch), "own:net", INPUTS, 2)
    assert torch.equal(torch.get_rng_state(), before)


MODULE = """
from torch import nn

def net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs[0], 5), nn.Tanh(), nn.Linear(5, outputs))
"""


@pytest.mark.parametrize("method", ["map", "mfvi"])
def test_a_run_of_it_is_loaded_with_its_frozen_weights_once_it_may_be_imported(method, tmp_path, monkeypatch):
    name = f"net_of_{method}:net"
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"net_of_{method}.py").write_text(MODULE)
    settings = {"file": str(PENGUINS), "target": "species", "network": name, "freeze": True, "epochs": 2}
    directory = bench.run(method, "own_table", task_settings=settings, out=tmp_path).directory
    row = {"species": "", "island": "Dream", "sex": "male", "year": 2008}
    row |= {"bill_length_mm": 40, "bill_depth_mm": 18, "flipper_length_mm": 190, "body_mass_g": 4000}
    predictor = bench.load(directory, imports=(name,))
    assert len(list(predictor.method.network.parameters())) == 2
    assert predictor.predict([row]) == bench.load(directory).predict([row])  # frozen weights of the run
    with monkeypatch.context() as patch:
        patch.delitem(own_network.imported, name)
        with pytest.raises(UsageError, match=rf"imports=\('{name}',\)"):
            bench.load(directory)
    task = OwnTable(Settings(**settings))
    digest = task.data_digest()
    (tmp_path / f"net_of_{method}.py").write_text(MODULE + "# changed\n")
    assert task.data_digest() != digest


READS = """
from pathlib import Path

from torch import nn

class Scaled(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.body, self.scale = nn.Linear(inputs[0], outputs), float(Path("scale.txt").read_text())

    def forward(self, inputs):
        return self.scale * self.body(inputs)
"""


@pytest.mark.parametrize("method", ["mfvi", "deep_ensemble", "hmc"])
def test_a_run_whose_network_is_rebuilt_otherwise_is_not_loaded(method, tmp_path, monkeypatch):
    """Its constant stands in a file that changes after the fit; as it was, and of old runs, it is loaded."""
    name = f"reads_of_{method}:Scaled"
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"reads_of_{method}.py").write_text(READS)
    (tmp_path / "scale.txt").write_text("1.5")
    settings = {"file": str(PENGUINS), "target": "species", "network": name, "epochs": 2}
    given = {"chains": 2, "burn": 3, "kept": 4, "leapfrog_steps": 2} if method == "hmc" else {}
    arguments = {"task_settings": settings, "method_settings": given, "out": tmp_path / "runs"}
    directory = bench.run(method, "own_table", **arguments).directory
    bench.load(directory)
    (tmp_path / "scale.txt").write_text("3")
    with pytest.raises(
        UsageError, match=r"\.ckpt: what is built now predicts otherwise.*bring back the file"
    ) as e:
        bench.load(directory)
    assert "\n" not in str(e.value)
    with pytest.raises(UsageError, match="with another data"):  # nor is it told as the run that was asked for
        bench.run(method, "own_table", **arguments)
    (tmp_path / "scale.txt").write_text("1.5")
    for path in (directory / "checkpoints").glob("*.ckpt"):
        checkpoints.save({k: v for k, v in checkpoints.read(path).items() if k != "witness"}, path)
    (directory / "files.json").unlink()  # which old runs lack too
    bench.load(directory)


def test_a_factory_is_no_method_and_no_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "only_net.py").write_text(MODULE)
    registry.import_own("only_net:net")
    with pytest.raises(UsageError, match=r"'only_net:net' is no Method of bench\.contract"):
        registry.method("only_net:net")
    with pytest.raises(UsageError, match=r"--task.network net: must be package.module:name"):
        resolved("map", "own_table", task_settings={"network": "net"})
    with pytest.raises(UsageError, match=r"--task.freeze true: is of a network of your own"):
        OwnTable(Settings(file=str(PENGUINS), target="species", freeze=True)).data_digest()

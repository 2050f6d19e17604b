"""What is found of a network of one's own before it is trained, each kind on several such networks."""

import random
import shutil
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from bench import own_network
from bench.data import array_digest
from bench.errors import UsageError
from bench.studies import trying
from bench.system import opening

INPUTS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


class Made(nn.Module):
    """A hidden layer, and what a test adds to it: `prepare(self)`, and `then(self, hidden)` in `forward`."""

    def __init__(self, prepare=lambda self: None, then=lambda self, hidden: hidden):
        super().__init__()
        self.enter, self.leave, self.then = nn.Linear(3, 5), nn.Linear(5, 2), then
        prepare(self)

    def forward(self, inputs):
        """Outputs `[B, 2]`."""
        return self.leave(self.then(self, self.enter(inputs).tanh()))


def tried(factory, freeze=False, inputs=INPUTS):
    """What is found of the factory's network; an error is one line."""
    own_network.imported["own:net"] = lambda shape, outputs: factory()
    own_network.opened.pop("own:net", None)
    try:
        return trying.network(lambda: own_network.network("own:net", (3,), 2, freeze), "own:net", inputs, 2)
    finally:
        del own_network.imported["own:net"]


def sets(name, make):
    """A `prepare` that sets an attribute to what is made."""
    return lambda self: setattr(self, name, make())


CONSTANTS = {
    "mask is drawn anew": lambda: Made(sets("mask", lambda: torch.rand(5)), lambda s, h: h * s.mask),
    "order is drawn anew": lambda: Made(sets("order", lambda: torch.randperm(5)), lambda s, h: h[:, s.order]),
    "kept is drawn anew": lambda: Made(
        sets("kept", lambda: [np.random.rand(5).astype("float32")]),
        lambda s, h: h * torch.from_numpy(s.kept[0]),
    ),
    "kept is drawn": lambda: Made(
        sets("kept", lambda: {"w": np.random.default_rng().normal(size=5).astype("float32")}),
        lambda s, h: h * torch.from_numpy(s.kept["w"]),
    ),
    "factor is drawn": lambda: Made(sets("factor", random.random), lambda s, h: h * s.factor),
    "noise is drawn": lambda: Made(
        lambda s: s.register_buffer("noise", torch.randn(5), persistent=False), lambda s, h: h + s.noise
    ),
    "first is drawn": lambda: Made(
        sets("first", lambda: torch.randn(5)), lambda s, h: h + torch.zeros(()) * s.leave.bias[0] + s.first
    ),
    "something that no attribute of a module shows is drawn": lambda: Made(
        then=(lambda mask: lambda s, h: h * mask)(torch.rand(5))
    ),
}


@pytest.mark.parametrize("said", CONSTANTS)
def test_constants_outside_the_state_are_named(said):
    with pytest.raises(UsageError, match=said) as caught:
        tried(CONSTANTS[said])
    assert "\n" not in str(caught.value)


def test_a_constant_behind_a_factor_of_zero_is_found():
    def prepare(self):
        self.gain, self.mask = nn.Parameter(torch.zeros(())), torch.rand(5)

    with pytest.raises(UsageError, match="mask is drawn anew"):
        tried(lambda: Made(prepare, lambda s, h: h + s.gain * s.mask))


def fixed(self):
    self.register_buffer("order", torch.randperm(5))
    self.centre = torch.arange(5.0)
    self.unused = torch.rand(3)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "factory",
    [
        lambda: Made(fixed, lambda s, h: h[:, s.order] - s.centre),
        lambda: Made(lambda s: nn.utils.weight_norm(s.enter)),
        lambda: Made(lambda s: parametrizations.weight_norm(s.enter)),
        lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.LayerNorm(4), nn.Linear(4, 2)),
    ],
)
def test_what_is_in_the_state_or_the_same_every_time_passes(factory):
    state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    arrays, _ = tried(factory)
    assert {*arrays} == {"network"}
    assert torch.equal(state[0], torch.get_rng_state())
    assert (state[1] == np.random.get_state()[1]).all()
    assert state[2] == random.getstate()


# ---- the mode, buffers and inputs


def spectral(self):
    parametrizations.spectral_norm(self.enter)


def lazy(self):
    self.leave = nn.LazyLinear(2)


WRONG = {
    r"body\.1 \(InstanceNorm1d\) gives other outputs in training|changes its buffer body\.1\.": lambda: Made(
        lambda s: setattr(
            s, "body", nn.Sequential(nn.Identity(), nn.InstanceNorm1d(1, track_running_stats=True).eval())
        ),
        lambda s, h: s.body(h[:, None])[:, 0],
    ),
    r"its forward \(Made\) gives other outputs in training": lambda: Made(
        then=lambda s, h: functional.dropout(h, 0.5, s.training)
    ),
    r"mix \(MultiheadAttention\) gives other outputs in training": lambda: Made(
        sets("mix", lambda: nn.MultiheadAttention(5, 1, dropout=0.5, batch_first=True)),
        lambda s, h: s.mix(h[:, None], h[:, None], h[:, None])[0][:, 0],
    ),
    "changes its buffer enter.parametrizations.weight.0._[uv]": lambda: Made(spectral),
    "leave.weight has no shape until the network is called": lambda: Made(lazy),
    "changes the inputs that it is given": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)),
    "gives other outputs every time": lambda: Made(then=lambda s, h: functional.dropout(h, 0.5)),
    "gives an input another output in another batch": lambda: Made(then=lambda s, h: h - h.mean(0)),
    r"computes with a copy of enter\.weight": lambda: Made(
        lambda s: setattr(s, "kept", [s.enter.weight]), lambda s, h: h @ s.kept[0] @ s.kept[0].mT
    ),
    "makes a network of other shapes": lambda: nn.Sequential(
        nn.Linear(3, k := int(torch.randint(2, 99, ()))), nn.Linear(k, 2)
    ),
    "enter.weight and transposed lie in the same memory": lambda: Made(
        lambda s: setattr(s, "transposed", s.enter.weight.data.mT),
        lambda s, h: h @ s.transposed.mT @ s.transposed,
    ),
    "twin and enter.weight lie in the same memory": lambda: Made(
        lambda s: setattr(s, "twin", nn.Parameter(s.enter.weight.data[:2])), lambda s, h: h * s.twin.sum()
    ),
}


@pytest.mark.parametrize("said", WRONG)
def test_networks_that_would_predict_otherwise_than_they_were_trained_are_refused(said):
    with pytest.raises(UsageError, match=said) as caught:
        tried(WRONG[said])
    assert "\n" not in str(caught.value)


def raises(self, hidden):
    raise RuntimeError("of two\nlines")


def ends(layer):
    return lambda: nn.Sequential(nn.Linear(3, 2), layer)


class Reads(nn.Linear):
    """A layer whose outputs are what `read` makes of them and of the inputs."""

    def __init__(self, read):
        super().__init__(3, 2)
        self.read = read

    def forward(self, inputs):
        """Outputs `[B, 2]`."""
        return self.read(self, inputs)


def without_gradient(layer, inputs):
    with torch.no_grad():
        return nn.functional.linear(inputs, layer.weight, layer.bias)


def half_precision(layer, inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.functional.linear(inputs, layer.weight, layer.bias)


UNFIT = {
    "gives probabilities .* what is wanted are logits": ends(nn.Softmax(1)),
    "no gradient reaches weight, which decides": lambda: Reads(without_gradient),
    "no gradient reaches weight": lambda: Reads(lambda s, x: x @ s.weight.data.T + s.bias),
    "no gradient reaches bias": lambda: Reads(lambda s, x: x @ s.weight.T + s.bias.detach()),
    r"gives outputs of torch\.bfloat16": lambda: Reads(half_precision),
    r"gives outputs of torch\.int64": lambda: Reads(lambda s, x: (x @ s.weight.T).round().long()),
    r"enter\.weight is torch\.float64": lambda: Made().double(),
    r"enter\.weight is torch\.float16": lambda: Made().half(),
    r"kept is torch\.complex64": lambda: Made(
        sets("kept", lambda: nn.Parameter(torch.ones(5, dtype=torch.cfloat))), lambda s, h: h * s.kept.abs()
    ),
    r"kept is torch\.sparse_coo: make it dense": lambda: Made(
        sets("kept", lambda: nn.Parameter(torch.eye(5).to_sparse())), lambda s, h: h @ s.kept
    ),
    "lies on the device meta": lambda: nn.Linear(3, 2, device="meta"),
    r"RuntimeError: of two lines \(test_trying\.py, line \d+\)": lambda: Made(then=raises),
    r"ZeroDivisionError: division by zero \(test_trying": lambda: 1 / 0,
    "mat1 and mat2 shapes cannot be multiplied": lambda: nn.Linear(5, 2),
    "can't be used with nn.DataParallel": lambda: nn.DataParallel(Made()),
}


@pytest.mark.parametrize("said", UNFIT)
def test_networks_that_cannot_be_trained_or_scored_are_refused(said):
    """Weights of another kind, outputs that are no logits, no gradient, and what the user's code raises."""
    with pytest.raises(UsageError, match=said) as caught:
        tried(UNFIT[said])
    assert "\n" not in str(caught.value)


BOUNDED = {
    "lie between 0 and 1, whatever": ends(nn.Sigmoid()),
    "lie between -1 and 1, whatever": ends(nn.Tanh()),
    "are never below 0, whatever": ends(nn.ReLU()),
    "never below 0": ends(nn.Softplus()),
}


@pytest.mark.parametrize("said", BOUNDED)
def test_outputs_that_are_bounded_are_told(said):
    """Negative controls: a last linear layer, small features, logarithms of probabilities, hidden units."""
    _, sentences = tried(BOUNDED[said])
    assert said in sentences[-1]
    assert sentences[-1].startswith("warning: outputs of network own:net")
    for factory in (Made, lambda: Made(then=lambda s, h: h.relu() / 1000), ends(nn.LogSoftmax(1))):
        assert len(tried(factory)[1]) == 1


@pytest.mark.parametrize(
    "factory",
    [
        ends(nn.LogSoftmax(1)),
        ends(nn.Sigmoid()),
        ends(nn.Tanh()),
        ends(nn.ReLU()),
        lambda: Made(then=lambda s, h: (h - 9).relu()),  # every unit is off
        lambda: Made(sets("unused", lambda: nn.Linear(4, 4))),
        lambda: Made(sets("kept", lambda: nn.Parameter(torch.ones(5).half(), requires_grad=False))),
        lambda: Made(sets("gate", lambda: nn.Parameter(torch.zeros(5))), lambda s, h: h * s.gate),
    ],
)
def test_networks_of_unusual_outputs_and_gradients_pass(factory):
    """Negative controls of the test above."""
    tried(factory)


def test_a_layer_of_dropout_or_of_batchnorm_that_stands_twice_is_replaced_twice():
    norm, drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
    layers = nn.Linear(3, 4), norm, drop, nn.Linear(4, 4), norm, drop, nn.Linear(4, 2)
    tried(lambda: nn.Sequential(*layers))


# ---- frozen


class Tied(nn.Module):
    """An encoder and a decoder that share a weight, and a head."""

    def __init__(self, change=lambda self: None):
        super().__init__()
        self.encode, self.decode, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.decode.weight = self.encode.weight
        change(self)

    def forward(self, inputs):
        """Outputs `[B, 2]`."""
        return self.head(self.decode(self.encode(inputs).tanh()).tanh())


def frozen_of(factory, freeze):
    own_network.imported["own:net"] = lambda shape, outputs: factory()
    try:
        return own_network.network("own:net", (3,), 2, freeze)
    finally:
        del own_network.imported["own:net"]


def test_a_weight_that_layers_share_is_frozen_in_all_of_them():
    made = frozen_of(Tied, freeze=True)
    assert [*dict(made.named_parameters())] == ["head.weight", "head.bias"]
    assert made.encode.weight is made.decode.weight
    made = frozen_of(lambda: Tied(lambda s: s.decode.weight.requires_grad_(False)), freeze=False)
    assert not {"encode.weight", "decode.weight"} & {*dict(made.named_parameters())}
    made = frozen_of(lambda: Made(lambda s: parametrizations.weight_norm(s.leave)), freeze=True)
    assert [*dict(made.named_parameters())] == [
        "leave.bias",
        "leave.parametrizations.weight.original0",
        "leave.parametrizations.weight.original1",
    ]


def head_is_tied(self):
    self.head = nn.Linear(3, 3)
    self.head.weight = self.encode.weight


def head_is_a_view(self):
    self.head.weight = nn.Parameter(self.encode.weight.data[:2])


@pytest.mark.parametrize(
    ("change", "freeze", "said"),
    [
        (head_is_tied, True, r"^--task\.freeze true: .*encode\.weight and head\.weight are one weight"),
        (head_is_a_view, True, r"head\.weight and encode\.weight lie in the same memory"),
        (head_is_a_view, False, r"encode\.weight and head\.weight lie in the same memory"),
    ],
)
def test_a_weight_frozen_in_one_layer_and_inferred_in_another_is_refused(change, freeze, said):
    with pytest.raises(UsageError, match=said) as caught:
        frozen_of(lambda: Tied(change), freeze)
    assert "\n" not in str(caught.value)


# ---- the digest


def digest(factory):
    return array_digest(tried(factory)[0])


def loads(self, path, read):
    with torch.no_grad():
        self.enter.weight.copy_(read(path))


def of_safetensors(path):
    from safetensors.torch import load_file

    return load_file(path)["w"]


def save_safetensors(tensor, path):
    from safetensors.torch import save_file

    save_file({"w": tensor}, path)


FILES = {
    "torch": (torch.save, lambda path: torch.load(path, weights_only=True)),
    "torch, mapped": (torch.save, lambda path: torch.load(path, mmap=True, weights_only=True)),
    "numpy": (
        lambda tensor, path: np.save(path, tensor.numpy()),
        lambda path: torch.from_numpy(np.load(path, mmap_mode="r").copy()),
    ),
    "safetensors": (save_safetensors, of_safetensors),
    "raw": (
        lambda tensor, path: path.write_bytes(tensor.numpy().tobytes()),
        lambda path: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(5, 3),
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_other_pretrained_weights_are_another_digest(kind, tmp_path):
    save, read = FILES[kind]
    path, moved = tmp_path / "a.npy", tmp_path / "b.npy"
    tensor = torch.randn(5, 3)
    save(tensor, path)
    first = digest(lambda: Made(lambda s: loads(s, path, read)))
    assert digest(lambda: Made(lambda s: loads(s, path, read))) == first
    shutil.copy(path, moved)
    assert digest(lambda: Made(lambda s: loads(s, moved, read))) == first  # the content, and not the path
    save(tensor + 1e-3, path)
    assert digest(lambda: Made(lambda s: loads(s, path, read))) != first


def test_a_file_that_decides_no_weight_and_one_that_is_kept_in_memory_are_in_the_digest(tmp_path):
    path, read = tmp_path / "scale.txt", {}

    def scales(self):
        self.scale = read.setdefault("once", float(path.read_text()))

    def factory():
        return Made(scales, lambda s, h: h * s.scale)

    path.write_text("2")
    first = digest(factory)
    path.write_text("3")
    read.clear()
    assert digest(factory) != first

    kept = {"w": torch.randn(5, 3)}  # read where the module is imported, say

    def loaded():
        return Made(lambda s: loads(s, "w", kept.get))

    second = digest(loaded)
    kept["w"] = kept["w"] + 1
    assert digest(loaded) != second


def test_what_a_factory_writes_and_what_others_read_is_not_in_the_digest(tmp_path):
    inside, outside = set(), tmp_path / "outside"
    outside.write_text("")
    with opening.noted(inside):
        (tmp_path / "log").write_text("")
        open(tmp_path / "absent", "a").close()
    outside.read_text()
    assert not inside
    with opening.noted(inside):
        outside.read_text()
    assert inside == {outside}


def test_the_users_own_modules_are_in_the_digest(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "their_layers.py").write_text(
        "from torch import nn\n\ndef last():\n    return nn.Linear(3, 2)\n"
    )
    (tmp_path / "their_net.py").write_text(
        "import torch\nfrom their_layers import last\n\ndef make(inputs, outputs):\n    return last()\n"
    )
    import their_net

    monkeypatch.setitem(own_network.imported, "their_net:make", their_net.make)

    def files():
        return [path.name for path in trying._modules("their_net:make")]

    assert files() == ["their_net.py", "their_layers.py"]

    def found():
        made = lambda: own_network.network("their_net:make", (3,), 2)  # noqa: E731
        return array_digest(trying.network(made, "their_net:make", INPUTS, 2)[0])

    first = found()
    (tmp_path / "their_layers.py").write_text("# another\n")
    assert found() != first
    for name in ("their_net", "their_layers"):
        monkeypatch.delitem(sys.modules, name)

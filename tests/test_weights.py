"""Weight space: flat vectors, draws, and the walks over the samples, which must agree."""

import itertools

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.utils import prune

from bench import networks, resnet, weights
from bench.weights import forward, linearised, ravel, reparametrise, sampled_outputs, unravel

TOLERANCE = {torch.float64: {"rtol": 1e-12, "atol": 1e-12}, torch.float32: {"rtol": 2e-4, "atol": 2e-5}}


class Skip(nn.Module):
    """A user's own network: a skip connection, a layer without bias and a parameter that is no layer's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        """Outputs for inputs `[B, 6]`."""
        return self.second(x + self.scale * self.first(x).tanh())


def no_bias():
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def shared_activation():
    tanh = nn.Tanh()
    return nn.Sequential(nn.Linear(6, 5), tanh, nn.Linear(5, 4), tanh, nn.Linear(4, 3), tanh)


def single_layer():
    return nn.Sequential(nn.Linear(6, 3))


def small_mlp():
    return networks.mlp(6, 3, (8, 7))


def wide_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), nn.Flatten(), nn.Linear(20, 3)
    )


def small_lenet():
    """The layers of `networks.lenet`, a quarter as wide: sums short enough for the tolerance of float32."""
    return networks.he_initialise(
        nn.Sequential(
            nn.Conv2d(1, 4, 5),
            networks.Dropout(0.0, channels=True),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(4, 8, 5),
            networks.Dropout(0.0, channels=True),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, 32),
            nn.ReLU(),
            networks.Dropout(0.0),
            nn.Linear(32, 10),
        )
    )


def odd_cnn():
    """Convolutions with a stride, padding and dilation, without biases; means of maps; two linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, padding="same", dilation=2, bias=False),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(6, 5, bias=False),
        nn.ReLU(),
        nn.Linear(5, 3),
    )


CONVOLUTIONS = [small_lenet, wide_cnn, odd_cnn]
STACKS = [small_mlp, no_bias, shared_activation, single_layer]
SHAPES = {small_lenet: (1, 28, 28), wide_cnn: (3, 8, 8), odd_cnn: (3, 8, 8)}


def case(make, num_samples, dtype=torch.float64, batch=5):
    """A network, stacked weights that are leaves, and inputs."""
    torch.manual_seed(0)
    network = make().to(dtype)
    stacked = {
        name: (0.3 * torch.randn(num_samples, *p.shape, dtype=dtype)).requires_grad_()
        for name, p in network.named_parameters()
    }
    return network, stacked, torch.randn(batch, *SHAPES.get(make, (6,)), dtype=dtype)


def outputs_and_gradients(network, stacked, inputs, walk):
    outputs = forward(network, stacked, inputs, walk)
    cotangent = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=outputs.dtype)
    return outputs, torch.autograd.grad((outputs * cotangent).sum(), list(stacked.values()))


def plain(network, stacked, inputs):
    """What every walk must give: the network itself, once per sample."""
    samples = len(next(iter(stacked.values())))
    return torch.stack(
        [functional_call(network, {k: w[s] for k, w in stacked.items()}, inputs) for s in range(samples)]
    )


# ------------------------------------------------------------------------------------------------ walks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("make", [*STACKS, *CONVOLUTIONS, Skip])
def test_walks_agree_in_outputs_and_gradients(make, num_samples, dtype):
    network, stacked, inputs = case(make, num_samples, dtype)
    expected = plain(network, stacked, inputs)
    assert expected.shape == (num_samples, 5, 10 if make is small_lenet else 3)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    expected_gradients = torch.autograd.grad((expected * cotangent).sum(), list(stacked.values()))
    own = ["stacked"] * (make in STACKS) + ["grouped"] * (make in CONVOLUTIONS)
    for walk in (None, "loop", "vmap", *own):
        outputs, gradients = outputs_and_gradients(network, stacked, inputs, walk)
        torch.testing.assert_close(outputs, expected, **TOLERANCE[dtype])
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])


def pools_of_all_kinds():
    """Maps of 9 x 7, which no pool halves without a rest; one pool overlaps, one rounds up, one has a rim."""
    return nn.Sequential(
        *(
            nn.ReLU(),
            nn.Conv2d(3, 4, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1),
        ),
        *(nn.MaxPool2d(2, stride=1), nn.Tanh(), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, ceil_mode=True)),
        *(nn.Flatten(), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
    )


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: networks.lenet(), (1, 28, 28)),
        (lambda: networks.small_cnn(3, channels=4), (3, 8, 8)),
        (pools_of_all_kinds, (3, 9, 7)),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)),
            (1, 2, 3),
        ),
    ],
)
def test_predictions_in_place_are_those_of_the_layers_to_the_last_bit(monkeypatch, make, shape, num_samples):
    """Inputs keep their values: a rectifier that comes first does not write over them."""
    monkeypatch.setattr(weights, "_LARGEST_STACK", 0)
    taken = []
    genuine = weights._in_place
    monkeypatch.setattr(weights, "_in_place", lambda *a: taken.append(1) or genuine(*a))
    torch.manual_seed(0)
    network, inputs = make(), torch.randn(5, *shape)
    inputs[0, 0, 0, 0] = float("nan")
    before = inputs.clone()
    stacked = {n: torch.randn(num_samples, *p.shape) for n, p in network.named_parameters()}
    with torch.no_grad():
        layer_by_layer = plain(network, stacked, weights.channels_last(inputs))
        found = forward(network, stacked, inputs)
    assert len(taken) == num_samples
    assert found[:, 0].isnan().all()
    torch.testing.assert_close(found, layer_by_layer, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(inputs, before, rtol=0, atol=0, equal_nan=True)
    with torch.enable_grad():
        forward(network, stacked, inputs)
    assert len(taken) == num_samples


@pytest.mark.parametrize(
    ("make", "shape", "samples", "on_cpu", "on_cuda"),
    [
        (lambda: networks.mlp(784, 10, (400, 400)), (128, 784), 1, "stacked", "stacked"),
        (lambda: networks.mlp(784, 10, (400, 400)), (128, 784), 32, "loop", "stacked"),
        (networks.lenet, (64, 1, 28, 28), 1, "loop", "loop"),
        (networks.lenet, (64, 1, 28, 28), 8, "loop", "vmap"),
        (lambda: resnet.resnet_frn_swish(8, 10, 4), (2, 3, 32, 32), 2, "loop", "loop"),
    ],
    ids=["MLP, S 1", "MLP, S 32", "LeNet, S 1", "LeNet, S 8", "ResNet"],
)
def test_walk_is_the_one_measured_on_the_device(make, shape, samples, on_cpu, on_cuda):
    """The fastest in benchmarks/gpu.json there; without gradients memory counts, and images go in a loop."""
    network = make()
    stacked = {name: p.detach().expand(samples, *p.shape) for name, p in network.named_parameters()}
    inputs = torch.empty(1).expand(shape)
    layers = weights.linear_stack(network, inputs)
    for device, expected in (("cpu", on_cpu), ("cuda", on_cuda)):
        assert weights._fastest(network, layers, stacked, inputs, device) == expected
    with torch.no_grad():
        assert weights._fastest(network, layers, stacked, inputs, "cuda") in ("stacked", "loop")


@pytest.mark.parametrize("walk", [None, "loop", "vmap", "stacked"])
def test_images_into_a_linear_stack_are_flattened(walk):
    network, stacked, inputs = case(small_mlp, 3)
    torch.testing.assert_close(
        forward(network, stacked, inputs.view(5, 1, 2, 3), walk), plain(network, stacked, inputs)
    )


def test_the_networks_own_weights_are_neither_used_nor_changed():
    network, stacked, inputs = case(small_mlp, 2)
    before = forward(network, stacked, inputs)
    with torch.no_grad():
        for p in network.parameters():
            p.fill_(float("nan"))
    torch.testing.assert_close(forward(network, stacked, inputs), before, rtol=0, atol=0)
    assert all(p.isnan().all() for p in network.parameters())


def test_the_default_is_stacked_for_small_linear_stacks_and_else_the_loop(monkeypatch):
    taken = []
    genuine = weights._stacked
    monkeypatch.setattr(weights, "_stacked", lambda *a: taken.append("stacked") or genuine(*a))
    for make in STACKS:
        forward(*case(make, 3))
    assert taken == ["stacked"] * len(STACKS)
    for make in (Skip, wide_cnn, small_lenet):
        forward(*case(make, 3))
    monkeypatch.setattr(
        weights, "_LARGEST_STACK", 3 * 5 * 8 - 1
    )  # one float less than small_mlp's activation
    forward(*case(small_mlp, 3))
    assert len(taken) == len(STACKS)


@pytest.mark.parametrize(
    "make",
    [
        networks.lenet,
        Skip,
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Softmax(0), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Flatten(0), nn.Linear(30, 3)),
    ],
)
def test_stacked_refuses_what_is_no_plain_stack(make):
    network, stacked, inputs = case(make, 2)
    with pytest.raises(ValueError, match="stacked walk needs a plain stack of linear layers"):
        forward(network, stacked, inputs, "stacked")


def test_means_of_whole_maps_are_grouped():
    network = networks.small_cnn(3, channels=4).double()
    stacked = {n: torch.randn(3, *p.shape, dtype=torch.double) for n, p in network.named_parameters()}
    images = torch.randn(5, 3, 8, 8, dtype=torch.double)
    torch.testing.assert_close(forward(network, stacked, images, "grouped"), plain(network, stacked, images))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.Flatten(), nn.Linear(108, 3)),
        lambda: nn.Sequential(
            nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(128, 3)
        ),
        lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3)),
        lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(72, 3)),
        lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Linear(6, 3), nn.Flatten()),
        lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 3)),
    ],
)
def test_grouped_refuses_what_is_no_plain_stack_of_convolutions(make):
    """Among them layers that look at all maps of an example at once, which here are those of all samples."""
    network = make()
    stacked = {name: p.detach()[None].repeat(2, *[1] * p.ndim) for name, p in network.named_parameters()}
    with pytest.raises(ValueError, match="grouped walk needs a plain stack of convolutions"):
        forward(network, stacked, torch.randn(5, 3, 8, 8), "grouped")


def test_a_layer_used_twice_is_walked_in_a_loop():
    layer = nn.Linear(6, 6)
    network = nn.Sequential(layer, nn.Tanh(), layer).double()
    stacked = {n: torch.randn(3, *p.shape, dtype=torch.float64) for n, p in network.named_parameters()}
    inputs = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(forward(network, stacked, inputs), plain(network, stacked, inputs))


def adds_ten(module, arguments, output):
    return output + 10


class Doubles(nn.Linear):
    """Does more than its `forward`."""

    def __call__(self, *arguments):
        """Twice the outputs."""
        return 2 * super().__call__(*arguments)


class Backwards(nn.Sequential):
    """Goes through its layers from the last to the first."""

    def __iter__(self):
        """The layers, the last first."""
        return reversed([*self._modules.values()])


def takes_a_pre_hook(network):
    network[1].register_forward_pre_hook(lambda module, arguments: (arguments[0] + 10,))


def takes_another_forward(network):
    network[0].forward = lambda inputs: nn.functional.linear(inputs, network[0].weight)


def ties(network):
    network[2].weight = network[0].weight


def becomes(cls, place=0):
    def change(network):
        network[place].__class__ = cls

    return change


DO_MORE = {
    "hook of the network": lambda network: network.register_forward_hook(adds_ten),
    "hook of a layer": lambda network: network[0].register_forward_hook(adds_ten),
    "hook of an activation": lambda network: network[1].register_forward_hook(adds_ten),
    "hook with keywords": lambda network: network[2].register_forward_hook(
        lambda module, arguments, named, output: output + 10, with_kwargs=True
    ),
    "hook before": takes_a_pre_hook,
    "another forward of the layer's own": takes_another_forward,
    "another call": becomes(Doubles),
    "weight norm": lambda network: nn.utils.parametrizations.weight_norm(network[0]),
    "weight norm by hooks": lambda network: torch.nn.utils.weight_norm(network[0]),
    "pruned": lambda network: prune.l1_unstructured(network[0], "weight", 0.5),
    "tied": ties,
    "another order": lambda network: setattr(network, "__class__", Backwards),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("change", DO_MORE)
@pytest.mark.parametrize("examples", [2, 300_000])
def test_networks_that_do_more_than_their_layers_are_called(change, examples):
    """Against plain calls, whatever the number of inputs: few would take the stacked walk, many the loop."""
    network = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    DO_MORE[change](network)
    stacked = {n: torch.randn(2, *p.shape).double() for n, p in network.named_parameters()}
    inputs = torch.randn(2, 6, dtype=torch.float64)
    expected = plain(network, stacked, inputs)
    many = inputs.repeat(examples // 2, 1)
    torch.testing.assert_close(forward(network, stacked, many)[:, :2], expected)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hook_of_all_modules_or_a_backward_one_is_called(kind):
    """Of all modules and of one layer: under S draws as often as S plain calls would."""
    calls = []

    def count(*arguments):
        calls.append(1)

    def called(register):
        calls.clear()
        network, stacked, inputs = case(small_mlp, 3)
        of_all = register is None
        layer_hook = None if of_all else getattr(network[1], f"register_{kind}_hook")(count)
        name = f"register_module_{kind}_hook"
        handle = getattr(nn.modules.module, name)(count) if of_all else layer_hook
        try:
            forward(network, stacked, inputs.requires_grad_()).sum().backward()
        finally:
            handle.remove()
        return len(calls)

    assert called("layer") == 3
    assert called(None) >= 3 * 7  # of every layer, in every draw


def test_a_network_with_hooks_is_not_asked_for_its_own_way():
    network = nn.Linear(6, 3)
    network.forward_samples = lambda weights, inputs: torch.zeros(())
    stacked = {n: torch.randn(2, *p.shape) for n, p in network.named_parameters()}
    inputs = torch.randn(5, 6)
    assert forward(network, stacked, inputs).shape == ()
    network.register_forward_hook(adds_ten)
    torch.testing.assert_close(forward(network, stacked, inputs), plain(network, stacked, inputs))


def test_sequences_into_a_linear_stack_keep_their_axes():
    network, stacked, _ = case(no_bias, 2)
    inputs = torch.randn(5, 4, 6, dtype=torch.float64)
    outputs = forward(network, stacked, inputs)
    assert outputs.shape == (2, 5, 4, 3)
    torch.testing.assert_close(outputs, plain(network, stacked, inputs))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_reach_the_network_in_channels_last_order(channels):
    seen = []

    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(channels, 4, 3)

        def forward(self, x):
            seen.append((x.detach(), self.convolution(x).detach()))
            return seen[-1][1]

    network, inputs = Probe(), torch.randn(2, channels, 5, 6)
    forward(network, {n: p[None] for n, p in network.named_parameters()}, inputs)
    images, hidden = seen[0]
    torch.testing.assert_close(images, inputs, rtol=0, atol=0)
    assert images.stride() == (5 * 6 * channels, 1, 6 * channels, channels)
    assert hidden.is_contiguous(memory_format=torch.channels_last)


def test_active_dropout_masks_are_never_stacked_away():
    network, stacked, inputs = case(lambda: networks.mlp(6, 3, (8, 7), dropout=0.5), 4)
    without = forward(network, stacked, inputs, "stacked")
    with networks.dropout_masks(network, torch.Generator().manual_seed(0), shared=False):
        dropped = forward(network, stacked, inputs)
        with pytest.raises(ValueError, match="stacked"):
            forward(network, stacked, inputs, "stacked")
    with networks.dropout_masks(network, torch.Generator().manual_seed(0), shared=False):
        torch.testing.assert_close(dropped, plain(network, stacked, inputs))
    assert (dropped != without).any(-1).any(-1).all()
    torch.testing.assert_close(forward(network, stacked, inputs), without)


# -------------------------------------------------------------------------------------- reparametrisation


def draws(shape, num_samples, dtype=torch.float64):
    torch.manual_seed(0)
    mean, scale = torch.randn(shape, dtype=dtype), torch.rand(shape, dtype=dtype)
    noise = torch.randn(num_samples, *shape, dtype=dtype)
    return mean.requires_grad_(), scale.requires_grad_(), noise


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize("shape", [(), (7,), (3, 2), (weights._LARGE_TENSOR // 100, 101)])
def test_reparametrised_draws_and_gradients_are_autograds(shape, num_samples):
    mean, scale, noise = draws(shape, num_samples)
    cotangent = torch.randn(noise.shape, dtype=noise.dtype)
    ours, theirs = reparametrise(mean, scale, noise), mean + scale * noise
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(ours, (mean, scale), cotangent),
        torch.autograd.grad(theirs, (mean, scale), cotangent),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_reparametrisation_passes_gradcheck_twice(monkeypatch, num_samples):
    monkeypatch.setattr(weights, "_LARGE_TENSOR", 0)
    mean, scale, noise = draws((3, 2), num_samples)
    assert torch.autograd.gradcheck(lambda m, s: reparametrise(m, s, noise), (mean, scale))
    assert torch.autograd.gradgradcheck(lambda m, s: reparametrise(m, s, noise).square(), (mean, scale))


def test_gradient_of_several_samples_is_the_mean_of_their_gradients(monkeypatch):
    monkeypatch.setattr(weights, "_LARGE_TENSOR", 0)
    mean, scale, noise = draws((4, 3), 5)

    def gradient(part):
        loss = reparametrise(mean, scale, part).sin().flatten(1).sum(1).mean()
        return torch.autograd.grad(loss, (mean, scale))

    singles = [gradient(noise[s : s + 1]) for s in range(5)]
    for i, ours in enumerate(gradient(noise)):
        expected = torch.stack([g[i] for g in singles]).mean(0)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_reparametrisation_under_vmap(monkeypatch):
    monkeypatch.setattr(weights, "_LARGE_TENSOR", 0)
    mean, scale, noise = draws((4, 3), 2)
    loss = torch.func.grad(lambda m, s, e: reparametrise(m, s, e).sin().sum(), argnums=(0, 1))
    many = [torch.stack([t.detach(), 2 * t.detach()]) for t in (mean, scale, noise)]
    for i, (m, s, e) in enumerate(zip(*many, strict=True)):
        for ours, single in zip(torch.vmap(loss)(*many), loss(m, s, e), strict=True):
            torch.testing.assert_close(ours[i], single)


# ------------------------------------------------------------------------------------------ flat vectors


def test_ravel_and_unravel_are_inverse_and_keep_the_order():
    like = {"b": torch.zeros(2), "a": torch.zeros(2, 3), "scalar": torch.zeros(())}
    vectors = torch.arange(18.0).view(2, 9)
    stacked = unravel(vectors, like)
    assert list(stacked) == ["b", "a", "scalar"]
    assert {n: tuple(w.shape) for n, w in stacked.items()} == {"b": (2, 2), "a": (2, 2, 3), "scalar": (2,)}
    torch.testing.assert_close(stacked["b"][0], torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(stacked["a"][1], torch.tensor([[11.0, 12.0, 13.0], [14.0, 15.0, 16.0]]))
    torch.testing.assert_close(stacked["scalar"], torch.tensor([8.0, 17.0]))
    torch.testing.assert_close(ravel({n: w.view(2, *like[n].shape) for n, w in stacked.items()}), vectors)


def test_ravel_of_a_networks_weights_is_torchs_own_vector():
    network = networks.lenet()
    expected = nn.utils.parameters_to_vector(network.parameters())
    torch.testing.assert_close(ravel({n: p[None] for n, p in network.named_parameters()})[0], expected)


@pytest.mark.parametrize("size", [8, 10])
def test_unravel_refuses_a_wrong_length(size):
    like = {"a": torch.zeros(2, 3), "b": torch.zeros(3)}
    with pytest.raises(ValueError, match=f"vectors have {size} entries, the weights 9"):
        unravel(torch.zeros(1, size), like)


# ------------------------------------------------------------------------------------------- prediction


def draw_for(network, counts=None):
    """Normal draws for a network; notes how many were asked for at a time."""

    def draw(n, generator):
        if counts is not None:
            counts.append(n)
        return {
            name: torch.randn(n, *p.shape, generator=generator, dtype=p.dtype)
            for name, p in network.named_parameters()
        }

    return draw


@pytest.mark.parametrize("make", [small_mlp, wide_cnn, Skip])
def test_sampled_outputs_do_not_depend_on_the_split_of_the_inputs(monkeypatch, make):
    network, _, inputs = case(make, 1, batch=23)
    size = sum(p.numel() for p in network.parameters())
    monkeypatch.setattr(weights, "_CHUNK", 3 * size)
    generator = torch.Generator().manual_seed(4)
    drawn = [draw_for(network)(n, generator) for n in (3, 3, 1)]
    expected = plain(network, {k: torch.cat([d[k] for d in drawn]) for k in drawn[0]}, inputs)
    for block, split in itertools.product((4, 23, 250), (1, 10, 23)):
        monkeypatch.setattr(weights, "_CPU_BLOCK", block)
        parts = [
            sampled_outputs(network, draw_for(network), part, 7, torch.Generator().manual_seed(4))
            for part in inputs.split(split)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-12, atol=1e-12)


def test_weights_are_drawn_once_per_chunk_and_chunks_are_bounded(monkeypatch):
    network, _, inputs = case(small_mlp, 1, batch=23)
    size = sum(p.numel() for p in network.parameters())
    monkeypatch.setattr(weights, "_CPU_BLOCK", 5)
    for budget, expected in (
        (3 * size, [3, 3, 2]),
        (3 * size - 1, [2, 2, 2, 2]),
        (1, [1] * 8),
        (99 * size, [8]),
    ):
        monkeypatch.setattr(weights, "_CHUNK", budget)
        counts = []
        sampled_outputs(network, draw_for(network, counts), inputs, 8, torch.Generator())
        assert counts == expected


def test_no_block_is_larger_than_asked(monkeypatch):
    network, _, inputs = case(wide_cnn, 1, batch=23)
    rows = []
    monkeypatch.setattr(weights, "_CPU_BLOCK", 10)

    def counting(stacked, block):
        rows.append(len(block))
        return weights.forward(network, stacked, block)

    sampled_outputs(network, draw_for(network), inputs, 2, torch.Generator(), counting)
    assert rows == [10, 10, 3]


def test_sampled_outputs_carry_no_gradient():
    network, stacked, inputs = case(small_mlp, 1)
    outputs = sampled_outputs(network, lambda n, g: stacked, inputs, 1, torch.Generator())
    assert not outputs.requires_grad


# ---- the network's first-order expansion


class NoWayBack(torch.autograd.Function):
    """The identity, through which nobody may derive."""

    @staticmethod
    def forward(ctx, x):
        """Inputs as they are."""
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Never to be called."""
        raise AssertionError("derived by weights that no draw moves")


def drawn(network, moved):
    """Three draws in float64, which differ from the mode in the named weights alone."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: p.detach() + (name in moved) * torch.randn(3, *p.shape, generator=generator, dtype=p.dtype)
        for name, p in network.named_parameters()
    }


@pytest.mark.parametrize("moved", [("0.weight", "0.bias", "2.weight", "2.bias"), ("0.bias", "2.weight"), ()])
def test_linearised_is_the_derivative_along_the_draws(moved):
    """Against the Jacobian itself; the network under the draws, as the control, is another function."""
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs, mode = torch.randn(4, 6, dtype=torch.float64), dict(network.named_parameters())
    draws = drawn(network, moved)
    found = linearised(network, draws, inputs)
    slopes = jacrev(lambda w: functional_call(network, w, (inputs,)))(mode)  # [B, 3, *shape] each
    for s, outputs in enumerate(found):
        along = sum(slopes[n].flatten(2) @ (draws[n][s] - p).flatten() for n, p in mode.items())
        torch.testing.assert_close(outputs, (network(inputs) + along).detach(), rtol=1e-12, atol=1e-12)
    assert torch.allclose(found, forward(network, draws, inputs)) == (not moved)


def test_linearised_derives_by_no_weights_that_stay():
    """In the last layer alone the expansion is exact, and nothing before it is derived by."""
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    network[1].forward = lambda x: NoWayBack.apply(x.tanh())
    inputs, last = torch.randn(4, 6, dtype=torch.float64), ("2.weight", "2.bias")
    torch.testing.assert_close(
        linearised(network, drawn(network, last), inputs), forward(network, drawn(network, last), inputs)
    )
    with pytest.raises(AssertionError, match="that no draw moves"):
        linearised(network, drawn(network, ("0.weight", *last)), inputs)

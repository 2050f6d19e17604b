"""text_adapters: adapters that add nothing leave the encoder as it is, others are a dense matrix.

The encoder is that of tests/test_bert.py, whose layers are held to torch's own there.
"""

import math
from dataclasses import replace

import pytest
import torch
from test_bert import TEXTS, write_bert
from toys import Recorder

from bench import bert
from bench.contract import Budget
from bench.engine.engine import Engine, TrainerOptions
from bench.errors import UsageError
from bench.families import curvature
from bench.laws.truth import small_topics
from bench.networks import dropout_masks
from bench.runs import registry
from bench.studies import texts, topics
from bench.studies.adapters import Adapted, Reader
from bench.system import places
from bench.tasks.text_adapters import PRIOR_STD, Settings, TextAdapters

LENGTH = 12


@pytest.fixture
def encoder(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")
    return bert.opened(write_bert(tmp_path / "encoder"))


@pytest.fixture
def task(monkeypatch):
    """On made-up texts and layers."""
    monkeypatch.setattr(topics, "load", small_topics)
    return TextAdapters(Settings(dataset="news_and_wordnet", tokens=5, rank=2, epochs=3, test_samples=3))


def states(encoder, upper):
    """Hidden states `[N, L, H]` below the last layers, as `Encoder.states` has them but for rounding."""
    found = torch.zeros(len(TEXTS), LENGTH, encoder.width)
    for row, text in enumerate(TEXTS):
        tokens = torch.tensor([encoder.tokens(text)])
        found[row, : tokens.shape[1]] = encoder._hidden(tokens, 2 - upper)[0]
    return found


def adapted(layers, seed=0, **named):
    """A reader in float64 all of whose adapters add something."""
    torch.manual_seed(seed)
    reader = Reader(layers, 3, 2, 4.0, **named).double()
    for module in reader.modules():
        if isinstance(module, Adapted):
            torch.nn.init.normal_(module.up.weight, std=0.3)
    return reader


@pytest.mark.parametrize("upper", [1, 2])
def test_adapters_at_their_start_leave_the_encoder_as_it_is(upper, encoder):
    """Vectors are those of bench/bert.py, to float32's rounding; a head of rows of I gives their numbers.

    Negative controls: adapters that add something, and a text whose padding is no zeros, have others.
    """
    inputs, expected = states(encoder, upper), torch.from_numpy(encoder.vectors(TEXTS))
    reader = Reader(encoder.upper(upper), 3, 2, 4.0)
    torch.testing.assert_close(reader.vectors(inputs), expected, atol=2e-6, rtol=0)
    torch.nn.init.eye_(reader.head.weight)
    length = math.sqrt(encoder.width)
    torch.testing.assert_close(reader(inputs), length * expected[:, :3], atol=1e-5, rtol=0)
    kept = torch.from_numpy(encoder.states(TEXTS, upper, LENGTH))
    torch.testing.assert_close(kept, inputs, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(reader.vectors(kept), expected, atol=5e-3, rtol=0)
    cheat = adapted(encoder.upper(upper))
    assert (cheat.vectors(inputs.double()) - expected).abs().max() > 0.01
    assert (reader.vectors(inputs + 1e-3) - expected).abs().max() > 0.01


def test_an_adapter_is_the_dense_matrix_that_it_stands_for(encoder):
    """W + (alpha / r) B A in the frozen layer and no adapter give the same logits, in float64.

    Negative control: the sum without the factor alpha / r, here 2, gives others.
    """
    layers, inputs = encoder.upper(2), states(encoder, 2).double()
    reader = adapted(layers)

    def merged(factor):
        weights = [dict(layer) for layer in layers.weights]
        for layer, own in zip(reader.layers, weights, strict=True):
            for name in ("query", "value"):
                part, at = getattr(layer, name), f"attention.self.{name}.weight"
                own[at] = part.weight + factor * part.up.weight @ part.down.weight
        torch.manual_seed(0)  # the same head
        plain = Reader(layers._replace(weights=weights), 3, 2, 4.0).double()
        plain.head.load_state_dict(reader.head.state_dict())
        return plain(inputs)

    torch.testing.assert_close(merged(2.0), reader(inputs), atol=1e-12, rtol=0)
    assert (merged(1.0) - reader(inputs)).abs().max() > 0.01


def test_padding_adds_nothing(encoder):
    """A text alone and without padding has the logits that it has beside longer ones."""
    reader, inputs = adapted(encoder.upper(2)), states(encoder, 2).double()
    together = reader(inputs)
    for row, text in enumerate(TEXTS):
        alone = reader(inputs[row : row + 1, : len(encoder.tokens(text))])
        torch.testing.assert_close(alone[0], together[row], atol=1e-12, rtol=0)
    assert reader(torch.zeros_like(inputs)).isfinite().all()


def test_states_are_kept_and_layers_that_are_not_there_refused(encoder, tmp_path, monkeypatch):
    """A second call computes none, in whatever order; another cut does; long texts end in [SEP]."""
    found = [f"good {'bad ' * i}{j}" for i in range(4) for j in range(10)]
    first = encoder.states(found, 1, 5)
    for row, text in enumerate(found):
        tokens = encoder.tokens(text, 5)
        assert tokens[-1] == encoder.tokens("")[-1]
        assert len(tokens) == min(5, len(encoder.tokens(text)))
        assert [bool(state.any()) for state in first[row]] == [i < len(tokens) for i in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "_hidden", lambda *_: pytest.fail("computed again"))
        assert (encoder.states(found[::-1], 1, 5)[::-1] == first).all()
    assert abs(encoder.states(found, 2, 5) - first).max() > 0.1
    assert len(list((tmp_path / "cache" / "texts").iterdir())) == 2
    for call in (lambda: encoder.states(found, 3, 5), lambda: encoder.upper(3)):
        with pytest.raises(UsageError, match="has 2 layers, and 3 are asked for") as caught:
            call()
        assert "\n" not in str(caught.value)


def fit(name, problem):
    """Three epochs of a method under its own settings."""
    method = registry.method(name)
    own = registry.build(method.cls.settings_class, dict(method.fixed), "method")
    engine = Engine(method.cls, own, 0, trainer=TrainerOptions(accelerator="cpu"))
    engine.stage("fit")
    return engine.fit(problem, Budget(3, 16))


def all_of_it(make):
    """A network in which nothing is frozen."""

    def made(dropout=0.0):
        network = make(dropout=dropout)
        for module in network.modules():
            for name, buffer in [*module.named_buffers(recurse=False)]:
                delattr(module, name)
                module.register_parameter(name, torch.nn.Parameter(buffer.clone()))
        return network

    return made


def test_no_fit_moves_a_frozen_weight_and_no_posterior_is_of_one(task):
    """Weights are A, B and the head; checkpoints hold no others.

    Negative control: of a network in which nothing is frozen they are more, and the pretrained ones move.
    """
    problem = task.problem()
    network = problem.network()
    parts = [f"{of}.{ab}.weight" for of in ("query", "value") for ab in ("down", "up")]
    names = [*(f"layers.{i}.{part}" for i in (0, 1) for part in parts), "head.weight", "head.bias"]
    assert [name for name, _ in network.named_parameters()] == names
    before = dict(network.named_buffers())
    assert len(before) == 32
    for name in ("map", "mfvi", "laplace"):
        fitted = fit(name, problem)
        after = dict(fitted.network.named_buffers())
        assert all(torch.equal(after[path], before[path]) for path in before)
        assert all(weight.any() for weight in fitted.network.parameters())
        assert not any(path.endswith("key.weight") for path in fitted.state_dict())
        if name != "map":
            assert [*fitted.moments()[0]] == names
    cheat = dict(fit("map", replace(problem, network=all_of_it(problem.network))).network.named_parameters())
    assert cheat.keys() == {*names, *before}
    assert not any(torch.equal(cheat[path], before[path]) for path in before if path.endswith("value.weight"))


def test_curvature_and_dropout_know_the_adapters(task):
    """Kronecker factors, one per A, B and head, as Yang et al. 2024 have them; dropout on what A reads."""
    problem = task.problem()
    network, names = problem.network(), [name for name, _ in problem.network().named_parameters()]
    inputs = problem.train.tensors[0][:4]
    layers = curvature.plain_layers(network, names, inputs)
    assert layers is not None
    assert len(layers) == 9
    dropped = adapted(task.topics.upper(1), dropout=0.5)
    plain = dropped(inputs.double())
    with dropout_masks(dropped, torch.Generator().manual_seed(0), False):
        assert (dropped(inputs.double()) - plain).abs().max() > 1e-3
    torch.testing.assert_close(dropped(inputs.double()), plain)


def test_the_prior_is_as_large_as_the_file_says():
    """4,000 draws of logits at a vector of mean square 1; 147,456 entries of one update; 10 standard errors.

    The entries of an update share rows and columns: their variance has about the error of 384 of them.
    """
    draw, own = torch.Generator().manual_seed(0), Settings(dataset="news_and_wordnet")
    vector = torch.nn.functional.normalize(torch.randn(384, generator=draw), dim=0) * math.sqrt(384)
    logits = PRIOR_STD * (torch.randn(4000, 384, generator=draw) @ vector + torch.randn(4000, generator=draw))
    assert logits.var().item() == pytest.approx(3.85, rel=10 * math.sqrt(2 / 4000))
    up, down = (PRIOR_STD * torch.randn(384, own.rank, generator=draw) for _ in "BA")
    update = own.alpha / own.rank * up @ down.T
    assert update.std().item() == pytest.approx(0.0566, rel=10 * math.sqrt(2 / 384) / 2)


def test_the_protocol_is_that_of_text_topics(task):
    """Parts, labels and layouts; the network gets what lies below its layers."""
    recorder = Recorder()
    (arrays, targets) = task.run(recorder), task.targets()
    (problem,), (budget,), (inputs,) = recorder.problems, recorder.budgets, recorder.inputs
    assert (problem.num_train, budget.epochs, budget.batch_size) == (20, 3, 16)
    assert problem.train.tensors[0].shape == (20, 5, 8)
    sizes = [len(task.texts(part)[0]) for part in ("val", *texts.GROUPS)]
    assert inputs.shape == (sum(sizes), 5, 8)
    found = arrays | task.given() | targets
    assert found.keys() == task.layouts().keys()

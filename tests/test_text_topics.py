"""Topics of texts: who is trained on, which texts a score is of, and what perfect and blind ones get."""

import math

import numpy as np
import pytest
import torch
from toys import Recorder

from bench import networks
from bench.laws.truth import small_topics
from bench.predictions import Categorical
from bench.spec import Undefined, misfit
from bench.studies import topics
from bench.studies.texts import CLASSES, GROUPS, NEW_OF
from bench.tasks.text_topics import Settings, TextTopics


class Reads(Recorder):
    """Predicts by the vectors alone, and draws differ."""

    def predict(self, method, inputs, num_samples):
        """Logits are the first numbers of a vector, under a temperature for each draw."""
        self.inputs.append(inputs)
        tempers = torch.arange(1, 1 + num_samples)[:, None, None]
        return Categorical((inputs[:, :CLASSES] / tempers).log_softmax(-1))


@pytest.fixture
def done(monkeypatch):
    """A task on made-up texts, its arrays with targets, and what its engine was asked."""
    monkeypatch.setattr(topics, "load", small_topics)
    task, reads = TextTopics(Settings(dataset="news_and_wordnet", epochs=7, test_samples=3)), Reads()
    return task, task.run(reads) | task.given() | task.targets(), reads


def test_parts_of_the_news_share_no_text_and_the_fit_sees_known_topics_alone(done):
    """Of 60 texts 30 are the clean test, 10 validate and 20 are trained on, the same in every run."""
    task, _, reads = done
    parts = {part: task.texts(part)[0] for part in ("clean", "val", "train")}
    assert {part: len(texts) for part, texts in parts.items()} == {"clean": 30, "val": 10, "train": 20}
    assert len({text for texts in parts.values() for text in texts}) == 60
    assert all(text.split()[0] in topics.KNOWN for texts in parts.values() for text in texts)
    (problem,), (budget,) = reads.problems, reads.budgets
    assert (problem.num_train, budget.epochs, budget.batch_size) == (20, 7, 64)
    torch.testing.assert_close(problem.train.tensors[0], task.own_data("train")[0])
    for part in ("train", "val", "shifted", "clean"):
        texts, labels = task.texts(part)
        assert [topics.KNOWN[label] for label in labels] == [text.split()[0] for text in texts]
    for part in ("new", "new_clean"):
        texts, labels = task.texts(part)
        assert not {text.split()[0] for text in texts} & set(topics.KNOWN)
        assert set(labels.tolist()) == {CLASSES}
        assert all(GROUPS[part] in text for text in texts)


def test_arrays_are_of_the_texts_in_their_order(done):
    """The first prediction is of the validation texts; negative control: other groups fit no layout."""
    task, arrays, reads = done
    assert misfit(task.layouts(), {k: (a.dtype.name, a.shape) for k, a in arrays.items()}) is None
    assert sum(array.nbytes for array in arrays.values()) < 10_000
    (inputs,) = reads.inputs
    at = len(task.texts("val")[0])
    for group in GROUPS:
        own = task.own_data(group)[0]
        torch.testing.assert_close(inputs[at : at + len(own)], own)
        at += len(own)
        name = "log_probs" if group == "shifted" else f"{group}_log_probs"
        tempers = torch.arange(1, 4)[:, None, None]
        expected = (own[:, :CLASSES] / tempers).softmax(-1).mean(0).log()
        np.testing.assert_allclose(arrays[name], expected, atol=2e-3)
    assert at == len(inputs)
    swapped = arrays | {"labels": arrays["clean_labels"]}
    assert misfit(task.layouts(), {k: (a.dtype.name, a.shape) for k, a in swapped.items()}) is not None


def made(arrays, group, log_probs):
    """The arrays with other predictions of a group."""
    name = "log_probs" if group == "shifted" else f"{group}_log_probs"
    return arrays | {name: log_probs.astype(np.float16)}


def test_scores_are_those_by_hand(done):
    """Uniform predictions: NLL log 4. Right ones of probability 0.9: NLL -log 0.9, ECE 0.1."""
    task, arrays, _ = done
    uniform = made(arrays, "shifted", np.full(arrays["log_probs"].shape, -math.log(CLASSES)))
    labels = arrays["clean_labels"]
    right = np.full((len(labels), CLASSES), math.log(0.1 / (CLASSES - 1)))
    right[np.arange(len(labels)), labels] = math.log(0.9)
    scores = task.score(made(uniform, "clean", right))
    assert scores["nll"] == pytest.approx(math.log(CLASSES), rel=1e-3)
    assert scores["nll_clean"] == pytest.approx(-math.log(0.9), rel=1e-2)
    assert (scores["accuracy"], scores["accuracy_clean"]) == (0.25, 1.0)
    assert scores["ece_clean"] == pytest.approx(0.1, abs=1e-3)
    assert task.losses(uniform).mean() == pytest.approx(scores["nll"])
    other = made(uniform, "clean", np.full(right.shape, -math.log(CLASSES)))
    assert task.score(other)["nll"] == scores["nll"]  # negative control: of the definitions alone


@pytest.mark.parametrize(("group", "new"), NEW_OF.items())
def test_new_topics_are_told_from_known_ones_of_their_own_source(group, new, done):
    """Who is unsure of new topics alone has area 1, who is sure of them alone 0."""
    task, arrays, _ = done
    before = task.score(arrays)
    flat, sharp = np.full(CLASSES, -math.log(CLASSES)), np.log([0.97, 0.01, 0.01, 0.01])

    def told(known, unknown):
        sizes = {of: len(task.texts(of)[0]) for of in (group, new)}
        found = made(arrays, group, np.tile(known, (sizes[group], 1)))
        return task.score(made(found, new, np.tile(unknown, (sizes[new], 1))))

    knows, blind, inverse = told(sharp, flat), told(flat, flat), told(flat, sharp)
    for name in ("entropy", "confidence"):
        areas = [scores[f"auroc_{new}_{name}"] for scores in (knows, blind, inverse)]
        assert areas == [1.0, 0.5, 0.0]
    (other,) = set(NEW_OF.values()) - {new}
    assert knows[f"auroc_{other}_entropy"] == before[f"auroc_{other}_entropy"]
    assert knows[f"auroc_{new}_words"] == before[f"auroc_{new}_words"]


def test_information_of_one_draw_is_undefined_and_says_why(done):
    task, arrays, _ = done
    none = {name: np.zeros_like(array) for name, array in arrays.items() if name.endswith("information")}
    scores = task.score(arrays | none)
    for new in NEW_OF.values():
        assert isinstance(scores[f"auroc_{new}_information"], Undefined)


def test_a_hidden_unit_has_variance_two_under_the_prior():
    """The reason why vectors are not standardised: 4,000 prior draws, 10 standard errors of a variance."""
    draw = torch.Generator().manual_seed(0)
    vector = torch.nn.functional.normalize(torch.randn(384, generator=draw), dim=0)
    layer = networks.mlp(384, CLASSES, (4000,))[1]
    for parameter in layer.parameters():
        parameter.data.normal_(generator=draw)
    assert layer(vector).var().item() == pytest.approx(2, abs=10 * 2 * (2 / 4000) ** 0.5)

"""`bench check` holds methods and tasks of one's own to the laws: each broken one fails the right law.

That each law catches what breaks it, and passes what does not, is tested in `tests/conformance`.
"""

import re

import pages
import pytest

from bench import cli
from bench.laws import checking, methods
from bench.runs import registry

HEAD = "import torch\nfrom bench.methods.mfvi import MFVI\n\n\n"
BROKEN = {
    "IgnoresTheSeed": (
        "def predict(self, inputs, num_samples, generator):\n"
        "        return super().predict(inputs, num_samples, torch.Generator().manual_seed(0))\n",
        "prediction_follows_its_generator",
        "another generator gives the same samples",
    ),
    "RepeatsItsDraw": (
        "def sample_weights(self, num_samples, generator):\n"
        "        draws = super().sample_weights(1, generator)\n"
        "        return {n: w.repeat(num_samples, *[1] * (w.ndim - 1)) for n, w in draws.items()}\n",
        "predictions_are_valid",
        "all samples are the same",
    ),
    "DropsARow": (
        "def predict(self, inputs, num_samples, generator):\n"
        "        return super().predict(inputs[1:], num_samples, generator)\n",
        "predictions_are_valid",
        "asked for 1 samples of 12 inputs, predicts (1, 11)",
    ),
    "Forgets": (
        "steps = 0\n\n"
        "    def loss_terms(self, batch, noise):\n"
        "        self.steps += 1\n"
        "        likelihood_term, prior_term = super().loss_terms(batch, noise)\n"
        "        return likelihood_term * (1 + self.steps / 100), prior_term\n",
        "stopped_fit_goes_on",
        "stopped and resumed",
    ),
    "HasADefect": (
        "def sample_weights(self, num_samples, generator):\n        return self.no_such_thing\n",
        "weight_samples_have_shape",
        "AttributeError: 'HasADefect' object has no attribute 'no_such_thing' (own.py, line 7)",
    ),
}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes a package with one file outside the repository; gives names in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_own", {})

    def write(package, text):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "own.py").write_text(text)
        return f"{package}.own"

    return write


def few(monkeypatch, *names):
    """Leaves these laws of methods alone, and none of what they declare."""
    monkeypatch.setattr(checking.statements, "hold", lambda case: "declares none")
    monkeypatch.setattr(checking, "LAWS", {name: methods.LAWS[name] for name in names})


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_method_of_ones_own_fails_the_right_law(name, mine, monkeypatch, capsys):
    """A sound law beside it, and the exit code is 1; of a defect the line says where it lies."""
    body, law, said = BROKEN[name]
    module = mine(f"of_{name.lower()}", f"{HEAD}class {name}(MFVI):\n    {body}")
    few(monkeypatch, law, "settings_survive_json")
    assert cli.main(["check", f"{module}:{name}"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(f"failed {law.replace('_', ' ')}: on \\w+: .*{re.escape(said)}", out), out
    assert "ok settings survive json" in out
    assert out.endswith("2 ok, 1 failed, 1 not applicable")


def test_a_sound_method_passes_and_what_does_not_concern_it_is_said(mine, monkeypatch, capsys):
    """One line a law, the exit code 0."""
    module = mine("sound", f"{HEAD}class Sound(MFVI):\n    pass\n")
    few(monkeypatch, "settings_survive_json", "parameters_are_counted")
    assert cli.main(["check", f"{module}:Sound"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 5
    assert out[0] == "ok              infers something"
    assert out[1] == "not applicable  what it declares holds: declares none"
    assert out[-1] == "3 ok, 0 failed, 1 not applicable"


DECLARED = {
    "Cold": (
        "standard_noise(self):\n        return super().standard_noise() / 2",
        "the mean of z0 z0 is 0.",
    ),
    "Mine": (
        "declares = 'right'",
        "Mine declares 'right': set `declares` to one of",
    ),
    "Unsaid": ("declares = None", 'Unsaid declares nothing: set `declares` to one of "exact", "exact in'),
    "Modest": ("declares = 'none'", "not applicable what it declares holds: declares none"),
}
"""What a sampler of one's own changes in `sgld`, and what the law of its declaration says."""


@pytest.mark.parametrize("name", DECLARED)
def test_what_a_method_of_ones_own_declares_is_held(name, mine, monkeypatch, capsys):
    """The closed list stands in the line that refuses another statement, or none."""
    body, said = DECLARED[name]
    body = f"def {body}" if name == "Cold" else body
    text = f"from bench.methods.sgld import SGLD\n\n\nclass {name}(SGLD):\n    {body}\n"
    monkeypatch.setattr(checking, "LAWS", {})
    assert cli.main(["check", f"{mine(f'declares_{name.lower()}', text)}:{name}"]) == (name != "Modest")
    out = " ".join(capsys.readouterr().out.split())
    assert said in out, out


def test_every_law_is_held_and_none_twice():
    """Of methods, all of `bench.laws.methods`; of tasks, the law of truth too."""
    names = checking.names_of(registry.method("mfvi"))
    assert len(set(names)) == len(names) > 30
    assert {"seed_decides", "stopped_fit_goes_on", "density_integrates_to_one"} <= set(names)
    assert "held_out_truth_is_only_scored" in checking.names_of(registry.task("split_digits"))


@pytest.mark.slow
def test_the_task_of_the_page_is_sound_and_fails_where_it_trains_on_the_test_set(mine, capsys):
    """The task of docs/adding-a-task.md, outside the repository; and the same with one line changed."""
    (sound,) = [b.text for b in pages.blocks("adding-a-task.md") if b.file == "tasks/two_moons.py"]
    honest = 'TensorDataset(*self.own_data("train"))'
    both = 'map(torch.cat, zip(self.own_data("train"), self.own_data("test"), strict=True))'
    assert sound.count(honest) == 1
    cheat = sound.replace(honest, f"TensorDataset(*{both})")
    assert cli.main(["check", f"{mine('moons', sound)}:TwoMoons"]) == 0, capsys.readouterr().out
    assert cli.main(["check", f"{mine('cheating', cheat)}:TwoMoons"]) == 1
    out = capsys.readouterr().out
    assert "failed          held out truth is only scored: held-out truth reaches what is given to fit" in out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mfvii", "unknown method or task 'mfvii': did you mean mfvi"),
        ("no.such:Thing", "cannot import 'no.such:Thing'"),
        ("torch:Tensor", "'torch:Tensor' is no Method and no Task"),
    ],
)
def test_names_that_are_nothing_are_refused_in_one_line(name, said, capsys):
    assert cli.main(["check", name]) == 2
    assert said in capsys.readouterr().err


def test_a_law_on_data_that_are_not_there_is_not_applicable():
    """It is neither held nor broken."""

    def held():
        raise checking.DataError("mnist not found")

    answer = checking._answer("some_law", registry.task("split_digits"), held)
    assert (answer.outcome, answer.why) == ("not applicable", "mnist not found")

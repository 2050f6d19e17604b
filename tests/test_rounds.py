"""Rounds with hidden labels: the whole way by the commands of the page, and what a cheat would change."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from bench import cli, corruptions, randomness
from bench.data import load
from bench.errors import BenchError, UsageError
from bench.leaderboard.check.codes import Rejected
from bench.leaderboard.rank import rounds
from bench.predictions import Bernoulli
from bench.studies.small import NOISE, sine
from bench.tasks import retinopathy, toy_regression

PAGE = (Path(__file__).parent.parent / "docs" / "leaderboard.md").read_text()
BLOCK = re.search(r"```sh\n(.*?)```", PAGE[PAGE.index("## Rounds with hidden labels") :], re.DOTALL)[1]
ROUND, SECRET, SLUG = "points-1", "points-1.secret", "my-methods"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder in which the commands of the page were given, each state kept; what the last two printed."""
    folder = tmp_path_factory.mktemp("rounds")
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(toy_regression.ToyRegression, "figures", lambda *_: {})
        for line in BLOCK.splitlines():
            command, *arguments = shlex.split(line, comments=True)
            assert command == "bench"
            if arguments[:2] == ["round", "close"]:
                shutil.copytree(folder / ROUND, folder / "open")
            with open(folder / "out", "w") as out, pytest.MonkeyPatch.context() as own:
                own.setattr("sys.stdout", out)
                assert cli.main(arguments) == 0, line
            said[" ".join(arguments[:2])] = (folder / "out").read_text()
    return folder, said


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of it, to be changed."""
    shutil.copytree(whole[0], tmp_path / "copy")
    return tmp_path / "copy"


def checked(folder, name=ROUND):
    return rounds.check(rounds.opened(folder / name))


def test_round_is_opened_predicted_closed_and_ranked_by_the_commands_of_the_page(whole):
    folder, said = whole
    closed = json.loads((folder / ROUND / "closed.json").read_text())
    assert [(place["name"], place["ranks"], place["seeds"]) for place in closed["places"]] == [
        ("mfvi (my-methods)", [1, 1], 3),
        ("map (my-methods)", [2, 2], 3),
    ]
    assert all(place["low"] < place["mean"] < place["high"] for place in closed["places"])
    assert said["round close"] == said["round check"]
    assert re.search(r"1 to 1 +1 +mfvi", said["round close"])
    assert checked(folder, "open") is None


def test_mean_loss_is_that_of_the_board_s_formula(whole):
    """The mean over the points of -log of the equal mixture of S normal densities, written out."""
    folder, _ = whole
    truth = safetensors.numpy.load_file(folder / ROUND / "truth.safetensors")["targets"][:, 0].astype(float)
    means = []
    for run in sorted((folder / ROUND / "entries" / SLUG).glob("*/mfvi/seed*/arrays.safetensors")):
        arrays = safetensors.numpy.load_file(run)
        variance = arrays["variances"].astype(float)
        squares = (arrays["means"].astype(float) - truth) ** 2 / variance
        logs = -0.5 * (squares + np.log(2 * np.pi * variance)) - np.log(len(squares))
        means.append(-np.logaddexp.reduce(logs, axis=0).mean())
    assert checked(folder).places[0].mean == pytest.approx(np.mean(means))


# ------------------------------------------------------------------------------------------ what is published


def test_published_inputs_hold_no_target_and_no_order(whole):
    folder, _ = whole
    opened = folder / "open"
    assert sorted(path.name for path in opened.iterdir()) == ["entries", "inputs.safetensors", "round.json"]
    content = (opened / "inputs.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header.keys() == {"inputs"}  # and no metadata
    secret = json.loads((folder / SECRET).read_text())
    said = (opened / "round.json").read_text()
    assert secret["seed"] not in said
    assert secret["nonce"] not in said
    x = safetensors.numpy.load(content)["inputs"][:, 0]
    truth = safetensors.numpy.load_file(folder / ROUND / "truth.safetensors")
    drawn_x, drawn_y = toy_regression.FreshPoints(1).draw(int(secret["seed"], 16))
    order = {float(value): place for place, value in enumerate(drawn_x["inputs"][:, 0])}
    places = np.array([order[float(value)] for value in x])
    assert np.array_equal(truth["targets"], drawn_y["targets"][places])  # inputs and truth move together
    # Spearman's correlation of 300 places with their order is N(0, 1/299): 4.5 sd fail once in 150,000.
    assert abs(np.corrcoef(places, np.arange(len(x)))[0, 1]) < 4.5 / np.sqrt(299)


def test_file_of_the_secret_is_for_its_owner_alone(whole):
    assert (whole[0] / SECRET).stat().st_mode & 0o077 == 0


def test_truth_is_that_of_the_task():
    """Residuals are N(0, NOISE^2): the loss of the true function is the entropy, 300 points, 4.5 sd."""
    fresh = toy_regression.FreshPoints(1)
    (inputs, truth), (others, _) = fresh.draw(2**255 + 1), fresh.draw(2**255 + 3)
    assert not np.array_equal(inputs["inputs"], others["inputs"])
    variance = np.full((1, 1), NOISE**2, np.float32)
    arrays = {"means": sine(inputs["inputs"]).T.astype(np.float32), "variances": variance}
    entropy = 0.5 * np.log(2 * np.pi * np.e * NOISE**2)
    losses = fresh.losses(arrays | truth)
    assert losses.shape == (300,)
    assert losses.mean() == pytest.approx(entropy, abs=4.5 * np.sqrt(0.5 / 300))
    turned = {"targets": truth["targets"][::-1]}  # the control: in another order they are not of these inputs
    assert fresh.losses(arrays | turned).mean() > 10


def test_commitment_binds_and_hides(whole):
    """Seed, truth, inputs and task each change it; and who knows seed and truth cannot try them by it."""
    folder, _ = whole
    said = rounds.opened(folder / ROUND).said
    secret = checked(folder).secret
    truth = safetensors.numpy.load_file(folder / ROUND / "truth.safetensors")
    assert rounds.commitment(said, secret, truth) == said.commitment
    other = truth["targets"].copy()
    other[7] += 1e-3
    changed = [
        (said, secret, {"targets": other}),
        (said, secret.model_copy(update={"seed": "1" * 64}), truth),
        (said, secret.model_copy(update={"nonce": "1" * 64}), truth),
        (said.model_copy(update={"inputs": "1" * 64}), secret, truth),
        (said.model_copy(update={"task": "other"}), secret, truth),
    ]
    found = {rounds.commitment(*of) for of in changed}
    assert len(found) == len(changed)
    assert said.commitment not in found


# --------------------------------------------------------------------------------- a round that was changed


def spoiled_truth(folder):
    path = folder / ROUND / "truth.safetensors"
    targets = safetensors.numpy.load_file(path)["targets"].copy()
    targets[0] += 0.1
    safetensors.numpy.save_file({"targets": targets}, path)


def in_json(name, change):
    def spoil(folder):
        path = folder / ROUND / name
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return spoil


def committed_to_other_truth(folder):
    """A maintainer who committed to labels of his own choice, and not to those that the seed draws."""
    spoiled_truth(folder)
    opened = rounds.opened(folder / ROUND)
    truth = safetensors.numpy.load_file(folder / ROUND / "truth.safetensors")
    secret = rounds._read(rounds.Closed, folder / ROUND / "closed.json").secret
    told = rounds.commitment(opened.said, secret, truth)
    in_json("round.json", lambda content: content.update(commitment=told))(folder)


def other_predictions(folder):
    path = next((folder / ROUND / "entries").rglob("map/seed1/arrays.safetensors"))
    arrays = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(arrays | {"means": arrays["means"] * 0.99}, path)


def turned(content):
    content["places"].reverse()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoiled_truth, "are not those that round.json committed to"),
        (in_json("closed.json", lambda c: c["secret"].update(seed="1" * 64)), "seed, nonce or truth"),
        (in_json("closed.json", lambda c: c["secret"].update(nonce="1" * 64)), "seed, nonce or truth"),
        (committed_to_other_truth, "the seed draws other targets"),
        (other_predictions, "map/seed1/arrays.safetensors is not as it was when the round closed"),
        (in_json("closed.json", turned), "otherwise than its predictions"),
        (in_json("closed.json", lambda c: c["places"].pop()), "has 1 entries of 2"),
        (in_json("round.json", lambda c: c["settings"].update(hidden=50)), "committed to"),
    ],
    ids=["truth", "seed", "nonce", "other draw", "predictions", "ranks", "places", "settings"],
)
def test_closed_round_that_was_changed_is_refused(folder, spoil, message):
    spoil(folder)
    with pytest.raises(BenchError, match=message):
        checked(folder)


def test_inputs_that_were_exchanged_are_not_predicted(folder):
    path = folder / "open" / "inputs.safetensors"
    inputs = safetensors.numpy.load_file(path)["inputs"]
    safetensors.numpy.save_file({"inputs": inputs + 1}, path)
    with pytest.raises(UsageError, match="its sha256 is another"):
        rounds.predict(rounds.opened(folder / "open"), [], folder / "new")


def test_nothing_enters_a_closed_round(folder):
    (folder / SLUG).rename(folder / "late")
    with pytest.raises(UsageError, match="what is handed in now counts for nothing"):
        rounds.enter(rounds.opened(folder / ROUND), folder / "late")
    shutil.copytree(folder / "late", folder / ROUND / "entries" / "late")  # past the command
    with pytest.raises(BenchError, match="late was handed in after the round had closed"):
        checked(folder)
    with pytest.raises(UsageError, match="is closed already"):
        rounds.close(rounds.opened(folder / ROUND), folder / SECRET)


def test_another_secret_closes_nothing(folder):
    other = folder / "other.secret"
    rounds.open_round("toy_regression", folder / "other", other, "smoke")
    with pytest.raises(UsageError, match="is not the secret of"):
        rounds.close(rounds.opened(folder / "open"), other)
    assert not (folder / "open" / "closed.json").exists()


# ------------------------------------------------------------------------------------------ what is handed in


def arrays_changed(change):
    def spoil(entry):
        path = next(entry.rglob("map/seed0/arrays.safetensors"))
        safetensors.numpy.save_file(change(safetensors.numpy.load_file(path)), path)

    return spoil


def record_changed(entry):
    path = next(entry.rglob("map/seed0/record.json"))
    path.write_text(path.read_text().replace('"hidden": 100', '"hidden": 101'))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda entry: None, "has the predictions of map \\(my-methods\\)"),
        (arrays_changed(lambda a: a | {"targets": a["means"]}), "there is an array 'targets'"),
        (arrays_changed(lambda a: a | {"means": a["means"][:, :-1]}), "has 299 entries, not 300"),
        (arrays_changed(lambda a: a | {"means": a["means"] * np.float32(np.nan)}), "NaN or infinity"),
        (record_changed, "of another task, version or settings"),
        (lambda entry: shutil.rmtree(next(entry.glob("*/map/seed1"))), "must be 0, 1, 2"),
        (lambda entry: (entry / "pickled.pkl").write_bytes(b"cos\nsystem\n"), "nothing else"),
    ],
    ids=["copy", "targets", "rows", "nan", "settings", "seeds", "pickle"],
)
def test_what_is_no_prediction_for_the_round_is_refused_in_one_line(folder, spoil, message):
    (folder / SLUG).rename(folder / "others")
    spoil(folder / "others")
    with pytest.raises((Rejected, UsageError), match=message) as error:
        rounds.enter(rounds.opened(folder / "open"), folder / "others")
    assert "\n" not in str(error.value)
    assert [path.name for path in (folder / "open" / "entries").iterdir()] == [SLUG]


# --------------------------------------------------------------------------------------- which tasks have one


def test_task_that_draws_no_test_inputs_has_no_round(tmp_path):
    with pytest.raises(UsageError, match="those that do: retinopathy_synthetic, toy_regression"):
        rounds.open_round("split_digits", tmp_path / "round", tmp_path / "secret")
    with pytest.raises(UsageError, match="shift_digits has no rounds"):
        rounds.open_round("shift_digits", tmp_path / "round", tmp_path / "secret")
    with pytest.raises(UsageError, match="lies in the round's directory, which is published"):
        rounds.open_round("toy_regression", tmp_path / "round", tmp_path / "round" / "secret")


def test_labels_of_corrupted_digits_are_found_by_looking():
    """Why `shift_digits` has no round: the nearest public image has the label, whatever seed corrupts."""
    digits = load("digits")
    images = (255 * digits.test_inputs.numpy()).round().astype(np.uint8)
    known = images.reshape(len(images), -1) - images.mean((1, 2, 3))[:, None]
    for kind, severity in (("gaussian_noise", 5), ("motion_blur", 3), ("fog", 3), ("pixelate", 5)):
        own = [randomness.generator(2**200 + 11, kind, number) for number in range(len(images))]
        seen = corruptions.corrupt(images, kind, severity, own).reshape(len(images), -1).astype(float)
        seen -= seen.mean(1, keepdims=True)
        alike = seen @ known.T / np.linalg.norm(known, axis=1)
        labels = digits.test_labels.numpy()
        assert (labels[alike.argmax(1)] == labels).mean() > 0.96, kind


class Unsure:
    """An engine whose every prediction is even."""

    def predict(self, method, inputs, num_samples):
        """Log-odds of 0, of photographs that are read as the engine reads them."""
        assert len(inputs) == 20
        pixels, _ = inputs.read(torch.arange(20))
        assert inputs.finish(pixels, None).shape == (20, 3, 64, 64)
        return Bernoulli(torch.zeros(num_samples, 20))


def test_eyes_of_a_round_are_drawn_anew_and_scored_as_the_task_scores(monkeypatch):
    settings = retinopathy.Settings(dataset="retinopathy_synthetic", shift="none", images=200, test_samples=2)
    task = retinopathy.Retinopathy(settings)
    monkeypatch.setattr(task, "rows", lambda part: np.arange(20), raising=False)
    vars(task)["_channels"] = torch.full((3,), 0.3), torch.full((3,), 0.2)
    fresh = task.fresh()
    secret = rounds.Secret(schema_version=1, seed="a" * 64, nonce="b" * 64)
    inputs, truth = rounds.drawn(fresh, secret)
    again, _ = rounds.drawn(fresh, secret)
    assert inputs["images"].shape == (20, 64, 64, 3)
    assert np.array_equal(inputs["images"], again["images"])
    assert np.bincount(truth["patients"]).tolist() == [2] * 10
    assert truth["patients"].tolist() != sorted(truth["patients"])  # shuffled: fails once in 10^11
    predictions = fresh.predict(Unsure(), None, inputs)
    assert predictions.keys() == fresh.layouts.keys()
    assert fresh.losses(predictions | truth) == pytest.approx(np.full(20, np.log(2)))
    for name in ("retinopathy", "retinopathy_synthetic_severity_shift"):
        fixed = retinopathy.NAMES[name]
        assert retinopathy.Retinopathy(retinopathy.Settings(**fixed)).fresh() is None

"""The synthetic fundus photographs: the same bytes every time, and a bound on what can be read from them."""

import csv
import hashlib
import json
import shutil
import threading

import numpy as np
import pytest
from PIL import Image
from scipy import integrate, stats
from sklearn.metrics import roc_auc_score

from bench import cli
from bench.errors import OutputError, UsageError
from bench.photographs import fundus
from bench.photographs import fundus_population as population
from bench.photographs.fundus_photograph import photograph
from bench.system import files, places

SETTINGS = {"images": 20, "size": 32, "seed": 3}


def digest(folder):
    """Over every file that a reader may see, names and bytes."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "made.json")
    lines = (
        f"{p.relative_to(folder).as_posix()} {hashlib.sha256(p.read_bytes()).hexdigest()}\n" for p in paths
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def rows(folder, name):
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return fundus.make(tmp_path_factory.mktemp("data") / "made", **SETTINGS, workers=1)


@pytest.fixture(scope="module")
def eyes():
    """Of 20,000 patients; tests of independent draws take the left ones alone."""
    return population.draw(np.random.default_rng(5), 20_000)


@pytest.fixture(scope="module")
def probability(eyes):
    """The ideal reader's, of the left eyes."""
    return population.positive_probability(eyes.visible[:, 0], eyes.strength[:, 0])


# ------------------------------------------------------------------------------------------------ the folder


def test_the_digest_is_that_of_the_files(made):
    assert json.loads((made / "made.json").read_bytes()) == {
        "name": "retinopathy_synthetic",
        "version": fundus.VERSION,
        **SETTINGS,
        "digest": digest(made),
    }


def test_two_workers_write_the_same_bytes(made, tmp_path):
    told = []
    folder = fundus.make(tmp_path / "two", **SETTINGS, workers=2, progress=lambda *at: told.append(at))
    assert digest(folder) == digest(made)
    assert told == [(done, 20) for done in range(2, 21, 2)]


def test_another_seed_gives_other_eyes(made, tmp_path):
    folder = fundus.make(tmp_path / "other", **SETTINGS | {"seed": 4}, workers=1)
    for name in ("trainLabels.csv", "artefacts.csv", "train/1_left.jpeg"):
        assert (folder / name).read_bytes() != (made / name).read_bytes()


class Stop(Exception):
    """What ends a process in the middle of its work."""


def test_a_stopped_one_is_finished_with_the_same_bytes(made, tmp_path):
    folder = tmp_path / "stopped"

    def stop(done, images):
        if done == 12:
            raise Stop

    with pytest.raises(Stop):
        fundus.make(folder, **SETTINGS, workers=1, progress=stop)
    assert not (folder / "made.json").exists()
    (folder / "train/1_left.jpeg").unlink()
    (folder / "train/2_left.jpeg").write_bytes((folder / "train/2_left.jpeg").read_bytes()[:-100])
    (folder / "train/3_left.jpeg").write_bytes(b"")
    files.temporary(folder / "train/1_left.jpeg").write_bytes(b"half")
    kept = (folder / "train/4_left.jpeg").stat().st_mtime_ns
    fundus.make(folder, **SETTINGS, workers=1)
    assert digest(folder) == digest(made)
    assert (folder / "train/4_left.jpeg").stat().st_mtime_ns == kept


def test_a_second_process_waits_for_the_first(made, tmp_path):
    """And takes what that one made."""
    folder = tmp_path / "shared"
    with files.locked(folder):
        shutil.copy(made / "made.json", folder / "making.json")
        second = threading.Thread(target=fundus.make, args=(folder, *SETTINGS.values(), 1))
        second.start()
        shutil.copytree(made, folder, dirs_exist_ok=True)
        (folder / "making.json").unlink()
    second.join()
    assert {path.name for path in folder.iterdir()} == {path.name for path in made.iterdir()}
    for name in ("made.json", "train/1_left.jpeg"):
        assert (folder / name).stat().st_mtime_ns == (made / name).stat().st_mtime_ns


def test_the_layout_is_kaggles(made):
    labels = {row["image"]: int(row["level"]) for row in rows(made, "trainLabels.csv")}
    solution = rows(made, "retinopathy_solution.csv")
    assert {path.stem for path in (made / "train").iterdir()} == labels.keys()
    assert {path.stem for path in (made / "test").iterdir()} == {row["image"] for row in solution}
    assert {*labels.values(), *(int(row["level"]) for row in solution)} <= set(range(5))
    assert len(labels) == 12
    assert [row["Usage"] for row in solution] == 2 * ["Public"] + 6 * ["Private"]
    for path in made.glob("t*/*.jpeg"):
        with Image.open(path) as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (32, 32))


def test_eyes_of_a_patient_are_in_one_part(made):
    parts = {}
    for row in rows(made, "artefacts.csv"):
        patient, side = row["image"].split("_")
        parts.setdefault(patient, []).append((side, row["part"]))
    assert len(parts) == 10
    for of_patient in parts.values():
        assert [side for side, _ in of_patient] == ["left", "right"]
        assert len({part for _, part in of_patient}) == 1


def test_shares_of_the_parts():
    parts = [fundus.part_of(patient, 1000) for patient in range(1, 1001)]
    assert {part: parts.count(part) for part in parts} == {"train": 600, "val": 100, "test": 300}


def test_the_table_of_artefacts_is_what_the_model_says(made):
    found = rows(made, "artefacts.csv")
    visible = np.array([[int(row[kind]) for kind in population.KINDS] for row in found])
    strength = np.array([float(row["strength"]) for row in found])
    stored = np.array([float(row["bayes_probability"]) for row in found])
    np.testing.assert_allclose(stored, population.positive_probability(visible, strength), atol=2e-6)


def test_it_is_found_where_data_are(made, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "given"))
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")
    there = tmp_path / "cache/retinopathy_synthetic-20-32-3"
    shutil.copytree(made, there)
    assert fundus.find_or_make(None, **SETTINGS) == there
    assert fundus.find_or_make(None, **SETTINGS | {"seed": 4}) == (
        tmp_path / "given/retinopathy_synthetic-20-32-4"
    )


# ---------------------------------------------------------------------------------------------- refusal lines


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"images": 21}, "--images 21: must be even"),
        ({"images": 18}, "at least 20"),
        ({"size": 31}, "--size 31: must be 32 to 2048 pixels"),
        ({"seed": -1}, "--seed -1: must not be negative"),
        ({"workers": 0}, "--workers 0: must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(change, line, tmp_path):
    with pytest.raises(UsageError, match=line):
        fundus.make(tmp_path / "none", **SETTINGS | change)
    assert not (tmp_path / "none").exists()


def test_another_set_in_the_folder_is_refused(made, tmp_path):
    line = "holds retinopathy_synthetic of size 32, seed 3, not size 64, seed 5; remove it or name another"
    with pytest.raises(UsageError, match=line):
        fundus.make(made, images=20, size=64, seed=5)
    (tmp_path / "making.json").write_text((made / "made.json").read_text())
    with pytest.raises(UsageError, match=line):
        fundus.make(tmp_path, images=20, size=64, seed=5)
    (tmp_path / "making.json").rename(tmp_path / "letter.txt")
    with pytest.raises(UsageError, match="holds other files than retinopathy_synthetic"):
        fundus.make(tmp_path, **SETTINGS)


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*file"):
        fundus.make(tmp_path / "file" / "below", **SETTINGS)


def test_the_command_makes_and_refuses(made, tmp_path, capsys):
    shutil.copytree(made, tmp_path / made_name())
    asked = [
        "data",
        "make",
        "retinopathy_synthetic",
        "--data-dir",
        str(tmp_path),
        "--size",
        "32",
        "--seed",
        "3",
    ]
    assert cli.main([*asked, "--images", "20"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == str(tmp_path / made_name())
    assert f"{population.bayes_auc()[0]:.4f} +-" in printed.err
    assert cli.main([*asked, "--images", "21"]) == UsageError.exit_code
    assert cli.main(["data", "make", "mnist"]) == UsageError.exit_code
    assert cli.main(["data", "--data-dir", "x", "make"]) == UsageError.exit_code
    lines = capsys.readouterr().err.splitlines()
    assert "must be even" in lines[0]
    assert "must be one of retinopathy_synthetic" in lines[1]
    assert "make comes first" in lines[2]


def made_name():
    return "retinopathy_synthetic-{images}-{size}-{seed}".format(**SETTINGS)


# ------------------------------------------------------------------------------------------ the model of eyes


def test_levels_have_kaggles_shares(eyes):
    """False alarm 0.001."""
    counts = np.bincount(eyes.levels[:, 0], minlength=5)
    assert stats.chisquare(counts, 20_000 * np.array(population.SHARES)).pvalue > 0.001
    assert sum(population.SHARES) == pytest.approx(1)


def test_the_eyes_of_a_patient_are_alike(eyes):
    """Fisher's transformation of the correlation; false alarm 1e-4."""
    found = np.corrcoef(eyes.severity.T)[0, 1]
    z = (np.arctanh(found) - np.arctanh(population.EYES_CORRELATION)) * np.sqrt(20_000 - 3)
    assert abs(z) < 3.9
    assert np.corrcoef(eyes.levels.T > 1)[0, 1] > 0.4


def misfit(labels, probability):
    """Standard score of the number of positive ones, if every label has its probability."""
    return (labels - probability).sum() / np.sqrt((probability * (1 - probability)).sum())


def test_the_level_follows_its_probability(eyes):
    """In five groups by severity; false alarm 5e-4 in all."""
    severity, positive = eyes.severity[:, 0], eyes.levels[:, 0] > 1
    for group in np.array_split(np.argsort(severity), 5):
        assert abs(misfit(positive[group], population.positive_given_severity(severity[group]))) < 3.9


@pytest.mark.parametrize(
    ("visible", "strength"), [((0, 0, 0), 0.9), ((1, 0, 0), 0.0), ((0, 2, 1), 0.4), ((6, 5, 9), 0.0)]
)
def test_the_ideal_readers_probability_is_bayess_rule(visible, strength):
    """Against adaptive quadrature over the severity."""

    def joint(z, positive):
        density = stats.norm.pdf(z) * (population.positive_given_severity(z) if positive else 1.0)
        for count, rate in zip(visible, population.RATES, strict=True):
            density *= stats.poisson.pmf(count, (1 - strength) * rate(np.array(z)))
        return density

    top, bottom = (
        integrate.quad(joint, -6, 6, (positive,), points=[0, 1, 2], epsabs=0, epsrel=1e-7, limit=200)[0]
        for positive in (True, False)
    )
    found = population.positive_probability(np.array(visible), np.array(strength))
    np.testing.assert_allclose(found, top / bottom, rtol=1e-5)


def test_labels_follow_the_ideal_readers_probability(eyes, probability):
    """In ten groups by strength; false alarm 1e-3 in all. A reader blind to the artefact fails."""
    positive, strength = eyes.levels[:, 0] > 1, eyes.strength[:, 0]
    groups = np.array_split(np.argsort(strength), 10)
    assert max(abs(misfit(positive[g], probability[g])) for g in groups) < 3.9
    blind = population.positive_probability(eyes.visible[:, 0], np.zeros(20_000))
    assert abs(misfit(positive[groups[-1]], blind[groups[-1]])) > 10


def test_uncertainty_rises_with_the_artefact(eyes):
    """Thinned counts tell less: the mean entropy cannot fall, and ends at that of the share of positive eyes.

    The same eyes at every strength, lesions hidden one after the other: each rise is at least five
    of its standard errors.
    """

    def entropy(p):
        return -p * np.log(p) - (1 - p) * np.log1p(-p)

    generator = np.random.default_rng(6)
    rates = np.stack([rate(eyes.severity[:5_000, 0]) for rate in population.RATES], -1)
    counts, strength = generator.poisson(rates), 0.0
    before = None
    for further in (0.0, 0.25, 0.5, 0.75, 1.0):
        counts = generator.binomial(counts, (1 - further) / max(1 - strength, 1e-9))
        strength = further
        entropies = entropy(population.positive_probability(counts, np.full(len(counts), strength)))
        if before is not None:
            rise = entropies - before
            assert rise.mean() > 5 * rise.std() / np.sqrt(len(rise))
        before = entropies
    share = sum(population.SHARES[population.REFERABLE :])
    np.testing.assert_allclose(before, entropy(np.array(share)), atol=1e-6)


def test_the_bound_leaves_room_and_is_below_the_promised_one():
    value, error = population.bayes_auc()
    assert error < 0.001
    assert 0.95 < value < 0.97 - 4 * error


def test_the_bound_is_the_auc_of_labels(eyes, probability):
    """False alarm 1e-4; shuffled labels give a half."""
    labels, scores = eyes.levels[:, 0] > 1, probability
    value, _ = population.bayes_auc()
    positive, negative = labels.sum(), (~labels).sum()
    error = np.sqrt(value * (1 - value) / min(positive, negative))  # an upper bound: Birnbaum & Klose 1957
    assert abs(roc_auc_score(labels, scores) - value) < 3.9 * error
    shuffled = np.random.default_rng(7).permutation(labels)
    error = np.sqrt((positive + negative + 1) / (12 * positive * negative))
    assert abs(roc_auc_score(shuffled, scores) - 0.5) < 3.9 * error


def test_the_expected_auc_is_the_auc_where_labels_are_known():
    generator = np.random.default_rng(8)
    scores, labels = generator.integers(6, size=200) / 5, generator.integers(2, size=200)
    assert population.expected_auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores))


# --------------------------------------------------------------------------------------------- what is drawn


def drawn(visible=(0, 0, 0), strength=0.0, camera=0, side="right", size=64, seed=1):
    return photograph(visible, strength, camera, side, size, seed).astype(float)


def test_every_lesion_changes_its_own_place_only():
    """Among many: a change is a few per cent of the area, and darker or brighter as its kind is."""
    for kind, sign in enumerate((-1, -1, 1)):
        counts = [5, 5, 5]
        fewer = drawn(counts)
        counts[kind] += 1
        change = drawn(counts) - fewer
        touched = np.abs(change).max(-1) > 12
        assert 2 <= touched.sum() < 0.05 * touched.size
        assert sign * change[touched].mean() > 0


def test_the_disc_lies_towards_the_nose():
    """Seen from before: right of the middle in a right eye, left of it in a left one."""
    for side, right in (("right", True), ("left", False)):
        for camera in (0, 1):
            blue = drawn(camera=camera, side=side)[..., 2][16:48]
            assert (blue[:, 32:].max() > blue[:, :32].max() + 20) == right


def test_the_field_is_round_and_the_corners_are_black():
    for camera in (0, 1):
        image = drawn(camera=camera)
        assert image[:6, :6].mean() < 12
        assert image[24:40, 24:40].mean() > 40


def test_an_artefact_blurs_vessels():
    """Mean difference of neighbouring pixels in the middle, over three eyes."""

    def sharpness(strength):
        images = [drawn(strength=strength, seed=seed)[12:52, 12:52] for seed in range(3)]
        return np.mean([np.abs(np.diff(image, axis=1)).mean() / image.mean() for image in images])

    assert sharpness(0.0) > 1.1 * sharpness(1.0)

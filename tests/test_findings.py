"""Verdicts on the documents' headlines: the rule by hand-made cases, and the page held to the records."""

import re
import shlex
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from bench.commands import running
from bench.errors import UsageError
from bench.intervals import Interval, student
from bench.leaderboard.evidence import entries, findings
from bench.runs.records import read_record, write_record

ROOT = Path(__file__).parent.parent
CLAIMS = findings.read(ROOT / "docs" / "findings.yaml")
PAGE = (ROOT / "docs" / "findings.md").read_text()
SOURCES = (
    *("Farquhar 2022", "Resolution of Singularities 2022", "Kurle et al. 2022", "nn4post 2017"),
    *("Osband et al. 2022", "Osband et al. 2023", "Laurent et al. 2023", "Mucsányi et al. 2024"),
    *("Jordahn et al. 2025", "Zamyatin et al. 2026", "Raha et al. 2026", "Time for Sampling 2026"),
)
EQUAL_OR_NOT = [
    {"within": 0.1},
    {"direction": "above", "margin": 0.1},
    {"direction": "below", "margin": 0.1},
]
OLD = [{"within": 0.1}, {"above": 0}, {"below": 0}]
MAP, MFVI = {"method": "map", "task": "split_digits"}, {"method": "mfvi", "task": "split_digits"}


@pytest.fixture(scope="module")
def found():
    """What the committed records say of every claim."""
    return [findings.find(claim) for claim in CLAIMS]


def claim(*terms, **fields):
    """A claim on split_digits: that the contrast is above 0, unless given otherwise."""
    if not {"above", "below", "within", "direction"} & fields.keys():
        fields["above"] = 0
    texts = {"id": "x", "claim": "x", "source": "x", "why": "x", "same": "x", "metric": "average_accuracy"}
    return findings.Claim(**texts | {"terms": terms} | fields)


def write(folder, method, values, status="completed"):
    """Writes records on split_digits, seed -> average accuracy; None is a run with that status."""
    for seed, value in values.items():
        path = entries.directory_of("split_digits", method, 0)
        record = read_record(path)
        changed = {"seed": seed, "metrics": record.metrics | {"average_accuracy": value}}
        if value is None:
            changed |= {"status": status, "reason": "x", "undefined": {"average_accuracy": "x"}}
        target = folder / "split_digits" / method / f"seed{seed}"
        target.mkdir(parents=True)
        write_record(target, record.model_copy(update=changed))


# ------------------------------------------------------------------------------------------------ the rule


@pytest.mark.parametrize(
    ("bound", "low", "high", "word"),
    [
        ({"above": 0}, 0.1, 0.3, "reproduced"),
        ({"above": 0}, -0.3, -0.1, "contradicted"),
        ({"above": 0}, -0.1, 0.3, "undecided"),
        ({"above": 0.2}, 0.1, 0.3, "undecided"),
        ({"above": 0.2}, 0.05, 0.1, "contradicted"),
        ({"below": 0.2}, 0.1, 0.15, "reproduced"),
        ({"below": 0.2}, 0.25, 0.3, "contradicted"),
        ({"within": 0.2}, -0.1, 0.1, "reproduced"),
        ({"within": 0.2}, 0.1, 0.3, "undecided"),
        ({"within": 0.2}, -0.4, -0.3, "contradicted"),
        ({"within": 0.2}, -0.3, 0.3, "undecided"),
        ({"above": 0}, 0, 0, "undecided"),
        ({"direction": "above"}, 0.1, 0.3, "direction only"),
        ({"direction": "above"}, -0.3, -0.1, "contradicted"),
        ({"direction": "above"}, -0.1, 0.3, "undecided"),
        ({"direction": "below"}, -0.3, -0.1, "direction only"),
        ({"direction": "below"}, 0.1, 0.3, "contradicted"),
        ({"direction": "above", "margin": 0.2}, 0.25, 0.3, "reproduced"),
        ({"direction": "above", "margin": 0.2}, 0.1, 0.3, "direction only"),
        ({"direction": "above", "margin": 0.2}, -0.1, 0.1, "contradicted"),
        ({"direction": "above", "margin": 0.2}, -0.1, 0.3, "undecided"),
        ({"direction": "above", "margin": 0.2}, -0.3, -0.1, "contradicted"),
        ({"direction": "below", "margin": 0.2}, -0.3, -0.25, "reproduced"),
        ({"direction": "below", "margin": 0.2}, -0.1, 0.1, "contradicted"),
        ({"direction": "below", "margin": 0.2}, -0.15, -0.05, "direction only"),
        ({"direction": "above", "margin": 0.2, "size": 2}, 0.25, 0.3, "direction only"),
        ({"direction": "above", "margin": 0.2, "size": 2}, 0.8, 1.2, "reproduced"),
        ({"direction": "above", "margin": 0.2, "size": 2}, 3.8, 5.2, "reproduced"),
        ({"direction": "above", "margin": 0.2, "size": 2}, 4.2, 5.2, "direction only"),
        ({"direction": "below", "margin": 0.2, "size": 2}, -1.2, -0.8, "reproduced"),
    ],
)
def test_an_interval_decides_where_it_lies_wholly_on_one_side(bound, low, high, word):
    assert claim(MAP, **bound).judge(Interval((low + high) / 2, low, high, "")) == word


@pytest.mark.parametrize("middle", [-0.5, -0.15, -0.05, 0.05, 0.15, 0.5])
def test_one_size_is_never_both_an_equality_and_a_difference(middle):
    """As -0.051 "lower" and 0.052 "the same" were, when a difference had no margin."""
    narrow = Interval(middle, middle - 0.01, middle + 0.01, "")
    words = [claim(MAP, **bound).judge(narrow) for bound in EQUAL_OR_NOT]
    assert words.count("reproduced") <= 1
    before = [claim(MAP, **bound).judge(narrow) for bound in OLD]
    assert before.count("reproduced") == (2 if abs(middle) < 0.1 else 1)


def test_claims_of_one_quantity_share_one_margin():
    margins = {}
    for found in CLAIMS:
        size = found.within if found.margin is None else found.margin
        if size is not None:
            margins.setdefault((found.metric, found.terms[0].task), set()).add(size)
    assert {len(sizes) for sizes in margins.values()} == {1}
    assert any(len([c for c in CLAIMS if (c.metric, c.terms[0].task) == key]) > 1 for key in margins)


def test_the_seeds_needed_are_the_fewest_whose_interval_would_decide():
    """Mean 2 and sd 1 above 0: t is 4.303 for three values, 3.182 for four; 4.303/3^.5 > 2 > 3.182/4^.5."""
    assert student([1.0, 2.0, 3.0]).low < 0
    assert claim(MAP).needed([1.0, 2.0, 3.0]) == 4
    assert claim(MAP).needed([-1.0, 0.0, 1.001]) is None
    assert claim(MAP, within=4).needed([1.0, 2.0, 3.0]) == 4  # 2 away from the nearer limit
    assert claim(MAP, direction="above").needed([1.0, 2.0, 3.0]) == 4
    assert claim(MAP, direction="below", margin=2).needed([-1.0, 0.0, 1.0]) == 4  # 2 away from what counts


def test_the_contrast_is_paired_by_seed(tmp_path):
    write(tmp_path, "map", {0: 0.5, 1: 0.6, 2: 0.75, 7: 0.0})
    write(tmp_path, "mfvi", {0: 0.4, 1: 0.5, 2: 0.6, 8: 0.9})
    better = findings.find(claim(MAP, MFVI | {"weight": -1}), [tmp_path])
    assert better.values == pytest.approx({0: 0.1, 1: 0.1, 2: 0.15})
    assert better.verdict == "reproduced"
    assert findings.find(claim(MFVI, MAP | {"weight": -1}), [tmp_path]).verdict == "contradicted"
    other = findings.find(claim(MAP, MFVI | {"weight": -1, "metric": "forgetting"}), [tmp_path])
    forgetting = read_record(tmp_path / "split_digits" / "mfvi" / "seed0").metrics["forgetting"]
    assert other.values[0] == pytest.approx(0.5 - forgetting)


def test_the_least_of_the_terms_speaks_of_all_of_them(tmp_path):
    """By hand; their sum would hide that another method has the least in seed 1."""
    write(tmp_path, "map", {0: 0.5, 1: 0.2, 2: 0.5})
    write(tmp_path, "mfvi", {0: 0.3, 1: 0.9, 2: 0.4})
    least = findings.find(claim(MAP, MFVI, least=True, contrast="x", above=0.25), [tmp_path])
    assert least.values == {0: 0.3, 1: 0.2, 2: 0.4}
    with pytest.raises(ValueError, match="no simple difference"):
        claim(MAP, MFVI | {"weight": -1}, least=True)


def test_runs_that_are_paired_by_a_setting_have_the_others_that_the_term_names(tmp_path):
    """Runs of other settings of method or task would stand in for the cell's own."""
    write(tmp_path, "map", {0: 0.5, 1: 0.6})
    record = read_record(tmp_path / "split_digits" / "map" / "seed0")
    rate, order = record.method.settings["learning_rate"], record.task.settings["order"]
    named = MAP | {"method_settings": {"learning_rate": rate}, "task_settings": {"order": order}}
    assert len(findings.find(claim(named, per="epochs"), [tmp_path]).values) == 1
    for other in ({"method_settings": {"learning_rate": 2 * rate}}, {"task_settings": {"order": "x"}}):
        assert not findings.find(claim(named | other, per="epochs"), [tmp_path]).values


def test_every_run_has_the_seconds_of_its_fits(tmp_path):
    write(tmp_path, "map", {0: 0.5})
    fits = read_record(tmp_path / "split_digits" / "map" / "seed0").fits
    spent = findings.find(claim(MAP, metric=findings.SECONDS), [tmp_path]).values
    assert len(fits) > 1
    assert spent == {0: pytest.approx(sum(fit.seconds for fit in fits))}


def test_two_seeds_give_no_verdict(tmp_path):
    write(tmp_path, "map", {0: 0.5, 1: 0.6, 2: 0.7})
    write(tmp_path, "mfvi", {0: 0.1, 1: 0.2})
    assert findings.find(claim(MAP, MFVI | {"weight": -1}), [tmp_path]).verdict == "no verdict"


def test_runs_that_share_no_seed_are_not_compared(tmp_path):
    write(tmp_path, "map", {0: 0.5, 1: 0.6, 2: 0.7})
    write(tmp_path, "mfvi", {3: 0.1, 4: 0.2, 5: 0.1})
    apart = findings.find(claim(MAP, MFVI | {"weight": -1}), [tmp_path])
    assert (apart.interval, apart.verdict) == (None, "no verdict")


def test_a_diverged_run_counts_as_stated_and_is_never_dropped(tmp_path):
    write(tmp_path, "map", {0: 0.5, 1: 0.5, 2: 0.5})
    write(tmp_path, "map", {3: None}, status="diverged")
    silent = findings.find(claim(MAP), [tmp_path])
    assert (silent.verdict, silent.missing) == ("no verdict", "seed 3: diverged or undefined")
    stated = findings.find(claim(MAP, diverged=-5), [tmp_path])
    assert (stated.values[3], stated.verdict) == (-5, "undecided")


YACHT = "uci_yacht+published_splits=true"


def write_splits(folder, method, values, seed=0, status="completed"):
    """Writes a record on the public splits of yacht with the log likelihood of each."""
    record = read_record(entries.directory_of(YACHT, "map"))
    told = {"name": method, "identity": method}
    changed = {"seed": seed, "status": status, "method": record.method.model_copy(update=told)}
    if status != "completed":
        none = dict.fromkeys(record.metrics)
        changed |= {"reason": "x", "metrics": none, "undefined": dict.fromkeys(record.metrics, "x")}
    target = folder / YACHT / method / f"seed{seed}"
    target.mkdir(parents=True)
    write_record(target, record.model_copy(update=changed))
    points = [f"log_likelihood,test,{k},{value}" for k, value in enumerate(values, 1)]
    points += ["log_likelihood (validation),split 1,1,-99", "rmse,test,1,-99"]
    (target / "curves.csv").write_text("\n".join(["curve,series,x,value", *points]))


def split_claim(**fields):
    """That `mfvi` has the higher log likelihood on yacht, split by split, unless given otherwise."""
    terms = [
        {"weight": weight, "method": method, "task": "uci_yacht", "task_settings": {"published_splits": True}}
        for method, weight in (("mfvi", 1), ("map", -1))
    ]
    return claim(*terms, metric="log_likelihood", per="split", **fields)


def test_splits_are_paired_and_their_interval_knows_that_they_share_rows(tmp_path):
    """Twenty gains about 0.05 with sd 0.08: Student's interval is above 0, the corrected one is not."""
    gains = 0.05 + 0.08 * stats.norm.ppf((np.arange(20) + 0.5) / 20)
    write_splits(tmp_path, "map", np.arange(20.0))
    write_splits(tmp_path, "mfvi", np.arange(20) + gains)
    found = findings.find(split_claim(), [tmp_path])
    assert list(found.values.values()) == pytest.approx(gains)
    half = stats.t.ppf(0.975, 19) * gains.std(ddof=1)
    assert found.interval.half == pytest.approx(half * np.sqrt(1 / 20 + 1 / 9))
    assert found.interval.basis == "20 splits"
    assert half / np.sqrt(20) < 0.05 < found.interval.half
    assert (found.verdict, found.needed) == ("undecided", None)


def test_seeds_of_a_split_are_no_further_splits(tmp_path):
    for seed in range(2):
        write_splits(tmp_path, "map", np.zeros(20), seed)
        write_splits(tmp_path, "mfvi", 1 + seed + 0.1 * np.arange(20), seed)
    found = findings.find(split_claim(), [tmp_path])
    assert list(found.values.values()) == pytest.approx(1.5 + 0.1 * np.arange(20))
    assert found.verdict == "reproduced"


def test_splits_in_another_order_are_no_gain(tmp_path):
    """The cheat: the same log likelihoods, each on the next split, have the same mean and another spread."""
    write_splits(tmp_path, "map", np.arange(20.0))
    write_splits(tmp_path, "mfvi", np.roll(np.arange(20.0), 1) + 0.1)
    found = findings.find(split_claim(), [tmp_path])
    assert found.interval.centre == pytest.approx(0.1)
    assert found.verdict == "undecided"


def test_splits_of_a_run_that_diverged_give_no_verdict(tmp_path):
    write_splits(tmp_path, "map", np.zeros(20))
    write_splits(tmp_path, "mfvi", [], status="diverged")
    found = findings.find(split_claim(), [tmp_path])
    assert (found.verdict, found.missing) == ("no verdict", "split (0, 1): diverged or undefined")
    assert findings.find(split_claim(diverged=-9), [tmp_path]).verdict == "contradicted"


def test_an_undefined_metric_gives_no_verdict(tmp_path):
    write(tmp_path, "map", {0: 0.5, 1: 0.5, 2: 0.5, 3: None})
    assert findings.find(claim(MAP), [tmp_path]).verdict == "no verdict"


def test_a_run_without_what_the_claim_needs_gives_no_verdict(tmp_path):
    """As chains that did not mix: dropping the run alone would choose runs by what came out."""
    write(tmp_path, "map", {0: 1.0, 1: 1.0, 2: 1.0})
    needs = {"above": 0.5, "needs": "average_accuracy"}
    assert findings.find(claim(MAP, **needs), [tmp_path]).verdict == "reproduced"
    write(tmp_path, "map", {3: 0.9})
    found = findings.find(claim(MAP, **needs), [tmp_path])
    assert (found.verdict, found.missing) == ("no verdict", "average_accuracy is not 1 in 1 of 4 seeds")
    assert findings.find(claim(MAP, above=0.5), [tmp_path]).verdict == "reproduced"


def test_a_metric_that_a_run_does_not_have_is_told(tmp_path):
    write(tmp_path, "map", {0: 0.5})
    with pytest.raises(UsageError, match="has no acuracy"):
        findings.find(claim(MAP, metric="acuracy"), [tmp_path])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"above": 0, "below": 1}, "one of above, below, within and direction"),
        ({"above": 0, "margin": 1}, "margin and size are of a direction"),
        ({"direction": "above", "size": 1}, "a size needs the margin"),
        ({"same": None}, "not at preset paper"),
        ({"other": "x"}, "not both"),
        ({"terms": [MAP | {"weight": 2}]}, "no simple difference"),
        ({"metrik": "x"}, "metrik"),
    ],
)
def test_a_claim_that_is_not_whole_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        claim(MAP, **fields)


# ---------------------------------------------------------------------------------- the claims and the page


def rows(page):
    """Verdict and basis of every line of the page, by claim and commands."""
    cells = [re.split(r" \| ", line.strip("| ")) for line in page.splitlines() if "`bench " in line]
    cells = [row for row in cells if len(row) == 7]
    return {(row[0], row[6]): (row[4].partition(";")[0], row[3].rpartition(", ")[2]) for row in cells}


def expected(found):
    """The same of the records."""
    lines = {}
    for finding in found:
        commands = "<br>".join(f"`{command}`" for command in finding.commands())
        basis = "no run" if finding.interval is None else finding.interval.basis
        lines[finding.claim.claim, commands] = (finding.missing or finding.verdict, basis)
    return lines


def test_the_page_is_what_the_records_say(found):
    assert rows(PAGE) == expected(found)
    turned = PAGE.replace("3 seeds | reproduced", "3 seeds | contradicted", 1)
    assert rows(turned) != expected(found)


def test_there_are_headlines_of_every_document():
    assert len(CLAIMS) >= 20
    counts = Counter(next(name for name in SOURCES if claim.source.startswith(name)) for claim in CLAIMS)
    assert set(counts) == set(SOURCES)
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)


def test_twelve_headlines_are_decided_by_three_values_or_more(found):
    decided = [
        f for f in found if f.verdict in ("reproduced", "contradicted") and f.claim.protocol != "other"
    ]
    assert sum(not f.is_exact and len(f.values) >= 3 for f in decided) >= 12
    assert all(f.is_exact or len(f.values) >= 3 for f in found if f.verdict != "no verdict")


def test_every_run_that_is_missing_has_a_command_that_can_be_typed(found):
    lacking = [finding for finding in found if finding.interval is None]
    commands = {command for finding in lacking for command in finding.commands()}
    assert all(command.startswith("bench run ") for command in commands)
    parsers = {}
    for words in (shlex.split(command)[2:] for command in sorted(commands)):
        key = (*words[:2], "paper" if "paper" in words else "standard")
        parsers[key] = parsers.get(key) or running._run_parser(*key)
        parsers[key].parse_args(words)
        with pytest.raises(UsageError):
            parsers[key].parse_args([*words, "--task.no_such_setting", "1"])


def test_grids_that_a_claim_names_are_there():
    for words in (shlex.split(claim.command) for claim in CLAIMS if claim.command):
        assert words[:3] == ["bench", "sweep", "--grid"]
        assert (ROOT / words[3]).exists()

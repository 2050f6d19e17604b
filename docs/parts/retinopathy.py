"""Referral of photographs of eyes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from parts.evidence import (
    Drawing,
    Part,
    compared,
    compared_table,
    finished,
    finished_runs,
    footer,
    groups,
    interval,
    metric,
    said_if_any,
    table,
)
from PIL import Image, ImageDraw
from scipy import stats

from bench import networks
from bench.comparison import by_task
from bench.contract import FinishedRun
from bench.photographs import fundus, fundus_population
from bench.studies import referral, referral_comparison, robustness


def retinopathy_table(task: str) -> str:
    """AUC at the shares of Table 4.1, referred by mutual information, beside the published one."""
    shares = referral_comparison.PUBLISHED
    names = ["auc_0", *(f"auc_{share}_information" for share in shares[1:])]
    rows = []
    for _, method_identity, group in groups(task):
        run = finished(group[0][0])
        if run.variant:
            continue
        published = referral_comparison.TABLE_4_1.get(referral_comparison.row_of(run))
        said = "/".join(f"{value / 100:.3f}" for value in published) if published else "-"
        rows.append([f"`{method_identity}`", *(metric(group, name) for name in names), said])
    return table(["method", *(f"{share}% referred" for share in shares), "published"], rows)


def retinopathy_ideal() -> str:
    """What the best reader of synthetic eyes reaches."""
    auc, error = fundus_population.bayes_auc(batches=5)
    return f"The ideal reader has an AUC of {auc:.4f} (standard error of this number: {error:.4f})."


def retinopathy_controls(task: str) -> str:
    """AUC of the rest, half referred: by the uncertainty, by one shuffled and by one inverted."""
    rows = []
    for line, runs in by_task(finished_runs(task)).get(task, {}).items():
        found: dict[str, list[float]] = {}
        for run in runs.values():
            controls = {s: v for curve, s, x, v in run.curves if (curve, x) == (referral.CONTROL, 50)}
            name = next(iter(controls)).partition(",")[0]
            points = {(s, x): v for curve, s, x, v in run.curves if curve == referral.AUC}
            values = (points[name, 0], points[name, 50], *controls.values())
            for column, value in zip(("nothing", "honest", "shuffled", "inverted"), values, strict=True):
                found.setdefault(column, []).append(value)
        rows.append([f"`{line}`", name, *map(interval, found.values())])
    header = ["method", "referred by", "nothing referred", "half referred", "shuffled", "inverted"]
    return table(header, rows)


def retinopathy_mistakes(run: FinishedRun, number: int = 10, band: int = 14) -> Image.Image:
    """The photographs that a run reads wrongly, a row of the most and one of the least certain mistakes."""
    images, _ = run.task.own_data("test")
    rows = referral.mistakes(referral.Readings.of(run.arrays), number)
    side = images[0].shape[0]
    sheet = Image.new("RGB", (number * side, len(rows) * (side + band)))
    for at, (title, of_row) in enumerate(rows.items()):
        top = at * (side + band)
        ImageDraw.Draw(sheet).text((4, top + 2), title, fill=(230, 230, 230))
        for column, row in enumerate(of_row):
            sheet.paste(Image.fromarray(np.asarray(images[row])), (column * side, top + band))
    return sheet


def starts() -> dict[tuple[str, float], tuple[float, int, int]]:
    """Method and initial rho -> sd of a weight at the start, trials that learned something, and trials.

    The sd of a mean-field weight is sigma = softplus(rho), that of a radial one sigma / sqrt(D), where its
    tensor has D weights: the median over the weights of the network at full width.
    """
    tensors = [tensor.numel() for tensor in networks.small_vgg().parameters()]
    shrinks = {"mfvi": 1.0, "radial": float(np.median(np.repeat(tensors, tensors)) ** -0.5)}
    found: dict[tuple[str, float], list[bool]] = {}
    for run in finished_runs("retinopathy_robustness"):
        auc = run.metrics.get("auc")
        key = run.method_name, run.task.configuration.initial_rho
        found.setdefault(key, []).append(auc is not None and auc >= robustness.LEARNED)
    return {
        (method, rho): (float(np.logaddexp(0, rho)) * shrinks[method], sum(learned), len(learned))
        for (method, rho), learned in sorted(found.items())
    }


def robustness_starts() -> str:
    """What was learned from which start, and the methods beside each other where weights are equally wide."""
    found = starts()
    rows = [
        [f"`{method}`", f"{rho:g}", f"{sd:.2g}", robustness.share(learned, count)]
        for (method, rho), (sd, learned, count) in found.items()
    ]
    said = []
    for (first, rho), (sd, learned, count) in found.items():
        for (second, other_rho), (other_sd, other, of) in found.items():
            if first >= second or not 0.5 < sd / other_sd < 2:
                continue
            p = stats.fisher_exact([[learned, count - learned], [other, of - other]]).pvalue
            said.append(
                f"- {first} from rho {rho:g} (sd {sd:.2g}) learned something with {learned} of {count}, "
                f"{second} from rho {other_rho:g} (sd {other_sd:.2g}) with {other} of {of}; "
                f"Fisher's exact test, p = {p:.2g}"
            )
    header = ["method", "initial rho", "sd of a weight at the start", "learned something"]
    return table(header, rows) + "\n\nWhere sds differ by less than twice:\n\n" + "\n".join(said)


def photographs() -> Iterator[tuple[str, Image.Image]]:
    """Sheets of photographs, by the names of their files."""
    yield "retinopathy/contact-sheet.png", fundus.contact_sheet()
    shown = next(run for run in finished_runs("retinopathy_synthetic") if run.line == "radial")
    yield "retinopathy_synthetic-mistakes.png", retinopathy_mistakes(shown)


def drawn() -> Iterator[Drawing]:
    """Referral curves."""
    yield compared("retinopathy_synthetic").charts, footer(finished_runs("retinopathy_synthetic"))


PARTS: dict[str, Part] = {
    "retinopathy ideal": retinopathy_ideal,
    "retinopathy table": lambda: retinopathy_table("retinopathy_synthetic"),
    "retinopathy controls": lambda: retinopathy_controls("retinopathy_synthetic"),
    "retinopathy said": lambda: said_if_any("retinopathy_synthetic"),
    "robustness": lambda: compared_table("retinopathy_robustness"),
    "robustness starts": robustness_starts,
    "robustness said": lambda: said_if_any("retinopathy_robustness"),
}

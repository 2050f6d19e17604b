"""Figures: what stands below them, what fits, and charts that say too little."""

import re
import xml.etree.ElementTree as ElementTree

import altair as alt
import numpy as np
import pytest
import vl_convert
from drawn import half_counts, names_in_legends, texts, unnamed

from bench import figures
from bench.contract import Row

ROWS = [Row("c", "seen", float(x), 0.5) for x in (1, 2, 3)]


def label(method="mfvi", task="split_digits", preset="smoke", seed=0):
    return method, task, preset, seed


def saved(tmp_path, chart, footer="footer"):
    svg, png = figures.save({"chart": chart}, tmp_path, footer)
    assert png.read_bytes().startswith(b"\x89PNG")
    return svg.read_text()


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([label()], "mfvi on split_digits, smoke, seed 0"),
        ([label("map+learning_rate=0.1")], "map+learning_rate=0.1 on split_digits, smoke, seed 0"),
        ([label(seed=s) for s in (2, 0, 1)], "mfvi on split_digits, smoke, 3 seeds: 0 to 2"),
        ([label(seed=s) for s in (5, 0, 2)], "mfvi on split_digits, smoke, 3 seeds: 0, 2, 5"),
        (
            [label(seed=0), label(seed=1), label("map", seed=0)],
            "mfvi, map on split_digits, smoke, 1 to 2 seeds: 0, 1",
        ),
        ([label(seed=0), label("map", seed=1)], "mfvi, map on split_digits, smoke, 1 seed each: 0, 1"),
        (
            [label("map", "a+x=1"), label("ewc+y=2", "a"), label("ewc", "b", "paper")],
            "map, ewc on a, b, smoke, paper, seed 0",
        ),
    ],
)
def test_footer_names_methods_tasks_presets_and_seeds(labels, expected):
    assert figures.footer(labels) == expected


def test_footers_of_many_methods_count_them():
    labels = [label(m, seed=s) for m, seeds in (("map", 5), ("map+x=1", 3)) for s in range(seeds)]
    assert figures.footer(labels, are_many=True) == "2 methods on split_digits, smoke, 3 to 5 seeds: 0 to 4"


def test_long_footers_wrap_and_lose_nothing(tmp_path):
    footer = f"nf_gamma on singular_evidence+{','.join(f'setting_{i}=1.0' for i in range(20))}, smoke, seed 0"
    lines = figures.wrapped(footer, 80)
    assert max(map(len, lines)) <= 80
    assert "".join(lines).replace(" ", "") == footer.replace(" ", "")
    said = texts(saved(tmp_path, figures.lines(ROWS, "title", "step", "share"), footer))
    assert "".join(lines) in said


def test_a_word_longer_than_a_line_is_kept_whole():
    assert figures.wrapped("a " + 90 * "b" + " c", 80) == ["a", 90 * "b", "c"]


def test_settings_of_a_users_chart_are_kept(tmp_path):
    chart = alt.Chart(alt.Data(values=[{"x": 1}])).mark_bar().encode(x="x:Q").properties(background="#fedcba")
    svg = saved(tmp_path, chart.configure_axis(titleColor="#123456"))
    assert "#fedcba" in svg
    assert "#123456" in svg
    assert "footer" in texts(svg)


def test_png_is_that_of_the_chart(tmp_path):
    """It is made from the SVG."""
    chart = figures.lines(ROWS, ["title", "note"], "step", "share", chance=0.1)
    saved(tmp_path, chart)
    (png,) = tmp_path.rglob("*.png")
    assert png.read_bytes() == vl_convert.vegalite_to_png(figures._whole(chart, "footer"), scale=2)


def test_every_line_of_a_chart_is_in_its_legend(tmp_path):
    chart = figures.lines(ROWS, ["title", "note"], "step", "share", chance=0.1)
    assert names_in_legends(chart) == {"seen", "guessing: 0.1"}
    said = texts(saved(tmp_path, chart))
    assert {"seen", "guessing: 0.1", "title", "note", "step", "share"} <= set(said)
    assert "stroke-dasharray" in (tmp_path / "chart.svg").read_text()


def test_truth_and_training_data_are_in_the_legend(tmp_path):
    x = np.linspace(-3, 3, 5)
    series = {"posterior": (x, x**2), "reference": (x, x**2)}
    chart = figures.functions(series, x, "title", (-3, 3), x, [(0.0, 0.0)])
    assert {"training data", "truth"} <= names_in_legends(chart)
    said = texts(saved(tmp_path, chart))
    assert [said.count(name) for name in ("training data", "truth", "posterior")] == [1, 1, 1]


def test_counts_have_whole_ticks(tmp_path):
    """Two steps, between which vega would set ticks at halves."""
    svg = saved(tmp_path, figures.lines(ROWS[:2], "title", "step", "share"))
    assert {"1", "2"} <= set(texts(svg))
    assert not {"1.5", "2.0"} & set(texts(svg))


def test_labels_of_an_axis_do_not_touch(tmp_path):
    """Six figures at every tick, and a digit takes at least five pixels."""
    rows = [Row("c", "seen", x, 0.5) for x in (100_000.0, 100_020.0)]
    figure = ElementTree.fromstring(saved(tmp_path, figures.lines(rows, "title", "points", "share")))
    found = []
    for text in figure.iter("{http://www.w3.org/2000/svg}text"):
        place = re.match(r"translate\(([-\d.]+),([-\d.]+)\)", text.get("transform", ""))
        if re.fullmatch(r"100,0\d\d", text.text or "") and place and text.get("opacity", "1") != "0":
            found.append(float(place[1]))
    assert len(found) >= 2
    assert min(np.diff(sorted(found))) > 5 * len("100,000")


# ---- charts that say too little


def test_negative_controls():
    values = alt.Data(values=[{"x": 1, "y": 2.0, "name": "a"}, {"x": 2, "y": 3.0, "name": "b"}])
    base = alt.Chart(values).encode(x="x:Q", y="y:Q")
    assert unnamed(base.mark_rule(strokeDash=[4, 4]))
    assert unnamed(base.mark_line(color="blue") + base.mark_circle(color="grey"))
    assert unnamed(base.mark_rule(strokeDash=[4, 4]).encode(color=alt.Color("name:N", legend=None)))
    assert not unnamed(base.mark_rule(strokeDash=[4, 4]).encode(color="name:N"))
    assert half_counts(base.mark_line())
    assert not half_counts(base.mark_line().encode(x=alt.X("x:Q", axis=alt.Axis(tickMinStep=1))))

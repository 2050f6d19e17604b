"""The Python that a newcomer sees first is run: the block of the page on first runs, and the notebooks."""

import re
import runpy

import nbformat
import pages
import pytest
from nbclient import NotebookClient


@pytest.mark.slow
def test_python_of_the_first_runs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = [b for b in pages.blocks("first-runs.md") if b.language == "python"]
    (tmp_path / "typed.py").write_text(block.text)
    names = runpy.run_path(str(tmp_path / "typed.py"))
    assert names["prediction"].log_probs.shape == (100, 5, 10)
    assert names["prediction"].average().shape == (5, 10)


def kinds(notebook):
    """Of every cell, the kinds of its outputs."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [sorted(kind for output in cell.outputs for kind in output.get("data", {})) for cell in cells]


@pytest.mark.slow
def test_the_tour_runs_and_shows_what_it_showed(tmp_path, monkeypatch):
    """Every cell, in a kernel of its own: tables and pictures where the committed notebook has them."""
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(pages.DOCS / "tour.ipynb", as_version=4)
    shown = kinds(notebook)
    assert sum("image/png" in outputs for outputs in shown) == 2
    assert all(shown[1:])
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert kinds(notebook) == shown
    assert list(tmp_path.glob("runs/*/mfvi/*/record.json"))


NUMBER = re.compile(r"-?\d+\.\d+|-?\d+")


def texts(notebook):
    """What the outputs say as text, cell after cell."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [str(output.get("data", {}).get("text/plain")) for cell in cells for output in cell.outputs]


def differ(texts, others):
    """Where outputs differ: in words, or in a number by more than 3% and 0.06 (a patient of 111 is 0.01)."""
    found = []
    for one, other in zip(texts, others, strict=True):
        a, b = ([float(number) for number in NUMBER.findall(text)] for text in (one, other))
        words = [" ".join(NUMBER.sub("#", text).split()) for text in (one, other)]
        if words[0] != words[1] or a != pytest.approx(b, rel=0.03, abs=0.06):
            found.append((one, other))
    return found


@pytest.mark.slow
def test_the_estimators_notebook_says_what_it_said(tmp_path, monkeypatch):
    """Every cell, in a kernel of its own; 13 seconds of a processor. Negative control: a changed number."""
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(pages.DOCS / "estimator.ipynb", as_version=4)
    said = texts(notebook)
    assert len(NUMBER.findall(str(said))) > 30
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert differ(texts(notebook), said) == []
    assert len(differ(["R 0.52", "x"], ["R 0.32", "x"])) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"ipython"}

"""The Python that a newcomer sees first is run: the block of the page on first runs, and the notebook."""

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
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert kinds(notebook) == shown
    assert list(tmp_path.glob("runs/*/mfvi/*/record.json"))

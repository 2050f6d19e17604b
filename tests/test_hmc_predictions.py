"""Predictions of the chains: their order, their digest, and the way from the published file."""

import hashlib

import numpy as np
import pytest

from bench import cli
from bench.data import array_digest
from bench.errors import DataError
from bench.studies import hmc_predictions
from bench.studies.hmc_predictions import ARRAY, FILE, in_order
from bench.system import places

N = 30


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Thirty made-up images' probabilities in place of the published ones, and no data anywhere else."""
    chains = np.random.default_rng(0).dirichlet(np.ones(10), N).astype(np.float32)
    source = hmc_predictions.SOURCES["cifar10_hmc"]
    known = hmc_predictions.ChainSource(
        source.title, array_digest({ARRAY: chains}), source.origin, source.licence, source.examples
    )
    monkeypatch.setitem(hmc_predictions.SOURCES, "cifar10_hmc", known)
    monkeypatch.setattr(hmc_predictions, "TEST", N)
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")
    monkeypatch.delenv("BENCH_DATA", raising=False)
    return chains


def as_published(chains):
    """Rows in the published order, and as text."""
    order = sorted(range(len(chains)), key=lambda i: hashlib.md5(f"test{i}".encode()).hexdigest())
    return chains[order]


def written(chains, path):
    np.savetxt(path, as_published(chains), delimiter=",")
    return path


def test_order_is_undone(small):
    """And is not its own inverse, so that the wrong direction would be seen."""
    assert (in_order(as_published(small)) == small).all()
    assert (as_published(as_published(small)) != small).any()


def test_published_file_becomes_the_reference(small, tmp_path):
    path = hmc_predictions.prepare(written(small, tmp_path / "probs.csv"), tmp_path / "data")
    assert path == tmp_path / "data" / FILE
    assert (hmc_predictions.load(tmp_path / "data") == small).all()
    assert hmc_predictions.find("cifar10_hmc", tmp_path / "data") == path
    assert hmc_predictions.SOURCES["cifar10_hmc"].digest in hmc_predictions.check(
        "cifar10_hmc", tmp_path / "data"
    )


def test_command_prepares_it_and_refuses_what_is_not_of_it(small, tmp_path, capsys):
    source = str(written(small, tmp_path / "probs.csv"))
    words = ["data", "prepare", "cifar10_hmc", "--source", source, "--data-dir", str(tmp_path / "data")]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "data" / FILE)
    assert cli.main(["data", "check", "cifar10_hmc", "--data-dir", str(tmp_path / "data")]) == 0
    assert cli.main([*words, "--size", "8"]) == 2
    assert cli.main(words[:3]) == 2
    assert "--source is required" in capsys.readouterr().err


def test_without_it_one_line_says_how_to_have_it(small, tmp_path):
    assert hmc_predictions.find("cifar10_hmc") is None
    with pytest.raises(
        DataError, match=r"probs\.csv, then run `bench data prepare cifar10_hmc --source"
    ) as raised:
        hmc_predictions.load(tmp_path)
    assert "\n" not in str(raised.value)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("wrong", ["order", "number", "rows", "text", "none"])
def test_other_files_are_refused_in_one_line(small, tmp_path, wrong):
    """A file in another order has the right rows all the same."""
    path = written(small, tmp_path / "probs.csv")
    if wrong == "order":
        np.savetxt(path, small, delimiter=",")
    elif wrong == "number":
        np.savetxt(path, as_published(small) + np.float32(1e-3), delimiter=",")
    elif wrong == "rows":
        np.savetxt(path, small[:-1], delimiter=",")
    elif wrong == "text":
        path.write_text("a,b\n")
    else:
        path.unlink()
    with pytest.raises(DataError, match=r"not the published|expected 30 rows|cannot be read") as raised:
        hmc_predictions.prepare(path, tmp_path / "data")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("wrong", ["bytes", "array", "content", "pickle"])
def test_damaged_file_is_refused_in_one_line(small, tmp_path, wrong):
    path = tmp_path / FILE
    if wrong == "bytes":
        path.write_bytes(b"PK\x03\x04nothing")
    elif wrong == "array":
        np.savez(path, others=small)
    elif wrong == "content":
        np.savez(path, **{ARRAY: small[::-1]})
    else:
        np.savez(path, **{ARRAY: np.array([{}], dtype=object)})
    with pytest.raises(DataError, match=r"not the published|no array") as raised:
        hmc_predictions.load(tmp_path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)

"""The tables: the known table or one clear line, never something else.

None of the UCI files is here: the readers are tested on generated tables of the published sizes and layouts,
the fetch on a stand-in for the package that talks to the archive.
"""

import errno
import socket
import sys
import types
from pathlib import Path

import generated
import numpy as np
import pytest

from bench import cli, data, tables
from bench.errors import DataError, UsageError
from bench.system import places

PUBLIC = [name for name, source in tables.SOURCES.items() if source.folder and not source.masks]
MASKED = [name for name, source in tables.SOURCES.items() if source.masks]
ARCHIVED = [name for name, source in tables.SOURCES.items() if source.archive_file]
FETCHED = [name for name, source in tables.SOURCES.items() if source.archive_id]


@pytest.fixture(autouse=True)
def empty(monkeypatch, tmp_path):
    """Empty places of the search, no package of the archive."""
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")
    monkeypatch.delenv("BENCH_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "ucimlrepo", None)


def one_line(info):
    message = str(info.value)
    assert "\n" not in message
    return message


def assert_is(table, name, seed=0):
    inputs, targets = generated.table(name, seed)
    np.testing.assert_array_equal(table.inputs, inputs)
    np.testing.assert_array_equal(table.targets, targets)
    assert (table.inputs.dtype, table.targets.dtype) == (np.float64, np.float64)
    assert table.digest == data.array_digest({"inputs": inputs, "targets": targets})


def test_known_sizes():
    """Rows and inputs as Hernandez-Lobato and Adams 2015, Table 1, lists them (rows of wine: red)."""
    assert {name: (tables.SOURCES[name].rows, tables.SOURCES[name].columns) for name in PUBLIC} == {
        "boston": (506, 13),
        "concrete": (1030, 8),
        "energy": (768, 8),
        "kin8nm": (8192, 8),
        "naval": (11934, 16),
        "power_plant": (9568, 4),
        "protein": (45730, 9),
        "wine": (1599, 11),
        "yacht": (308, 6),
    }


def test_names_differ_from_those_of_the_images():
    assert not tables.SOURCES.keys() & data.SOURCES.keys()


# ---- what is embedded


def test_diabetes_is_the_raw_embedded_table():
    table = tables.load("diabetes")
    assert table.inputs.shape == (442, 10)
    np.testing.assert_array_equal(table.inputs[0, :5], [59, 2, 32.1, 101, 157])
    np.testing.assert_array_equal(table.targets[:3], [151, 75, 141])
    assert table.digest == tables.SOURCES["diabetes"].digest
    assert table.published == ()
    assert tables.find("diabetes") == tables.get("diabetes")


def test_other_content_than_the_known_one_is_refused(monkeypatch):
    from sklearn import datasets

    raw = datasets.load_diabetes(scaled=False)
    raw.data[0, 0] += 1
    monkeypatch.setattr(datasets, "load_diabetes", lambda scaled: raw)
    with pytest.raises(DataError, match="expected content sha256 c0bba048") as info:
        tables.load("diabetes")
    one_line(info)


# ---- files


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "protein" else n for n in PUBLIC]
)
def test_public_layout(name, tmp_path):
    folder = generated.write_public(tmp_path / "d", name)
    assert_is(tables.load(name, tmp_path / "d"), name)
    assert tables.find(name, tmp_path / "d") == folder / "data.txt"


@pytest.mark.parametrize("root", ["argument", "environment", "cache"])
@pytest.mark.parametrize("layout", [".", "UCI_Datasets"])
def test_every_root_is_searched(root, layout, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "environment"))
    folder = generated.write_public(tmp_path / root / layout, "yacht")
    assert tables.find("yacht", str(tmp_path / "argument")).samefile(folder / "data.txt")


def test_roots_are_searched_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "environment"))
    for seed, root in enumerate(("cache", "environment", "argument")):
        generated.write_public(tmp_path / root, "yacht", seed=seed)
        assert_is(tables.load("yacht", tmp_path / "argument"), "yacht", seed)


def archive_text(name):
    """A generated table as the archive's file writes it."""
    source, (inputs, targets) = tables.SOURCES[name], generated.table(name)
    columns = np.insert(inputs, source.archive_target, targets, axis=1)
    if name == "naval":  # whose second target follows
        columns = np.column_stack([columns, targets / 2])
    blank = {"protein": ",", "wine": ";"}.get(name, "   ")
    lines = [blank.join(f"{x:.17g}" for x in row) for row in columns]
    if name == "protein":
        lines.insert(0, "RMSD,F1,F2,F3,F4,F5,F6,F7,F8,F9")
    if name == "wine":
        lines.insert(0, '"fixed acidity";"volatile acidity";"citric acid"')
    return "\n".join([*lines, "", " "])


@pytest.mark.parametrize("name", [n for n in ARCHIVED if n != "protein"])
@pytest.mark.parametrize("layout", [".", "folder", "name"])
def test_files_of_the_archive(name, layout, tmp_path):
    source = tables.SOURCES[name]
    path = tmp_path / {"folder": source.folder, "name": name}.get(layout, layout) / source.archive_file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(archive_text(name))
    assert_is(tables.load(name, tmp_path), name)
    assert tables.find(name, tmp_path).samefile(path)


@pytest.mark.slow
def test_file_of_the_archive_with_the_target_first(tmp_path):
    (tmp_path / "CASP.csv").write_text(archive_text("protein"))
    assert_is(tables.load("protein", tmp_path), "protein")


def test_public_splits(tmp_path):
    folder = generated.write_public(tmp_path, "yacht", splits=3)
    published = tables.load("yacht", tmp_path).published
    assert len(published) == 3
    for k, (train, test) in enumerate(published):
        np.testing.assert_array_equal(train, np.loadtxt(folder / f"index_train_{k}.txt"))
        np.testing.assert_array_equal(test, np.loadtxt(folder / f"index_test_{k}.txt"))
        assert (len(train), len(test)) == (277, 31)


# ---- what is not the table


def spoil_rows(folder):
    matrix = np.loadtxt(folder / "data.txt")
    np.savetxt(folder / "data.txt", matrix[:-1])


def spoil_number(folder):
    matrix = np.loadtxt(folder / "data.txt")
    matrix[3, 3] = np.nan
    np.savetxt(folder / "data.txt", matrix)


def spoil_target(folder):
    matrix = np.loadtxt(folder / "data.txt")
    matrix[:, 0] *= 1.1
    np.savetxt(folder / "data.txt", matrix)


def append(name, line):
    def spoil(folder):
        with (folder / name).open("a") as file:
            file.write(f"{line}\n")

    return spoil


def replace(name, content):
    return lambda folder: (folder / name).write_text(content)


def remove(name):
    return lambda folder: (folder / name).unlink()


SPOILT = {
    "a row less": (spoil_rows, "data.txt: expected 308 rows and 6 inputs, found 307 and 6"),
    "not finite": (spoil_number, "data.txt: holds a number that is not finite"),
    "another target": (spoil_target, r"expected the target residuary .* to 62.42 .*, found .* 68.6"),
    "ragged": (append("data.txt", "1 2 3"), "data.txt: expected a table of numbers .*"),
    "words": (append("data.txt", "1 2 3 4 5 6 x"), "data.txt: expected a table of numbers"),
    "empty": (replace("data.txt", ""), "data.txt: holds no numbers"),
    "a page": (replace("data.txt", "<html>\n"), "data.txt: holds no numbers"),
    "a column less": (replace("index_features.txt", "1 2 3 4 5"), "308 rows and 6 inputs, found 308 and 5"),
    "column unknown": (replace("index_features.txt", "1 2 3 4 5 7"), "expected whole numbers from 0 to 6"),
    "column twice": (replace("index_features.txt", "1 2 3 4 5 5"), "holds a number twice"),
    "half a column": (replace("index_target.txt", "0.5"), "expected whole numbers"),
    "target among the inputs": (replace("index_target.txt", "1"), "expected one target that is no feature"),
    "two targets": (replace("index_target.txt", "0 1"), "expected one target that is no feature"),
    "test rows missing": (remove("index_test_1.txt"), "index_test_1.txt: cannot be read"),
    "row in both parts": (append("index_test_0.txt", "0"), "must name each of the 308 rows once"),
    "row unknown": (append("index_test_0.txt", "308"), "expected whole numbers from 0 to 307"),
}  # fmt: skip


@pytest.mark.parametrize("spoilt", SPOILT)
def test_spoilt_files_are_refused(spoilt, tmp_path):
    spoil, complaint = SPOILT[spoilt]
    folder = generated.write_public(tmp_path, "yacht", splits=2)
    spoil(folder)
    for use in (tables.load, tables.find, tables.get, tables.check):
        with pytest.raises(DataError, match=complaint) as info:
            use("yacht", tmp_path)
        assert str(folder) in one_line(info)


def test_splits_of_unequal_size_are_refused(tmp_path):
    folder = generated.write_public(tmp_path, "yacht", splits=2)
    rows = np.loadtxt(folder / "index_test_1.txt")
    np.savetxt(folder / "index_test_1.txt", rows[1:])
    append("index_train_1.txt", int(rows[0]))(folder)
    with pytest.raises(DataError, match=r"index_test_1.txt: expected 31 rows as in split 0, found 30"):
        tables.load("yacht", tmp_path)


# ---- tables whose splits are masks


@pytest.mark.parametrize("layout", [".", "uci_datasets"])
def test_masks_are_found_as_they_lie_and_each_row_is_tested_once(layout, tmp_path):
    generated.write_masked(tmp_path, "airfoil")
    root = tmp_path / "uci_datasets" if layout == "." else tmp_path
    table = tables.load("airfoil", root)
    assert_is(table, "airfoil")
    masks = np.loadtxt(tmp_path / "uci_datasets" / "airfoil" / "test_mask.csv.gz", delimiter=",")
    assert len(table.published) == 10
    for k, (train, test) in enumerate(table.published):
        assert (masks[test, k] == 1).all()
        np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(1503))
    assert sorted(len(test) for _, test in table.published) == [150] * 7 + [151] * 3
    report = tables.check("airfoil", root)
    assert "1503 rows" in report
    assert "10 public splits" in report


def other_mask(change):
    """Writes the masks anew after `change` of them."""

    def spoil(folder):
        masks = np.loadtxt(folder / "test_mask.csv.gz", delimiter=",")
        np.savetxt(folder / "test_mask.csv.gz", change(masks), fmt="%g", delimiter=",")

    return spoil


def twice(masks):
    masks[0] = 1
    return masks


def never(masks):
    masks[0] = 0
    return masks


def half_tested(masks):
    masks[0, 0] = 0.5
    return masks


def of_one_fold(masks):
    masks[masks[:, 1] == 1, :2] = 1, 0
    return masks


def cut(folder):
    path = folder / "test_mask.csv.gz"
    path.write_bytes(path.read_bytes()[:-100])


SPOILT_MASKS = {
    "a row less": (other_mask(lambda masks: masks[1:]), "expected 10 masks of 1503 rows, each 0 or 1"),
    "a fold less": (other_mask(lambda masks: masks[:, 1:]), "expected 10 masks of 1503 rows, each 0 or 1"),
    "half a row": (other_mask(half_tested), "expected 10 masks of 1503 rows, each 0 or 1"),
    "twice": (other_mask(twice), "each row must be tested in one fold"),
    "never": (other_mask(never), "each row must be tested in one fold"),
    "folds of any size": (other_mask(of_one_fold), "expected folds of 150 or 151 rows, found 0 to 30"),
    "cut": (cut, "test_mask.csv.gz: cannot be read"),
    "no archive": (replace("test_mask.csv.gz", "0,1\n"), "test_mask.csv.gz: cannot be read"),
    "no archive of data": (replace("data.csv.gz", "0,1\n"), "data.csv.gz: cannot be read"),
}


@pytest.mark.parametrize("spoilt", SPOILT_MASKS)
def test_spoilt_masks_are_refused(spoilt, tmp_path):
    spoil, complaint = SPOILT_MASKS[spoilt]
    folder = generated.write_masked(tmp_path, "airfoil")
    spoil(folder)
    with pytest.raises(DataError, match=complaint) as info:
        tables.load("airfoil", tmp_path)
    assert str(folder) in one_line(info)


@pytest.mark.parametrize("name", MASKED)
def test_missing_masked_table_tells_its_way_out(name, tmp_path):
    with pytest.raises(
        DataError, match="cannot be fetched, the UCI archive does not offer it in this form"
    ) as info:
        tables.load(name, tmp_path)
    message = one_line(info)
    for part in (
        f"uci_datasets/{name}",
        "package uci_datasets",
        "data.csv.gz and test_mask.csv.gz",
        "--data-dir",
    ):
        assert part in message


def test_second_target_of_naval_is_refused(tmp_path):
    """The turbine's coefficient runs from 0.975: a file that calls it the target is not the benchmark."""
    folder = generated.write_public(tmp_path, "naval")
    matrix = np.loadtxt(folder / "data.txt")
    matrix[:, 0] = 0.975 + (matrix[:, 0] - 0.95) / 2
    np.savetxt(folder / "data.txt", matrix)
    with pytest.raises(DataError, match=r"compressor decay .* from 0.95 to 1 coefficient, found 0.975 to 1"):
        tables.load("naval", tmp_path)


def test_file_that_cannot_be_read(tmp_path, monkeypatch):
    generated.write_public(tmp_path, "yacht")

    def deny(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", deny)
    with pytest.raises(DataError, match=r"data.txt: cannot be read \(Permission denied\)") as info:
        tables.load("yacht", tmp_path)
    one_line(info)


def test_file_of_bytes(tmp_path):
    folder = generated.write_public(tmp_path, "yacht")
    (folder / "data.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"data.txt: cannot be read") as info:
        tables.load("yacht", tmp_path)
    one_line(info)


def test_archive_file_with_too_few_columns(tmp_path):
    (tmp_path / "housing.data").write_text("1 2 3\n4 5 6\n")
    with pytest.raises(DataError, match=r"housing.data: expected 14 columns, found 3"):
        tables.load("boston", tmp_path)


# ---- what is missing


@pytest.mark.parametrize("name", PUBLIC)
def test_missing_table_tells_every_way_out(name, tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "environment"))
    source = tables.SOURCES[name]
    assert tables.find(name, tmp_path / "argument") is None
    for use in (tables.load, tables.get, tables.check):
        with pytest.raises(DataError) as info:
            use(name, tmp_path / "argument")
        message = one_line(info)
        for part in (
            *(str(tmp_path / root) for root in ("argument", "environment", "cache")),
            "--data-dir",
            "BENCH_DATA",
            f"{source.folder}/data/",
            "data.txt, index_features.txt and index_target.txt",
            source.archive_file,
        ):
            assert part in message
        fetchable = "pip install 'posterior-bench[uci]'" in message and f"bench data get {name}" in message
        assert fetchable == (name not in ("boston", "kin8nm"))
    assert not (tmp_path / "argument").exists()


@pytest.mark.parametrize(
    ("name", "near"), [("uci_yacht", "yacht"), ("Boston", "boston"), ("qqq", "boston, concrete")]
)
def test_unknown_name(name, near):
    for use in (tables.load, tables.find, tables.get, tables.check):
        with pytest.raises(
            UsageError, match=f"unknown table '{name}'; the nearest names are .*{near}"
        ) as info:
            use(name)
        one_line(info)


def test_check_reports_content_and_place(tmp_path):
    folder = generated.write_public(tmp_path, "yacht", splits=2)
    report = tables.check("yacht", tmp_path)
    for part in (
        "yacht: Yacht",
        "308 rows",
        "6 inputs",
        "2 public splits",
        tables.load("yacht", tmp_path).digest,
    ):
        assert part in report
    assert str(folder) in report
    assert "\n" not in report


# ---- the fetch


class Frame(dict):
    """As much of a pandas.DataFrame as is asked of the archive's answer: columns by name, rows by a mask."""

    def __getitem__(self, key):
        """A column, or the rows where a mask is true."""
        return (
            super().__getitem__(key) if isinstance(key, str) else Frame({k: v[key] for k, v in self.items()})
        )

    def to_numpy(self, dtype):
        """The matrix of all columns."""
        return np.column_stack([column.astype(dtype) for column in self.values()])


@pytest.fixture
def archive(monkeypatch):
    """The archive's package, replaced: answers with generated tables, keeps the numbers asked for."""
    asked = []

    def fetch_ucirepo(id):
        asked.append(id)
        assert socket.getdefaulttimeout() == places.ANSWER_SECONDS
        name = next(name for name in FETCHED if tables.SOURCES[name].archive_id == id)
        inputs, target = generated.table(name)
        features = Frame({f"input {c}": column for c, column in enumerate(inputs.T)})
        targets = Frame(target=target)
        if name == "energy":
            targets = Frame(Y1=target, Y2=target * 1.1)
        if name == "naval":  # in whichever order
            targets = Frame(turbine=0.5 + target / 2, compressor=target)
        if name == "wine":  # the white ones first, and better
            features = Frame({k: np.concatenate([v + 1, v]) for k, v in features.items()})
            targets = Frame(quality=np.concatenate([target + 1, target]))
        colour = Frame(color=np.repeat(["white", "red"], len(target))) if name == "wine" else {}
        original = Frame(**features, **targets, **colour)
        answer = {"features": features, "targets": targets, "original": original}
        return types.SimpleNamespace(data=types.SimpleNamespace(**answer))

    module = types.ModuleType("ucimlrepo")
    module.fetch_ucirepo = fetch_ucirepo
    monkeypatch.setitem(sys.modules, "ucimlrepo", module)
    monkeypatch.setattr(places, "await_answer", lambda urls: None)
    return types.SimpleNamespace(asked=asked, module=module)


@pytest.mark.parametrize("name", [n for n in FETCHED if n != "protein"])
def test_fetched_table_is_kept_in_the_public_layout(name, archive, tmp_path):
    assert_is(tables.load(name, tmp_path), name)
    path = tmp_path / tables.SOURCES[name].folder / "data" / "data.txt"
    assert tables.get(name, tmp_path) == tables.find(name, tmp_path) == path
    assert archive.asked == [tables.SOURCES[name].archive_id]
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "data.txt",
        "index_features.txt",
        "index_target.txt",
    ]
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize("root", ["environment", "cache"])
def test_fetched_into_the_first_root(root, archive, tmp_path, monkeypatch):
    if root == "environment":
        monkeypatch.setenv("BENCH_DATA", str(tmp_path / root))
    assert tables.get("yacht") == tmp_path / root / "yacht" / "data" / "data.txt"


@pytest.mark.parametrize("name", ["boston", "kin8nm"])
def test_archive_is_not_asked_for_what_it_does_not_offer(name, archive):
    with pytest.raises(DataError, match="the UCI archive does not offer it"):
        tables.get(name)
    assert archive.asked == []


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (ConnectionError("Error connecting\nto server"), "Error connecting to server"),
        (KeyError("data_url"), "data_url"),
        (DataError("no answer"), "no answer"),
    ],
)
def test_failed_fetch_is_one_line(failure, reason, archive, tmp_path):
    def fail(id):
        raise failure

    archive.module.fetch_ucirepo = fail
    with pytest.raises(DataError, match=f"yacht not found .*; the download failed: .*{reason}") as info:
        tables.load("yacht", tmp_path)
    one_line(info)
    assert list(tmp_path.iterdir()) == []


def test_unreachable_archive_is_one_line(archive, monkeypatch):
    def silent(urls):
        raise OSError(f"no answer from {urls[0]}")

    monkeypatch.setattr(places, "await_answer", silent)
    with pytest.raises(DataError, match=r"the download failed: no answer from https://archive.ics.uci.edu"):
        tables.load("yacht")


ROWS = np.arange(308) != 100


def test_fetched_table_of_another_size_is_refused(archive, tmp_path):
    fetch = archive.module.fetch_ucirepo

    def less(id):
        answer = fetch(id).data
        answer.features, answer.targets = answer.features[ROWS], answer.targets[ROWS]
        return types.SimpleNamespace(data=answer)

    archive.module.fetch_ucirepo = less
    with pytest.raises(DataError, match="UCI archive, number 243: expected 308 rows and 6 inputs, found 307"):
        tables.load("yacht", tmp_path)
    assert tables.find("yacht", tmp_path) is None


def test_fetched_words_are_refused(archive, tmp_path):
    fetch = archive.module.fetch_ucirepo

    def words(id):
        answer = fetch(id).data
        answer.features["input 0"] = np.array(["?"] * 308)
        return types.SimpleNamespace(data=answer)

    archive.module.fetch_ucirepo = words
    with pytest.raises(DataError, match="UCI archive, number 243: expected a table of numbers"):
        tables.load("yacht", tmp_path)


def test_folder_that_cannot_be_written(archive, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"the download failed: .*Not a directory") as info:
        tables.load("yacht", tmp_path / "file")
    one_line(info)


# ---- bench data


def call(capsys, *arguments):
    """Exit code, output and errors of a command."""
    code = cli.main(list(arguments))
    return code, *capsys.readouterr()


def test_bench_data_knows_the_tables(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "SYSTEM_ROOT", tmp_path / "system")
    folder = generated.write_public(tmp_path / "d", "yacht")
    where = ("--data-dir", str(tmp_path / "d"))
    code, out, err = call(capsys, "data", "list", *where)
    assert (code, err) == (0, "")
    assert all(name in out for name in tables.SOURCES)
    code, out, err = call(capsys, "data", "get", "yacht", *where)
    assert (code, out, err) == (0, f"{folder / 'data.txt'}\n", "")
    code, out, err = call(capsys, "data", "check", "yacht", *where)
    assert (code, out, err) == (0, tables.check("yacht", tmp_path / "d") + "\n", "")


def test_bench_data_on_a_missing_or_unknown_table_is_one_line(capsys, tmp_path):
    code, out, err = call(capsys, "data", "get", "boston", "--data-dir", str(tmp_path))
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "boston not found" in err
    code, out, err = call(capsys, "data", "check", "uci_yacht")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "unknown data set 'uci_yacht'; the nearest names are yacht" in err


def test_bench_data_check_of_everything_passes_over_tables_that_are_not_there(capsys, tmp_path, monkeypatch):
    """But not over a table that is there and spoilt."""
    monkeypatch.setattr(data, "check", lambda name, data_dir: f"{name}: checked")
    folder = generated.write_public(tmp_path, "yacht")
    code, out, err = call(capsys, "data", "check", "--data-dir", str(tmp_path))
    assert (code, err) == (0, "")
    for line in (
        "whole: mnist: checked",
        "not here: boston",
        "whole: yacht: Yacht",
        "whole: diabetes: Diabetes",
    ):
        assert f"\n{line}" in f"\n{out}"
    (folder / "data.txt").write_text("1 2 3\n")
    assert call(capsys, "data", "check", "--data-dir", str(tmp_path))[0] == 3

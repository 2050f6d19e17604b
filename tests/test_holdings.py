"""What a run holds: what is missing, cut off or a link is said by every command that would use the run."""

import json
import os
import shutil

import pytest

import bench
from bench import cli
from bench.errors import UsageError
from bench.runs import folders, holdings
from bench.runs.runner import finished, redraw
from bench.system import files


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run on a table of one's own, with checkpoint, arrays, curves, encoder and notes."""
    folder = tmp_path_factory.mktemp("made")
    rows = "".join(f"{i},{i * 0.5}\n" for i in range(40))
    (folder / "t.csv").write_text("x,t\n" + rows)
    settings = {"file": str(folder / "t.csv"), "target": "t", "epochs": 1, "kind": "regression"}
    run = bench.run("map", "own_table", task_settings=settings, out=folder / "runs")
    return folder, run.directory, settings


@pytest.fixture
def run(made, tmp_path):
    """A copy of it: its directory, and what makes it (again)."""
    folder, directory, settings = made
    out = tmp_path / "runs"
    shutil.copytree(folder / "runs", out)

    def again(**values):
        return bench.run("map", "own_table", task_settings=settings, out=out, **values)

    return out / directory.relative_to(folder / "runs"), again


HELD = [
    "arrays.safetensors",
    "checkpoints/000-fit.ckpt",
    "curves.csv",
    "encoder.json",
    "notes.txt",
]
USES = {
    "run": lambda directory, again: again(),
    "load": lambda directory, again: bench.load(directory),
    "compare": lambda directory, again: finished(directory),
    "figures": lambda directory, again: redraw(directory),
}


def test_the_list_has_every_file_and_its_length(run):
    directory, _ = run
    listed = json.loads((directory / "files.json").read_text())
    assert listed == {name: (directory / name).stat().st_size for name in listed}
    assert list(listed) == sorted(listed)
    assert set(listed) == {name if "ckpt" not in name else checkpoint(directory) for name in HELD}


def checkpoint(directory):
    (path,) = directory.glob("checkpoints/*.ckpt")
    return path.relative_to(directory).as_posix()


def named(directory, name):
    return directory / (checkpoint(directory) if "ckpt" in name else name)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("how", ["missing", "short", "empty", "directory"])
def test_a_file_that_is_missing_or_short_is_said_by_every_use(run, name, use, how):
    """Negative control: a whole run is used."""
    directory, again = run
    path = named(directory, name)
    content = path.read_bytes()
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how != "missing":
        path.write_bytes(content[: len(content) // 2 if how == "short" else 0])
    short = rf"(is missing|has \d+ bytes of {len(content)})"
    said = rf"is damaged: {path.relative_to(directory)} {short}; bench run --force"
    with pytest.raises(UsageError, match=said) as caught:
        USES[use](directory, again)
    assert "\n" not in str(caught.value)
    if how == "directory":
        path.rmdir()
    path.write_bytes(content)
    USES[use](directory, again)


def test_force_makes_a_damaged_run_anew(run):
    directory, again = run
    (directory / "encoder.json").unlink()
    assert not again(force=True).notices
    bench.load(directory)


def test_commands_say_so_and_list_the_run_as_damaged(run, capsys):
    directory, _ = run
    (directory / "encoder.json").unlink()
    found = folders.look(directory)
    assert found.status == "damaged"
    assert found.note == "encoder.json is missing; bench run --force makes the run anew"
    assert cli.main(["compare", str(directory.parent.parent)]) == 2  # no other run is there
    told = capsys.readouterr()
    assert "encoder.json is missing; bench run --force" in " ".join((told.out + told.err).split())
    assert cli.main(["figures", str(directory)]) == 2
    assert "encoder.json is missing; bench run --force" in capsys.readouterr().err


def test_many_files_are_counted(run):
    directory, _ = run
    for name in HELD[2:]:
        named(directory, name).unlink()
    named(directory, HELD[0]).write_bytes(b"")
    said = r"arrays.safetensors has 0 bytes of \d+, curves.csv is missing, .* and 1 more"
    with pytest.raises(UsageError, match=said):
        holdings.check(directory)


def test_a_run_from_before_the_list_is_used(run):
    directory, again = run
    (directory / "files.json").unlink()
    for use in USES.values():
        use(directory, again)
    assert not (directory / "files.json").exists()


def test_curves_made_anew_are_listed_anew(run):
    """By a task that has fewer of them by now, the file is shorter."""
    directory, again = run
    redraw(directory)
    before = json.loads((directory / "files.json").read_text())["curves.csv"]
    lines = (directory / "curves.csv").read_text().splitlines(keepends=True)
    (directory / "curves.csv").write_text("".join([*lines, "old,of another version of the task,0.0,1.0\n"]))
    holdings.keep(directory)
    assert json.loads((directory / "files.json").read_text())["curves.csv"] > before
    redraw(directory)
    again()


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b'{"x": -1}', b'{"x": true}', b'{"../x": 1}', b'{"/etc/passwd": 1}']
)
def test_a_list_that_is_none_is_refused(run, content):
    directory, _ = run
    (directory / "files.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"is damaged: files.json: .*; bench run --force makes the run anew"):
        bench.load(directory)


# ---- links and pipes

PLACES = [*HELD, "record.json", "files.json", "log.txt", "figures", "checkpoints"]


def in_its_place(directory, name, kind, target):
    path = named(directory, name)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    return path


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", PLACES)
def test_a_link_or_pipe_in_a_files_place_is_neither_read_nor_written(run, name, kind, tmp_path):
    """A pipe would wait for ever; a link shows or overwrites what it leads to. --force removes it."""
    directory, again = run
    (tmp_path / "outside").mkdir()
    secret = tmp_path / "outside" / "secret"
    secret.write_text("kept")
    path = in_its_place(directory, name, kind, secret.parent if "." not in name else secret)
    for use in USES.values():
        with pytest.raises(UsageError, match=rf"{path.name}:? is a {kind}, and is neither read nor written"):
            use(directory, again)
    assert folders.look(directory).status == "damaged"
    again(force=True)
    bench.load(directory)
    assert (secret.read_text(), list(secret.parent.iterdir())) == ("kept", [secret])


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["log.txt", "unfinished.json", ".lock"])
def test_an_unfinished_run_does_not_go_on_through_a_link_or_pipe(run, name, kind, tmp_path):
    directory, again = run
    (directory / "record.json").unlink()
    secret = tmp_path / "secret"
    secret.write_text("kept")
    path = in_its_place(directory, name, kind, secret)
    with pytest.raises(UsageError, match=rf"{path.name} is a {kind}, .*--force"):
        again()
    if name == "unfinished.json":
        folders.look(directory)
    again(force=True)
    assert secret.read_text() == "kept"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_file_takes_the_place_of_a_link_or_pipe(kind, tmp_path):
    """What the link leads to stays, and no pipe is waited for; reading is refused until then."""
    (tmp_path / "secret").write_text("kept")
    path = in_its_place(tmp_path, "x", kind, tmp_path / "secret")
    with pytest.raises(files.NotPlain, match=f"is a {kind}"):
        files.read(path)
    files.write(path, b"new")
    assert (tmp_path / "secret").read_text() == "kept"
    assert files.read(path) == b"new"

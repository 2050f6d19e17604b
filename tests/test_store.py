"""Where arrays of submissions live: in a folder, and on a real S3 server of this machine."""

import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import test_submission

from bench import cli
from bench.errors import BenchError, UsageError
from bench.leaderboard.evidence import store

MAIN = Path(__file__).resolve().parent.parent
CONTENT = {f"t/m/seed{seed}": bytes([seed]) * 1000 for seed in range(3)}
"""Run -> the bytes of its arrays, which the store never reads."""
DIGESTS = {run: store.sha256(content) for run, content in CONTENT.items()}


@pytest.fixture
def root(tmp_path):
    """A leaderboard with one submission, its arrays in the store."""
    slug = tmp_path / "root" / "submissions" / "my-method"
    files = {f"{run}/arrays.safetensors": digest for run, digest in DIGESTS.items()}
    for run in CONTENT:
        (slug / run).mkdir(parents=True)
        (slug / run / "record.json").write_text("{}")
    test_submission.write(slug, files=files | {f"{run}/record.json": "0" * 64 for run in CONTENT})
    for content in CONTENT.values():
        store.keep(content, tmp_path / "root" / "store")
    return tmp_path / "root"


@pytest.fixture(scope="module")
def server():
    """Address of an S3 server."""
    pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(params=["file", "s3"])
def place(request, tmp_path, monkeypatch):
    """URL of an empty place beside the store."""
    if request.param == "file":
        return f"file://{tmp_path / 'place'}"
    address = request.getfixturevalue("server")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    bucket = f"place-{abs(hash(str(tmp_path)))}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/arrays"


def at(place, digest):
    """File system of a place, and the path of an object."""
    system, path = fsspec.core.url_to_fs(place)
    return system, f"{path}/{digest[:2]}/{digest}.safetensors"


def call(capsys, root, *arguments):
    code = cli.main(["store", *arguments, "--root", str(root)])
    return code, *(text.splitlines() for text in capsys.readouterr())


def objects(root):
    return {path.name for path in (root / "store").rglob("*") if path.is_file()}


def local(root, run):
    digest = DIGESTS[run]
    return root / "store" / digest[:2] / f"{digest}.safetensors"


def test_a_run_finds_its_arrays_beside_it_else_in_the_store(root):
    slug = root / "submissions" / "my-method"
    for run, content in CONTENT.items():
        path = store.run_arrays(slug / run, root / "store")
        assert path == local(root, run)
        assert path.read_bytes() == content
    beside = slug / "t/m/seed0/arrays.safetensors"
    beside.write_bytes(CONTENT["t/m/seed0"])
    assert store.run_arrays(beside.parent, root / "store") == beside
    local(root, "t/m/seed1").unlink()
    assert store.run_arrays(slug / "t/m/seed1", root / "store") is None
    assert store.run_arrays(root / "no" / "such" / "run", root / "store") is None


def test_arrays_go_out_and_come_back_byte_for_byte(root, place, capsys):
    assert call(capsys, root, "push", place) == (0, [f"{place}: 3 arrays sent"], [])
    for run, content in CONTENT.items():
        system, path = at(place, DIGESTS[run])
        assert system.cat_file(path) == content
        local(root, run).unlink()
    assert call(capsys, root, "pull", place) == (0, ["3 arrays fetched"], [])
    assert {run: local(root, run).read_bytes() for run in CONTENT} == CONTENT
    assert len(objects(root)) == 3
    assert call(capsys, root, "push", place)[1] == [f"{place}: 0 arrays sent"]
    assert call(capsys, root, "push", place, "--force")[1] == [f"{place}: 3 arrays sent"]
    assert call(capsys, root, "pull", place)[1] == ["0 arrays fetched"]


def test_check_says_where_every_array_is(root, place, capsys):
    code, out, err = call(capsys, root, "check")
    assert code == 0
    assert sorted(out) == sorted(f"{DIGESTS[run]} {local(root, run)}" for run in CONTENT)
    assert err == ["bench: 3 arrays, 0 nowhere, 0 damaged"]
    call(capsys, root, "push", place)
    gone = "t/m/seed1"
    local(root, gone).unlink()
    code, out, _ = call(capsys, root, "check", place)
    assert code == 0
    name = f"{DIGESTS[gone][:2]}/{DIGESTS[gone]}.safetensors"
    assert f"{DIGESTS[gone]} {place}/{name}" in out
    code, out, err = call(capsys, root, "check")
    assert code == 1
    assert f"{DIGESTS[gone]} nowhere" in out
    assert err == ["bench: 3 arrays, 1 nowhere, 0 damaged"]


def test_damaged_object_is_never_taken(root, place, capsys):
    """Of the right size, so that nothing but its bytes tells."""
    call(capsys, root, "push", place)
    run = "t/m/seed2"
    system, path = at(place, DIGESTS[run])
    system.pipe_file(path, b"x" * 1000)
    local(root, run).unlink()
    code, out, err = call(capsys, root, "pull", place)
    assert (code, out) == (1, ["0 arrays fetched"])
    assert len(err) == 1
    assert f"{DIGESTS[run]} of " in err[0]
    assert err[0].endswith(f"is damaged at {place}")
    assert len(objects(root)) == 2
    code, out, _ = call(capsys, root, "check", place)
    assert code == 1
    assert any(line.startswith(f"{DIGESTS[run]} nowhere; damaged: {place}/") for line in out)


def test_damaged_array_at_hand_is_not_sent_and_is_fetched_again(root, place, capsys):
    call(capsys, root, "push", place)
    path = local(root, "t/m/seed0")
    path.write_bytes(b"x" * 1000)
    code, _, err = call(capsys, root, "push", place)
    assert code == 2
    assert err == [f"bench: {path} is damaged: its bytes are not those that its submission names"]
    assert call(capsys, root, "check")[0] == 1
    assert call(capsys, root, "pull", place)[:2] == (0, ["1 arrays fetched"])
    assert path.read_bytes() == CONTENT["t/m/seed0"]


def test_missing_object_is_told_and_the_others_come(root, place, capsys):
    call(capsys, root, "push", place)
    run = "t/m/seed0"
    system, path = at(place, DIGESTS[run])
    system.rm(path)
    for each in CONTENT:
        local(root, each).unlink()
    code, out, err = call(capsys, root, "pull", place)
    assert (code, out) == (1, ["2 arrays fetched"])
    assert err[0].startswith(f"bench: {DIGESTS[run]} of ")
    assert err[0].endswith("is at none of the places")


def test_second_place_has_what_the_first_has_not(root, place, tmp_path, capsys):
    call(capsys, root, "push", place)
    for run in CONTENT:
        local(root, run).unlink()
    (root / "store.toml").write_text(f'places = ["file://{tmp_path / "empty"}", "{place}"]\n')
    assert call(capsys, root, "pull")[:2] == (0, ["3 arrays fetched"])


def test_pull_that_was_stopped_goes_on_and_leaves_no_part_of_a_file(root, place, capsys, monkeypatch):
    call(capsys, root, "push", place)
    for run in CONTENT:
        local(root, run).unlink()
    fetched, fetch = [], store._fetched

    def stopped(url, digest):
        if len(fetched) == 1:
            raise KeyboardInterrupt
        fetched.append(digest)
        return fetch(url, digest)

    monkeypatch.setattr(store, "_fetched", stopped)
    with pytest.raises(KeyboardInterrupt):
        store.pull(root / "submissions", root / "store", [place])
    assert objects(root) == {f"{fetched[0]}.safetensors"}
    again = []
    monkeypatch.setattr(store, "_fetched", lambda url, digest: again.append(digest) or fetch(url, digest))
    assert store.pull(root / "submissions", root / "store", [place]) == (2, [])
    assert fetched[0] not in again
    assert len(objects(root)) == 3


def test_progress_counts_every_array(root):
    told = []
    store.pull(root / "submissions", root / "store", [], lambda *step: told.append(step))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_user_without_s3fs_is_told_how_to_get_it(root, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    local(root, "t/m/seed0").unlink()
    code, _, err = call(capsys, root, "pull", "s3://bucket/folder")
    assert code == 2
    assert len(err) == 1
    assert err[0].endswith("pip install 'posterior-bench[s3]'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["push"], "no place to push: name one, or write it into"),
        (["push", "somewhere"], "somewhere is no URL: a folder is written file:///"),
        (["pull", "gopher://host/folder"], "gopher://host/folder is no place"),
    ],
)
def test_place_that_is_none_is_told_in_one_line(root, arguments, message, capsys):
    local(root, "t/m/seed0").unlink()
    code, _, err = call(capsys, root, *arguments)
    assert (code, len(err)) == (2, 1)
    assert message in err[0]


def test_place_that_cannot_be_reached_is_told_in_one_line(root, monkeypatch):
    local(root, "t/m/seed0").unlink()
    system = type(fsspec.filesystem("file"))

    def broken(*_, **__):
        raise TimeoutError("no answer\nfrom the host")

    monkeypatch.setattr(system, "cat_file", broken)
    with pytest.raises(BenchError, match=r"cannot read file:///tmp/place: no answer from the host"):
        store.pull(root / "submissions", root / "store", ["file:///tmp/place"])


@pytest.mark.parametrize("text", ["places = 3", 'places = ["folder"]', 'urls = ["s3://b"]', "places = ["])
def test_file_of_places_of_another_form_is_refused(root, text):
    (root / "store.toml").write_text(text)
    with pytest.raises(UsageError, match=r"store\.toml"):
        store.places(root / "store.toml")


def test_places_of_this_project_can_be_read():
    assert store.places() == [url for url in store.places() if "://" in url]


def test_what_is_committed_is_what_its_name_says():
    """Every object of the project's store has the bytes of its name, and a submission that names it."""
    known = store.named()
    for path in store.STORE.rglob("*.safetensors"):
        assert store.sha256(path.read_bytes()) == path.stem
        assert path == store.STORE / store.name_of(path.stem)
        assert path.stem in known


def test_what_is_committed_stays_small():
    """docs/decisions/leaderboard.md says what takes the room."""
    found = subprocess.run(["git", "ls-files", "-z"], cwd=MAIN, capture_output=True, check=False)
    if found.returncode:  # an archive without history: the folders that take the room
        paths = [path for folder in ("docs", "leaderboard") for path in (MAIN / folder).rglob("*")]
    else:
        paths = [MAIN / name for name in found.stdout.decode().split("\0") if name]
    assert 1e6 < sum(path.lstat().st_size for path in paths if path.exists()) < 420e6

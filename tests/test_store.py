"""Where the evidence lives: in the tree, in the history of a repository, in folders, and on an S3 server."""

import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import test_submission

from bench import cli
from bench.errors import BenchError, UsageError
from bench.leaderboard.evidence import committing, entries, history, manifest, moving, store
from bench.system import places

MAIN = Path(__file__).resolve().parent.parent
CONTENT = {f"t/m/seed{seed}": bytes([seed]) * 1000 for seed in range(3)}
"""Run -> the bytes of its arrays, which the store never reads."""
DIGESTS = {run: store.sha256(content) for run, content in CONTENT.items()}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A leaderboard with one submission, its arrays in the store; the user's cache is empty."""
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "cache")
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
    """Names of what is in the store or in the user's cache."""
    folders = root / "store", root.parent / "cache"
    return {path.name for folder in folders for path in folder.rglob("*") if path.is_file()}


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
    assert call(capsys, root, "push", place) == (0, [f"{place}: 3 files sent"], [])
    for run, content in CONTENT.items():
        system, path = at(place, DIGESTS[run])
        assert system.cat_file(path) == content
        local(root, run).unlink()
    assert call(capsys, root, "pull", place) == (0, ["3 files fetched"], [])
    assert {run: store.kept(DIGESTS[run]).read_bytes() for run in CONTENT} == CONTENT
    assert len(objects(root)) == 3
    assert call(capsys, root, "push", place)[1] == [f"{place}: 0 files sent"]
    assert call(capsys, root, "push", place, "--force")[1] == [f"{place}: 3 files sent"]
    assert call(capsys, root, "pull", place)[1] == ["0 files fetched"]


def test_check_says_where_every_array_is(root, place, capsys):
    code, out, err = call(capsys, root, "check")
    assert code == 0
    assert sorted(out) == sorted(f"{DIGESTS[run]} {local(root, run)}" for run in CONTENT)
    assert err == ["bench: 3 files, 0 nowhere, 0 damaged"]
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
    assert err == ["bench: 3 files, 1 nowhere, 0 damaged"]


def test_damaged_object_is_never_taken(root, place, capsys):
    """Of the right size, so that nothing but its bytes tells."""
    call(capsys, root, "push", place)
    run = "t/m/seed2"
    system, path = at(place, DIGESTS[run])
    system.pipe_file(path, b"x" * 1000)
    local(root, run).unlink()
    code, out, err = call(capsys, root, "pull", place)
    assert (code, out) == (1, ["0 files fetched"])
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
    assert call(capsys, root, "pull", place)[:2] == (0, ["1 files fetched"])
    assert store.kept(DIGESTS["t/m/seed0"]).read_bytes() == CONTENT["t/m/seed0"]


def test_missing_object_is_told_and_the_others_come(root, place, capsys):
    call(capsys, root, "push", place)
    run = "t/m/seed0"
    system, path = at(place, DIGESTS[run])
    system.rm(path)
    for each in CONTENT:
        local(root, each).unlink()
    code, out, err = call(capsys, root, "pull", place)
    assert (code, out) == (1, ["2 files fetched"])
    assert err[0].startswith(f"bench: {DIGESTS[run]} of ")
    assert err[0].endswith("is at none of the places")


def test_second_place_has_what_the_first_has_not(root, place, tmp_path, capsys):
    call(capsys, root, "push", place)
    for run in CONTENT:
        local(root, run).unlink()
    (root / "store.toml").write_text(f'places = ["file://{tmp_path / "empty"}", "{place}"]\n')
    assert call(capsys, root, "pull")[:2] == (0, ["3 files fetched"])


def test_pull_that_was_stopped_goes_on_and_leaves_no_part_of_a_file(root, place, capsys, monkeypatch):
    call(capsys, root, "push", place)
    for run in CONTENT:
        local(root, run).unlink()
    fetched, fetch = [], moving._fetched

    def stopped(url, entry):
        if len(fetched) == 1:
            raise KeyboardInterrupt
        fetched.append(entry.digest)
        return fetch(url, entry)

    monkeypatch.setattr(moving, "_fetched", stopped)
    with pytest.raises(KeyboardInterrupt):
        moving.pull(root, [place])
    assert objects(root) == {f"{fetched[0]}.safetensors"}
    again = []
    monkeypatch.setattr(
        moving, "_fetched", lambda url, entry: again.append(entry.digest) or fetch(url, entry)
    )
    assert moving.pull(root, [place]) == (2, [])
    assert fetched[0] not in again
    assert len(objects(root)) == 3


def test_progress_counts_every_file(root, place, capsys):
    call(capsys, root, "push", place)
    shutil.rmtree(root / "store")
    told = []
    assert moving.pull(root, [place], progress=lambda *step: told.append(step)) == (3, [])
    assert told[-3:] == [(1, 3), (2, 3), (3, 3)]


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
        (["push", "some/where"], "some/where is no task, and no URL: a folder is written file:///"),
        (["pull", "somewhere"], "there is no evidence on somewhere: bench list tasks"),
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
        moving.pull(root, ["file:///tmp/place"])


@pytest.mark.parametrize("text", ["places = 3", 'places = ["folder"]', 'urls = ["s3://b"]', "places = ["])
def test_file_of_places_of_another_form_is_refused(root, text):
    (root / "store.toml").write_text(text)
    with pytest.raises(UsageError, match=r"store\.toml"):
        moving.places(root / "store.toml")


def test_places_of_this_project_can_be_read():
    assert moving.places() == [url for url in moving.places() if "://" in url]


# ------------------------------------------------------------------------------------------- the history


RUNS = {
    # Two seeds have the same arrays, as the references of one task have.
    "records/one/m/seed0": {"arrays.safetensors": b"same" * 500, "curves.csv": b"curve,series,x,value\n"},
    "records/one/m/seed1": {
        "arrays.safetensors": b"same" * 500,
        "curves.csv": b"curve,series,x,value\na,b,1,2\n",
    },
    "records/one+size=2/m/seed0": {"curves.csv": b"curve,series,x,value\nc,d,1,2\n"},
}


def git(folder, *arguments):
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def put(root, run, files):
    (root / run).mkdir(parents=True, exist_ok=True)
    (root / run / "record.json").write_text("{}")
    for name, content in files.items():
        (root / run / name).write_bytes(content)


@pytest.fixture
def project(root, monkeypatch):
    """A repository whose evidence is not yet committed; returns the leaderboard's folder."""
    top = root.parent / "project"
    top.mkdir()
    for words in (
        ["init", "-q", "-b", "main"],
        ["config", "user.name", "a"],
        ["config", "user.email", "a@b"],
    ):
        git(top, *words)
    git(top, "config", "uploadpack.allowFilter", "true")
    (top / "README.md").write_text("a project")
    git(top, "add", "README.md")
    git(top, "commit", "-qm", "first")
    shutil.move(root, top / "leaderboard")
    for run, files in RUNS.items():
        put(top / "leaderboard", run, files)
    return at_home(top, monkeypatch)


def at_home(top, monkeypatch):
    """Makes a checkout the project's own."""
    monkeypatch.setattr(manifest, "ROOT", top / "leaderboard")
    return top / "leaderboard"


def cloned(project, monkeypatch, *options):
    """A new clone of a project, over a protocol as from a server, with an empty cache of its user."""
    top = project.parent.parent / f"clone{len(options)}"
    git(project.parent.parent, "clone", "-q", *options, f"file://{project.parent}", str(top))
    monkeypatch.setattr(places, "CACHE_ROOT", top / "cache")
    return at_home(top, monkeypatch)


def expected(project):
    """What the door must give: path of a run's file inside the leaderboard -> its bytes."""
    of_submission = {f"submissions/my-method/{run}/arrays.safetensors": c for run, c in CONTENT.items()}
    return of_submission | {f"{run}/{name}": c for run, files in RUNS.items() for name, c in files.items()}


def read(project, path):
    run, _, name = path.rpartition("/")
    return store.needed(project / run, name).read_bytes()


def test_new_evidence_is_two_commits_and_leaves_the_tree(project, capsys):
    code, out, err = call(capsys, project, "commit", "--message", "m on one: what it shows")
    assert (code, out, err) == (0, ["8 files are in the history and out of the tree"], [])
    assert git(project, "log", "--format=%s").splitlines() == [
        "Out of the tree, into the manifest: m on one: what it shows",
        "m on one: what it shows",
        "first",
    ]
    held = git(project, "ls-tree", "-r", "--name-only", "--full-tree", "HEAD~1").splitlines()
    assert sum(name.endswith((".safetensors", ".csv")) for name in held) == 8
    left = git(project, "ls-tree", "-r", "--name-only", "--full-tree", "HEAD").splitlines()
    assert not [name for name in left if name.endswith((".safetensors", ".csv"))]
    assert {f"leaderboard/{run}/record.json" for run in RUNS} <= set(left)
    assert git(project, "status", "--porcelain") == ""
    assert list(committing.in_tree(project)) == []
    lines = manifest.read(project)
    assert lines.keys() == expected(project).keys()
    assert [path.name for path in sorted((project / "manifests").iterdir())] == ["one.txt", "t.txt"]
    for path, content in expected(project).items():
        assert lines[path][:3] == (store.sha256(content), len(content), history.blob_of(content))
    assert git(project, "hash-object", str(project.parent / "README.md")) == history.blob_of(b"a project")


@pytest.mark.parametrize("options", [(), ("--filter=blob:none", "--no-checkout"), ("--depth", "1", "-q")])
def test_any_clone_reads_all_of_it(project, monkeypatch, capsys, options):
    """A full one without its remote; a partial and a shallow one from it, in one request, and once."""
    committing.commit("why", project)
    clone = cloned(project, monkeypatch, *options)
    if "--no-checkout" in options:
        git(clone.parent, "checkout", "-q", "main")
    if not options:
        project.parent.rename(project.parent.with_name("gone"))
    asked, fetch = [], history.fetch
    monkeypatch.setattr(history, "fetch", lambda *given: asked.append(given) or fetch(*given))
    code, out, err = call(capsys, clone, "pull")
    assert (code, out, err) == (0, ["7 files fetched"], [])
    assert len(asked) == 1
    if options:
        project.parent.rename(project.parent.with_name("gone"))
    for path, content in expected(project).items():
        assert read(clone, path) == content
    assert call(capsys, clone, "pull")[1] == ["0 files fetched"]
    code, out, err = call(capsys, clone, "check")
    assert (code, err) == (0, ["bench: 7 files, 0 nowhere, 0 damaged"])
    assert all(line.split(" ")[1].startswith("git:") for line in out)


def test_the_door_brings_one_file_by_itself(project, monkeypatch):
    committing.commit("why", project)
    clone = cloned(project, monkeypatch, "--filter=blob:none")
    path = "records/one/m/seed1/curves.csv"
    assert read(clone, path) == expected(project)[path]
    assert [kept.suffix for kept in (clone.parent / "cache").rglob("*") if kept.is_file()] == [".csv"]
    assert store.run_arrays(clone / "records/one+size=2/m/seed0") is None


def test_tasks_can_be_chosen(project, monkeypatch, capsys):
    committing.commit("why", project)
    clone = cloned(project, monkeypatch)
    assert call(capsys, clone, "pull", "one+size=2")[1] == ["1 files fetched"]
    assert call(capsys, clone, "pull", "one", "git:")[1] == ["3 files fetched"]
    assert call(capsys, clone, "check", "t")[2] == ["bench: 3 files, 0 nowhere, 0 damaged"]
    code, _, err = call(capsys, clone, "pull", "two")
    assert (code, err) == (2, ["bench: there is no evidence on two: bench list tasks names the tasks"])


@pytest.mark.parametrize("options", [("--depth", "1"), ("--filter=blob:none",)])
def test_clone_that_lacks_a_file_says_so_in_one_line(project, monkeypatch, capsys, options):
    why = "git cannot fetch from origin: "
    committing.commit("why", project)
    clone = cloned(project, monkeypatch, *options)
    project.parent.rename(project.parent.with_name("gone"))
    with pytest.raises(store.NotAtHand) as told:
        store.needed(clone / "records/one/m/seed0")
    assert "\n" not in str(told.value)
    assert why in str(told.value)
    assert str(told.value).endswith("bench store pull one")
    code, out, err = call(capsys, clone, "pull", "one")
    assert (code, out, len(err)) == (1, ["0 files fetched"], 1)
    assert err[0].startswith("bench: 4 files, such as ")
    assert why in err[0]
    assert call(capsys, clone, "check", "one")[0] == 1


def test_without_git_and_without_history_a_file_is_not_at_hand(project, monkeypatch, tmp_path):
    committing.commit("why", project)
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "empty")
    shutil.rmtree(project.parent / ".git")
    with pytest.raises(store.NotAtHand, match="not at hand"):
        store.needed(project / "records/one/m/seed0")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(store.NotAtHand, match="not at hand"):
        store.needed(project / "records/one/m/seed0")


@pytest.mark.parametrize("damage", [b"other bytes", None])
def test_nothing_leaves_the_tree_that_a_fresh_clone_does_not_hold(project, monkeypatch, capsys, damage):
    """The negative control of the proof: a clone without one file, or with other bytes in its place."""
    contents = history.contents

    def one_is_wrong(folder, blobs):
        return ((b, damage if n == 0 else c) for n, (b, c) in enumerate(contents(folder, blobs)))

    monkeypatch.setattr(history, "contents", one_is_wrong)
    before = {path: path.read_bytes() for path in committing.in_tree(project)}
    code, _, err = call(capsys, project, "commit", "--message", "why")
    assert code == 1
    assert len(err) == 1
    assert "a fresh clone does not hold records/" in err[0]
    assert {path: path.read_bytes() for path in committing.in_tree(project)} == before
    assert not (project / "manifests").exists()
    monkeypatch.undo()
    monkeypatch.setattr(places, "CACHE_ROOT", project.parent / "cache")
    assert committing.commit("why", project) == 8
    assert [line.split(" ", 1)[1] for line in git(project, "log", "--oneline").splitlines()] == [
        "Out of the tree, into the manifest: why", "why", "first"
    ]  # fmt: skip


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8, 9, 10])
def test_commit_that_was_stopped_goes_on(project, monkeypatch, at):
    """After any of its steps: what git is told, what is written, what is taken away."""
    steps = [0]

    def stopping(function):
        def step(*given, **named):
            steps[0] += 1
            if steps[0] == at:
                raise KeyboardInterrupt
            return function(*given, **named)

        return step

    for module, name in ((committing, "_do"), (committing, "write"), (manifest, "write"), (Path, "unlink")):
        monkeypatch.setattr(module, name, stopping(getattr(module, name)))
    with pytest.raises(KeyboardInterrupt):
        committing.commit("why", project)
    monkeypatch.undo()
    monkeypatch.setattr(places, "CACHE_ROOT", project.parent.parent / "cache")
    at_home(project.parent, monkeypatch)
    committing.commit("why", project)
    assert list(committing.in_tree(project)) == []
    assert git(project, "status", "--porcelain") == ""
    assert manifest.read(project).keys() == expected(project).keys()
    assert all(found.where and not found.damaged for found in moving.check(project))


def test_run_that_is_replaced_has_new_lines_and_the_old_bytes_stay_in_the_history(project):
    committing.commit("why", project)
    old = manifest.read(project)["records/one/m/seed1/curves.csv"]
    put(project, "records/one/m/seed1", {"curves.csv": b"curve,series,x,value\nnew,b,1,2\n"})
    assert committing.commit("again", project) == 1
    lines = manifest.read(project)
    assert lines["records/one/m/seed1/curves.csv"].digest != old.digest
    assert "records/one/m/seed1/arrays.safetensors" not in lines
    assert "records/one/m/seed0/arrays.safetensors" in lines
    assert old.blob in history.reachable(project)
    shutil.rmtree(project / "records/one/m/seed0")
    put(project, "records/one/m/seed2", {"curves.csv": b"curve,series,x,value\n"})
    committing.commit("one less", project)
    assert "records/one/m/seed0/arrays.safetensors" not in manifest.read(project)


@pytest.mark.parametrize("of_another", [False, True])
def test_file_that_its_submission_names_no_more_has_no_line(project, of_another):
    """As of a run that was replaced by one without arrays, be it that another run has the same bytes."""
    committing.commit("why", project)
    gone, *stay = (f"submissions/my-method/{run}/arrays.safetensors" for run in CONTENT)
    files = {f"{run}/arrays.safetensors": digest for run, digest in DIGESTS.items()}
    del files["t/m/seed0/arrays.safetensors"]
    if of_another:
        files["t/m/seed2/arrays.safetensors"] = DIGESTS["t/m/seed0"]
    test_submission.write(project / "submissions" / "my-method", files=files)
    put(project, "records/one/m/seed2", {"curves.csv": b"curve,series,x,value\n"})
    committing.commit("one without", project)
    lines = manifest.read(project)
    assert gone not in lines
    assert {*stay} <= lines.keys()


def test_what_equals_the_arrays_of_an_older_run_takes_nothing_from_it(project):
    """Two submissions and a record with the same arrays: each has lines of its own, and goes alone."""
    shared = CONTENT["t/m/seed0"]
    put(project, "records/t/m/seed0", {"arrays.safetensors": shared, "curves.csv": b"curve,series,x,value\n"})
    for path in (project / "store").rglob("*.safetensors"):
        if path.read_bytes() == shared:
            path.unlink()
    committing.commit("the record first", project)
    of_record = {f"records/t/m/seed0/{name}" for name in ("arrays.safetensors", "curves.csv")}
    of_submission = "submissions/my-method/t/m/seed0/arrays.safetensors"
    assert of_record | {of_submission} <= manifest.read(project).keys()
    # The same arrays once more, by another submission and through the store.
    other = project / "submissions" / "other"
    (other / "t/m/seed0").mkdir(parents=True)
    (other / "t/m/seed0/record.json").write_text("{}")
    test_submission.write(
        other,
        files={"t/m/seed0/arrays.safetensors": store.sha256(shared), "t/m/seed0/record.json": "0" * 64},
    )
    store.keep(shared, project / "store")
    before = manifest.read(project)
    committing.commit("then another", project)
    lines = manifest.read(project)
    assert {path: lines[path] for path in before} == before
    assert lines.keys() - before.keys() == {"submissions/other/t/m/seed0/arrays.safetensors"}
    shutil.rmtree(project / "records/t/m/seed0")
    put(project, "records/one/m/seed3", {"curves.csv": b"curve,series,x,value\n"})
    committing.commit("the record goes", project)
    lines = manifest.read(project)
    assert not of_record & lines.keys()
    assert lines[of_submission].digest == DIGESTS["t/m/seed0"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p: (git(p, "rm", "-q", "--cached", "../README.md")), "README.md is staged: commit it first"),
        (lambda p: store.keep(b"nobody's", p / "store"), "is named by no submission"),
        (lambda p: shutil.rmtree(p.parent / ".git"), "lies in no git repository"),
        (lambda p: (p.parent / ".git" / "shallow").write_text(git(p, "rev-parse", "HEAD") + "\n"), "shallow"),
    ],
)  # fmt: skip
def test_what_cannot_be_committed_is_told_in_one_line(project, capsys, wrong, message):
    wrong(project)
    code, _, err = call(capsys, project, "commit", "--message", "why")
    assert (code, len(err)) == (2, 1)
    assert message in err[0]
    assert not (project / "manifests").exists()
    assert len(list(committing.in_tree(project))) >= 8


def test_commit_says_why(project, capsys):
    code, _, err = call(capsys, project, "commit")
    assert (code, len(err)) == (2, 1)
    assert "--message" in err[0]


def test_manifests_of_other_folders_are_not_read(project, monkeypatch, tmp_path):
    """They would have git work in a repository that a stranger made, whose settings run commands."""
    committing.commit("why", project)
    at_home(tmp_path / "elsewhere", monkeypatch)
    monkeypatch.setattr(places, "CACHE_ROOT", tmp_path / "empty")
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert store.run_arrays(project / "records/one/m/seed0") is None
    assert store.bring([project / "records/one/m/seed0"]) == ""


@pytest.mark.parametrize(
    "line",
    ["", "0" * 64, f"{'0' * 64} 1 {'0' * 40} ../../../../x/y", f"{'0' * 64} 1 {'0' * 40} /etc/passwd/a/b/c"],
)
def test_manifest_with_another_line_is_refused(tmp_path, line):
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "t.txt").write_text(f"{line}\n")
    with pytest.raises(UsageError, match=r"t\.txt, line 1: no line of a manifest"):
        manifest.read(tmp_path)


# ------------------------------------------------------------------------------------- what is committed


def tracked():
    """Files of the last commit, by their paths; None in an archive without history."""
    found = subprocess.run(["git", "ls-files", "-z"], cwd=MAIN, capture_output=True, check=False)
    return None if found.returncode else [MAIN / name for name in found.stdout.decode().split("\0") if name]


def test_every_file_of_evidence_is_in_the_history():
    """Of this very clone: what `bench store check` says. A shallow or partial clone asks its remote."""
    if not history.is_here(MAIN):
        pytest.skip("an archive without history")
    found = list(moving.check())
    assert len(found) > 1000
    lost = [entry for entry in found if not entry.where or entry.damaged]
    if lost and history.lacking(MAIN) is not None:
        pytest.skip("this clone lacks objects and its remote does not give them")
    assert lost == []


def test_every_line_has_its_record_and_every_record_its_lines():
    lines = manifest.read()
    for path in lines:
        assert (store.ROOT / path).with_name("record.json").is_file(), path
    at_hand = {path.relative_to(store.ROOT).as_posix() for path in committing.in_tree()}
    for directory, record in entries.committed():
        run = directory.relative_to(store.ROOT).as_posix()
        if record.provenance.arrays_digest is not None:
            named = f"{run}/arrays.safetensors"
            assert named in lines or named in at_hand or run.startswith("submissions/"), run


def test_the_tree_holds_no_arrays_and_stays_small():
    """Never raise the limit: evidence goes into the history by `bench store commit`."""
    paths = tracked() or [p for folder in ("docs", "leaderboard") for p in (MAIN / folder).rglob("*")]
    paths = {path for path in paths if path.exists()}
    assert 1e6 < sum(path.lstat().st_size for path in paths) < 30e6
    assert not {*committing.in_tree()} & paths

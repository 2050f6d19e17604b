"""Who may import whom, what no file may contain, and that names outside `bench` stay free."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

MAIN = Path(__file__).resolve().parent.parent
FOLDERS = {
    "bench": "bench",
    "methods": "bench.methods",
    "tasks": "bench.tasks",
    "leaderboard": "bench.leaderboard",
}
SOURCES = {
    ".".join([package, *path.relative_to(MAIN / folder).with_suffix("").parts]): path
    for folder, package in FOLDERS.items()
    for path in sorted((MAIN / folder).rglob("*.py"))
}
EVERY_PYTHON_FILE = sorted(
    path for folder in (*FOLDERS, "tests", "benchmarks", "docs") for path in (MAIN / folder).rglob("*.py")
)


def parse(path):
    return ast.parse(path.read_text(), str(path))


def imports(path, package):
    """Full names of all that a file imports at run time, wherever in the file; not what only types need."""
    names = set()

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: -node.level], *([base] if base else [])])
            names.update(f"{base}.{alias.name}" for alias in node.names)
            names.add(base)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parse(path))
    return names


def touches(names, *forbidden):
    """Those of the names that are a forbidden module or lie in it."""
    return {n for n in names for f in forbidden if n == f or n.startswith(f + ".")}


def test_reading_of_imports(tmp_path):
    """The rules below stand on this reading: every form of import is seen."""
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nimport bench.runner as r\nfrom bench import cli\n"
        "from . import engine\nfrom .tasks import split_mnist\n"
        "def f():\n    from bench.records import write\n"
        "if TYPE_CHECKING:\n    import bench.data\n"
    )
    found = touches(imports(path, "bench.x"), "bench.runner", "bench.cli", "bench.engine", "bench.data")
    assert found == {"bench.runner", "bench.cli", "bench.engine"}
    found = touches(imports(path, "bench.x"), "bench.tasks", "bench.records")
    assert found >= {"bench.tasks.split_mnist", "bench.records.write"}


ABOVE = (
    "bench.runner",
    "bench.sweep",
    "bench.tune",
    "bench.cli",
    "bench.commands",
    "bench.progress",
    "bench.wandb_log",
    "bench.leaderboard",
    "wandb",
)
ENGINE = (*ABOVE, "bench.engine", "bench.records", "bench.registry")
OTHERS = (*ENGINE, "pytorch_lightning", "lightning")
RULES = {
    # file or folder: what it must not import
    "bench.contract": (*ENGINE, "bench.data", "bench.figures", "bench.methods", "bench.tasks"),
    "bench.methods": (
        *OTHERS,
        "bench.data",
        "bench.figures",
        "bench.metrics",
        "bench.methods",
        "bench.tasks",
    ),
    "bench.tasks": (*OTHERS, "bench.methods", "torch.optim"),
    "bench.weights": (*ENGINE, "bench.data", "bench.methods", "bench.tasks"),
    "bench.engine": (*ABOVE, "bench.registry", "bench.methods", "bench.tasks"),
    "bench.records": (*ABOVE, "bench.engine"),
    "bench.runner": ("bench.cli", "bench.leaderboard", "bench.methods", "bench.tasks", "wandb"),
    "bench.leaderboard": ("bench.engine", "bench.cli", "pytorch_lightning"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_import_directions(name):
    found = imports(SOURCES[name], name)
    for of, forbidden in RULES.items():
        if name == of or name.startswith(of + "."):
            others = touches(found, *forbidden)
            assert not others, f"{name} imports {others}"


def test_every_folder_with_sources_is_a_package_of_the_wheel():
    """In the law's reading and in the package list alike: no file escapes by lying one folder deeper."""
    listed = set(tomllib.loads((MAIN / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    assert listed == {name.rpartition(".")[0] for name in SOURCES}
    assert {f"{package}.__init__" for package in listed} <= SOURCES.keys()
    assert {"bench.studies.risk", "bench.families.flow"} <= SOURCES.keys()


def test_rules_speak_of_files_that_are_there():
    packages = {name.rpartition(".")[0] for name in SOURCES}
    assert RULES.keys() <= SOURCES.keys() | packages
    for forbidden in {f for rule in RULES.values() for f in rule if f.startswith("bench.")}:
        assert forbidden in SOURCES.keys() | packages


def test_only_contract_engine_and_stacked_know_lightning():
    knowing = {
        name
        for name, path in SOURCES.items()
        if touches(imports(path, name), "pytorch_lightning", "lightning")
    }
    assert knowing == {"bench.contract", "bench.engine", "bench.stacked"}


def test_only_one_file_knows_wandb():
    assert [name for name, path in SOURCES.items() if touches(imports(path, name), "wandb")] == [
        "bench.wandb_log"
    ]


@pytest.mark.parametrize("path", EVERY_PYTHON_FILE, ids=lambda path: str(path.relative_to(MAIN)))
def test_nothing_is_unpickled(path):
    """No pickle in any form, and torch.load only where it reads weights alone."""
    assert not touches(imports(path, "x"), "pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name == "torch.load":
            assert given.get("weights_only") == "True", f"{path}:{node.lineno}"
        if name in ("np.load", "numpy.load"):
            assert given.get("allow_pickle", "False") == "False", f"{path}:{node.lineno}"
        if name.endswith("trainer.fit"):
            assert "ckpt_path" not in given or "True" in given.get("weights_only", ""), (
                f"{path}:{node.lineno}"
            )
        assert name not in ("eval", "exec", "yaml.load", "yaml.unsafe_load"), f"{path}:{node.lineno}"


def tracked():
    """Every text file that git would commit."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=MAIN, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return [MAIN / name for name in listed if (MAIN / name).is_file()]


def test_no_file_names_a_place_outside_the_project():
    outside = ["../" + "shared", "/wo" + "rk/", "/tmp/" + "work", "/ro" + "ot/"]
    files = tracked()
    assert len(files) > 30
    found = [
        f"{path.relative_to(MAIN)}: {word}"
        for path in files
        for text in [path.read_bytes()]
        for word in outside
        if word.encode() in text
    ]
    assert not found


@pytest.mark.parametrize("name", ["methods", "tasks", "leaderboard"])
def test_only_bench_is_importable(tmp_path, name):
    """Installing us must not claim top-level names."""
    code = f"import bench.{name}, importlib.util; print(importlib.util.find_spec({name!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


def test_importing_bench_is_light(tmp_path):
    """`bench --version` must not wait for torch."""
    code = (
        "import bench, sys; print([m for m in ('torch', 'pytorch_lightning', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr

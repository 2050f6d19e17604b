"""Who may import whom, what no file may contain, and that names outside `bench` stay free.

The folders of the project have an order. A file imports from its own folder and from lower ones, so that it
can be understood without those above; `test_imports_follow_the_order` holds every file to it.
"""

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_cover
"""These tests read sources and run none."""

MAIN = Path(__file__).resolve().parent.parent
FOLDERS = {
    "bench": "bench",
    "methods": "bench.methods",
    "tasks": "bench.tasks",
    "leaderboard": "bench.leaderboard",
}
EVERY_PYTHON_FILE = sorted(
    path for folder in (*FOLDERS, "tests", "benchmarks", "docs") for path in (MAIN / folder).rglob("*.py")
)


def module(package, relative):
    """Full name of a file; that of a package for its `__init__.py`."""
    parts = [package, *relative.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module(package, path.relative_to(MAIN / folder)): path
    for folder, package in FOLDERS.items()
    for path in sorted((MAIN / folder).rglob("*.py"))
}

ORDER = (
    # From bottom to top; beside each other are folders that need not know each other.
    ("bench", "bench/system", "bench/leaderboard"),
    ("bench/photographs",),
    ("bench/families", "bench/studies", "bench/studies/singular"),
    ("bench/methods", "bench/tasks", "bench/peers.py"),
    ("bench/engine",),
    ("bench/runs",),
    ("bench/sweep", "bench/laws", "bench/leaderboard/evidence", "bench/sklearn.py"),
    ("bench/leaderboard/check",),
    ("bench/leaderboard/rank",),
    ("bench/leaderboard/site",),
    ("bench/commands", "bench/cli.py", "bench/__main__.py"),
)
"""Folders, and the few files at the root that stand higher than it, as they lie in the installed package."""

DOORS = ("bench.methods.", "bench.tasks.")
"""Files that nobody imports, not even each other: the registry finds them by listing their folder."""

EXCEPTIONS = {
    # (who, whom): why
    ("bench", "bench.runs.runner"): "bench.run and bench.load, imported only when asked for",
    ("bench", "bench.runs.folders"): "bench.table, imported only when asked for",
    ("bench.tasks.own_table", "bench.sklearn"): "the estimator of a loaded run, imported only when asked for",
    ("bench.peers", "bench.methods.map"): "contestants, named and written as a user's own methods are",
}


# ---------------------------------------------------------------------------------------- reading of imports


def parse(path):
    return ast.parse(path.read_text(), str(path))


def dotted(node):
    """`a.b.c` of such an expression, else what is right of the last thing that is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(path, name):
    """Full names of all that the file of a module imports at run time, wherever in the file.

    Names below `bench` that are used without an import of their own count (`import bench;
    bench.runs.runner.run`), as do those imported by a string. What only types need does not.
    """
    names = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in dotted(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, *([base] if base else [])])
            names.update(f"{base}.{alias.name}" for alias in node.names)
            names.add(base)
        elif isinstance(node, ast.Attribute) and dotted(node).startswith("bench."):
            names.add(dotted(node))
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in DYNAMIC:
            names.update(a.value for a in node.args if isinstance(a, ast.Constant))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parse(path))
    return names


DYNAMIC = ("import_module", "__import__")
LAZY = {
    "bench.run": "bench.runs.runner",
    "bench.load": "bench.runs.runner",
    "bench.table": "bench.runs.folders",
}
"""What `bench` imports when asked for a name."""


def touches(names, *forbidden):
    """Those of the names that are a forbidden module or lie in it."""
    return {n for n in names for f in forbidden if n == f or n.startswith(f + ".")}


def resolved(names, modules):
    """The modules that names stand for: of a name inside a module, that module."""
    found = set()
    for name in names:
        name = LAZY.get(name, name)
        while name and name not in modules:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {""}


@cache
def imported():
    """Of every module the names that it imports; not read by every process that collects tests."""
    return {name: imports(path, name) for name, path in SOURCES.items()}


@cache
def graph():
    """Of every module the modules that it imports."""
    return {name: resolved(names, SOURCES) - {name} for name, names in imported().items()}


def test_reading_of_imports(tmp_path):
    """The laws below stand on this reading: every form of import is seen."""
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nimport bench.runs.runner as r\nfrom bench import cli\n"
        "from . import engine\nfrom .tasks import split_mnist\nfrom bench.studies.risk import sur\n"
        "def f():\n    from bench.runs.records import write_record\n"
        "    importlib.import_module('bench.sweep.sweep')\n    __import__('bench.sweep.tune')\n"
        "    bench.runs.registry.methods()\n"
        "if TYPE_CHECKING:\n    import bench.data\n"
    )
    expected = (
        "bench, runs, runs.runner, cli, engine, tasks, tasks.split_mnist, studies.risk, runs.records, "
        "sweep.sweep, sweep.tune, runs.registry"
    )
    found = {"bench", *(f"bench.{name}" for name in expected.split(", ")[1:])}
    assert resolved(imports(path, "bench.x"), SOURCES) == found
    path.write_text("import bench\nbench.run('map', 'split_digits')")
    assert resolved(imports(path, "bench.x"), SOURCES) == {"bench", "bench.runs.runner"}
    (tmp_path / "deep").mkdir()
    for name, text in (("__init__.py", "from .risk import sur"), ("x.py", "from .risk import sur")):
        (tmp_path / "deep" / name).write_text(text)
        who = "bench.studies" if name == "__init__.py" else "bench.studies.x"
        assert "bench.studies.risk" in resolved(imports(tmp_path / "deep" / name, who), SOURCES)
    (tmp_path / "deep" / "x.py").write_text("from ..runs import runner")
    assert "bench.runs.runner" in resolved(imports(tmp_path / "deep" / "x.py", "bench.studies.x"), SOURCES)


# -------------------------------------------------------------------------------------------------- folders


def floor_of(name, order):
    """The number of a module's file, if ORDER names it, else of its folder; None if that is not there.

    The `__init__.py` of a folder counts as a file beside the folder: it holds a docstring.
    """
    path = name.replace(".", "/")
    for place in (f"{path}.py", path.rpartition("/")[0] or path):
        for number, places in enumerate(order):
            if place in places:
                return number
    return None


def reached(graph, name):
    """Module -> the chain of imports that leads there from the named one."""
    chains = {name: (name,)}
    waiting = [name]
    for at in waiting:
        for other in sorted(graph[at] - chains.keys()):
            chains[other] = (*chains[at], other)
            waiting.append(other)
    return chains


def without(graph, exceptions):
    """A graph without some of its imports."""
    return {who: {whom for whom in others if (who, whom) not in exceptions} for who, others in graph.items()}


def slips(graph, order, exceptions):
    """What is wrong with an import graph, a sentence each; imports are followed through any number of files.

    Args:
        graph: Module -> the modules that it imports.
        order: Folders and files, from bottom to top.
        exceptions: Imports (who, whom) that are not followed.
    """
    floor = {name: floor_of(name, order) for name in graph}
    found = [f"{name} lies in no folder of ORDER" for name, number in floor.items() if number is None]
    for place in (place for places in order for place in places):
        if not any(floor_of(name, [(place,)]) is not None for name in graph):
            found.append(f"ORDER names {place}, which is not there")
    for who, whom in exceptions:
        if whom not in graph.get(who, ()):
            found.append(f"EXCEPTIONS names {who} > {whom}, which is not imported")
    kept = without(graph, exceptions)
    if None in floor.values():
        return found
    for name in graph:
        chains = reached(kept, name)
        for other, chain in chains.items():
            if floor[other] > floor[name]:
                found.append(f"{' > '.join(chain)} leads upwards")
        for other in kept[name]:
            if name in reached(kept, other):
                found.append(f"{name} > {' > '.join(reached(kept, other)[name])} is a cycle")
            if other.startswith(DOORS):
                found.append(f"{name} > {other}: methods and tasks are imported by nobody")
    return found


def test_imports_follow_the_order():
    """If it names an exception that is no longer one: delete its line."""
    assert slips(graph(), ORDER, EXCEPTIONS) == []


def test_a_newcomer_sees_at_the_root_what_methods_and_tasks_import():
    """What no method or task imports lies in a folder; the few that do not are written here, and no more."""
    authors = {name for who, others in graph().items() if who.startswith(DOORS) for name in others}
    vocabulary = {name.split(".")[1] for name in authors if name != "bench"}
    inside = {
        path.name.removesuffix(".py") for path in (MAIN / "bench").iterdir() if path.name != "__pycache__"
    }
    assert inside - vocabulary <= {
        *("__init__", "__main__", "cli", "py.typed"),  # the package and its command
        *("problem", "peers", "trees"),  # parts of the contract, and its strangers
        *("cells", "bert"),  # what `columns` and `encoding` read with
        "sklearn",  # what others know it by
        *("system", "photographs", "engine", "runs", "sweep", "laws", "commands"),
        *("methods", "tasks", "leaderboard"),  # links
    }


def test_methods_know_no_data():
    """They see a `Problem`; what data there are, and how it is scored, is the task's."""
    data = {
        *("bench.data", "bench.cifar", "bench.corruptions", "bench.photographs"),
        *("bench.tables", "bench.columns", "bench.encoding", "bench.learning", "bench.bert"),
    }
    scores = {"bench.metrics", "bench.figures", "bench.studies"}
    for name in data | scores:
        assert any(other == name or other.startswith(f"{name}.") for other in SOURCES), f"{name} is no more"
    for name in SOURCES:
        if name.startswith(("bench.methods.", "bench.families.")):
            others = reached(without(graph(), EXCEPTIONS), name)
            assert not {other for other in others if other.startswith((*data, *scores))}, name


UPRIGHT = {
    "bench": set(),
    "bench.contract": {"bench"},
    "bench.methods.a": {"bench.contract"},
    "bench.studies.s": {"bench.contract"},
    "bench.studies.t": {"bench.studies.s"},
    "bench.tasks.a": {"bench.contract", "bench.studies.t"},
    "bench.tasks.b": {"bench.contract"},
    "bench.runs.records": {"bench.contract"},
    "bench.runs.runner": {"bench.runs.records"},
}
SMALL = (
    ("bench",),
    ("bench/studies",),
    ("bench/methods", "bench/tasks"),
    ("bench/runs",),
)
SLIPS = {
    "upwards": (
        {"bench.contract": {"bench.runs.records"}},
        "bench.contract > bench.runs.records leads upwards",
    ),
    "through two files": (
        {"bench.studies.s": {"bench.runs.records"}},
        "bench.tasks.a > bench.studies.t > bench.studies.s > bench.runs.records leads upwards",
    ),
    "method and task": (
        {"bench.tasks.a": {"bench.methods.a"}},
        "bench.tasks.a > bench.methods.a: methods and",
    ),
    "task and task": ({"bench.tasks.a": {"bench.tasks.b"}}, "bench.tasks.a > bench.tasks.b: methods and"),
    "engine and method": (
        {"bench.runs.runner": {"bench.methods.a"}},
        "bench.runs.runner > bench.methods.a: methods and",
    ),
    "two files that need each other": (
        {"bench.runs.records": {"bench.runs.runner"}},
        "bench.runs.records > bench.runs.runner > bench.runs.records is a cycle",
    ),
    "three files in a ring": (
        {"bench.studies.s": {"bench.studies.u"}, "bench.studies.u": {"bench.studies.t"}},
        "bench.studies.s > bench.studies.u > bench.studies.t > bench.studies.s is a cycle",
    ),
    "a file in no folder": ({"bench.rooms.a": set()}, "bench.rooms.a lies in no folder"),
    "a file in a deeper folder": ({"bench.runs.deep.a": set()}, "bench.runs.deep.a lies in no folder"),
}


@pytest.mark.parametrize(("change", "sentence"), SLIPS.values(), ids=SLIPS)
def test_made_up_slips_are_caught(change, sentence):
    assert slips(UPRIGHT, SMALL, {}) == []
    found = slips(
        {name: UPRIGHT.get(name, set()) | change.get(name, set()) for name in UPRIGHT | change}, SMALL, {}
    )
    assert [f for f in found if f.startswith(sentence)], found


def test_exceptions_and_folders_that_are_no_more_are_caught():
    who, whom = "bench.contract", "bench.runs.records"
    graph = UPRIGHT | {who: {whom}}
    assert slips(graph, SMALL, {(who, whom): "why"}) == []
    assert slips(UPRIGHT, SMALL, {(who, whom): "why"}) == [
        f"EXCEPTIONS names {who} > {whom}, which is not imported"
    ]
    assert slips(UPRIGHT, (*SMALL, ("bench/gone",)), {}) == ["ORDER names bench/gone, which is not there"]


def test_exceptions_say_why():
    assert all(len(reason) > 10 for reason in EXCEPTIONS.values())


def test_every_folder_with_sources_is_a_package_of_the_wheel():
    """In the law's reading and in the package list alike: no file escapes by lying one folder deeper."""
    listed = set(tomllib.loads((MAIN / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    packages = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    assert listed == packages == {name.rpartition(".")[0] for name in SOURCES} - {""}
    assert {"bench.studies.risk", "bench.families.flow"} <= SOURCES.keys()


@pytest.mark.parametrize("folder", ["methods", "tasks", "leaderboard"])
def test_tools_that_read_sources_find_the_packages_outside_of_bench(folder):
    """By links, since no type checker or editor reads the mapping of an editable install.

    In a checkout without links (git on Windows, unless `core.symlinks` is set) that mapping is enough to run.
    """
    link = MAIN / "bench" / folder
    if link.is_file():
        pytest.skip("this checkout has no symbolic links")
    assert link.samefile(MAIN / folder)
    assert not Path(os.readlink(link)).is_absolute()
    package = importlib.import_module(f"bench.{folder}")
    assert list(package.__path__) == [str(MAIN / folder)]  # no module is told by the way through the link


# ------------------------------------------------------------------------------------- what is not of bench


def knowing(*names):
    """Files that import one of the modules themselves."""
    return {name for name, found in imported().items() if touches(found, *names)}


def test_only_the_contract_and_what_trains_know_lightning():
    assert knowing("pytorch_lightning", "lightning") == {
        "bench.contract",
        "bench.engine.stacked",
        "bench.engine.steps",
        "bench.engine.trainer",
        "bench.engine.watch",
    }


def test_methods_do_not_touch_the_trainer():
    """`Method` gives what they need of it: the epoch, its last step, a decision for all processes."""
    found = [
        f"{name}:{node.lineno}"
        for name, path in SOURCES.items()
        if name.startswith(("bench.methods.", "bench.families."))
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and node.attr in ("trainer", "_trainer")
    ]
    assert not found


def lengths(kinds):
    """Lines of every function or class of the project, by file and name."""
    return {
        f"{path.relative_to(MAIN)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in SOURCES.values()
        for node in ast.walk(parse(path))
        if isinstance(node, kinds)
    }


def test_no_function_or_class_is_too_long_to_be_read():
    """A function is seen whole: 60 lines with its docstring. So is a class, on some pages: 320."""
    functions, classes = lengths((ast.FunctionDef, ast.AsyncFunctionDef)), lengths(ast.ClassDef)
    assert len(functions) > 1000
    assert {name: n for name, n in functions.items() if n > 60} == {}
    assert {name: n for name, n in classes.items() if n > 320} == {}


@pytest.mark.parametrize(
    ("package", "files"),
    [
        ("wandb", {"bench.runs.wandb_run", "bench.commands.dashboard"}),
        ("wandb_workspaces", {"bench.commands.dashboard"}),
        ("tensorboard", {"bench.runs.loggers"}),
        ("torch.utils.tensorboard", {"bench.runs.loggers"}),
    ],
)
def test_few_files_know_a_logger(package, files):
    assert knowing(package) == files


def test_no_file_needs_the_tools_of_tests():
    """The laws are held from an installed wheel, which brings no pytest."""
    assert not knowing("pytest")
    assert not knowing("hypothesis")


def test_tasks_know_no_optimiser_and_the_leaderboard_no_engine():
    assert not {name for name in knowing("torch.optim") if name.startswith("bench.tasks.")}
    assert not {
        name
        for name in graph()
        if name.startswith("bench.leaderboard.") and "bench.engine.engine" in graph()[name]
    }


def test_only_the_registry_imports_what_a_string_says():
    """Any other file could hide from the order that way."""
    assert {
        name
        for name, path in SOURCES.items()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Name | ast.Attribute | ast.alias)
        and ast.unparse(node).split(".")[-1].split(" ")[0] in DYNAMIC
    } == {"bench.runs.registry"}


SAFE = ("weights_only", "allow_pickle", "ckpt_path")
"""Arguments by which a function reads plain numbers alone."""


@pytest.mark.parametrize("path", EVERY_PYTHON_FILE, ids=lambda path: str(path.relative_to(MAIN)))
def test_nothing_is_unpickled(path):
    """No pickle in any form, and torch.load only where it reads weights alone."""
    assert not touches(imports(path, "x"), "pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Call):
            continue
        name, where = dotted(node.func), f"{path}:{node.lineno}"
        given = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg in SAFE}
        if name == "torch.load":
            assert given.get("weights_only") == "True", where
        if name in ("np.load", "numpy.load"):
            assert given.get("allow_pickle", "False") == "False", where
        if name.endswith("trainer.fit"):
            assert "ckpt_path" not in given or "True" in given.get("weights_only", ""), where
        assert name not in ("eval", "exec", "yaml.load", "yaml.unsafe_load"), where


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
        # CI fills its folder of data from beside the checkout, where they are.
        and (path, word) != (MAIN / ".ci" / "run", outside[0])
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

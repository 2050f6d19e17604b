"""Who may import whom, what no file may contain, and that names outside `bench` stay free.

The files of the project stand on floors. A file imports from its own floor and from lower ones, so that it
can be understood without those above; `test_imports_follow_the_floors` holds every file to it. A new file is
entered in FLOORS, on the lowest floor from which it reaches all that it imports.
"""

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

FLOORS = {
    # From bottom to top; `.*` stands for every file below a folder.
    "ground": {
        *("bench", "bench.families", "bench.studies", "bench.methods", "bench.tasks", "bench.leaderboard"),
        *("bench.commands", "bench.intervals", "bench.leaderboard.site"),
        *("bench.errors", "bench.files", "bench.text", "bench.settings", "bench.randomness", "bench.signals"),
        *("bench.predictions", "bench.weights", "bench.networks", "bench.resnet", "bench.optimizers"),
        *("bench.names", "bench.source", "bench.augmentation", "bench.processes", "bench.own_network"),
    },
    "contract": {
        *("bench.contract", "bench.spec", "bench.problem", "bench.hooks", "bench.comparison"),
        "bench.closed_form",
    },
    "what methods and tasks compute with": {
        *("bench.priors", "bench.likelihoods", "bench.divergence", "bench.energy"),
        *("bench.batches", "bench.diagnostics"),
    },
    "what methods share": {"bench.families.*"},
    "methods": {"bench.methods.*", "bench.peers"},
    "data and scores": {
        *(
            "bench.places",
            "bench.data",
            "bench.cifar",
            "bench.corruptions",
            "bench.tables",
            "bench.encoding",
            "bench.metrics",
            "bench.figures",
        ),
        *("bench.preprocessing", "bench.photograph_sources", "bench.photographs", "bench.preparing"),
        *("bench.fundus", "bench.fundus_population", "bench.fundus_photograph"),
    },
    "what tasks share": {"bench.studies.*"},
    "tasks": {"bench.tasks.*"},
    "engine": {
        *("bench.ensemble", "bench.compiled", "bench.stacked"),
        *("bench.checkpoints", "bench.watch", "bench.trainer", "bench.predicting", "bench.spreading"),
        *("bench.fitting", "bench.engine"),
    },
    "names and records": {"bench.catalogue", "bench.registry", "bench.index", "bench.records"},
    "one run": {
        "bench.plan",
        "bench.claim",
        "bench.job",
        "bench.forecast",
        "bench.runner",
        "bench.loggers",
        "bench.events",
        "bench.wandb_run",
    },
    "many runs": {
        *("bench.progress", "bench.runs", "bench.means", "bench.sweep", "bench.tune", "bench.leaderboard.*"),
        *(
            "bench.cells",
            "bench.costs",
            "bench.worker",
            "bench.workers",
            "bench.workers_ray",
            "bench.workers_slurm",
            "bench.tpe",
            "bench.dispatch",
        ),
    },
    "command line": {"bench.sweep_view", "bench.commands.*", "bench.cli", "bench.__main__"},
}

DOORS = ("bench.methods.", "bench.tasks.")
"""Files that nobody imports, not even each other: the registry finds them by listing their folder."""

EXCEPTIONS = {
    # (who, whom): why
    ("bench", "bench.runner"): "bench.run and bench.load, imported only when asked for",
    ("bench", "bench.runs"): "bench.table, imported only when asked for",
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

    Names below `bench` that are used without an import of their own count (`import bench; bench.runner.run`),
    as do those imported by a string. What only types need does not.
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
LAZY = {"bench.run": "bench.runner", "bench.load": "bench.runner", "bench.table": "bench.runs"}
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


GRAPH = {name: resolved(imports(path, name), SOURCES) - {name} for name, path in SOURCES.items()}


def test_reading_of_imports(tmp_path):
    """The laws below stand on this reading: every form of import is seen."""
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nimport bench.runner as r\nfrom bench import cli\n"
        "from . import engine\nfrom .tasks import split_mnist\nfrom bench.studies.risk import sur\n"
        "def f():\n    from bench.records import write_record\n"
        "    importlib.import_module('bench.sweep')\n    __import__('bench.tune')\n"
        "    bench.registry.methods()\n"
        "if TYPE_CHECKING:\n    import bench.data\n"
    )
    expected = (
        "bench, runner, cli, engine, tasks, tasks.split_mnist, studies.risk, records, sweep, tune, registry"
    )
    found = {"bench", *(f"bench.{name}" for name in expected.split(", ")[1:])}
    assert resolved(imports(path, "bench.x"), SOURCES) == found
    path.write_text("import bench\nbench.run('map', 'split_digits')")
    assert resolved(imports(path, "bench.x"), SOURCES) == {"bench", "bench.runner"}
    (tmp_path / "deep").mkdir()
    for name, text in (("__init__.py", "from .risk import sur"), ("x.py", "from .risk import sur")):
        (tmp_path / "deep" / name).write_text(text)
        who = "bench.studies" if name == "__init__.py" else "bench.studies.x"
        assert "bench.studies.risk" in resolved(imports(tmp_path / "deep" / name, who), SOURCES)
    (tmp_path / "deep" / "x.py").write_text("from .. import runner")
    assert "bench.runner" in resolved(imports(tmp_path / "deep" / "x.py", "bench.studies.x"), SOURCES)


# --------------------------------------------------------------------------------------------------- floors


def floors_of(name, floors):
    """Numbers of the floors on which a module stands; a folder's pattern yields to the module's own name."""
    named = [number for number, names in enumerate(floors.values()) if name in names]
    return named or [n for n, names in enumerate(floors.values()) for entry in names if covers(entry, name)]


def covers(entry, name):
    """Whether an entry of FLOORS is a pattern that takes in a module."""
    return entry.endswith(".*") and name.startswith(entry.removesuffix("*"))


def reached(graph, name):
    """Module -> the chain of imports that leads there from the named one."""
    chains = {name: (name,)}
    waiting = [name]
    for at in waiting:
        for other in sorted(graph[at] - chains.keys()):
            chains[other] = (*chains[at], other)
            waiting.append(other)
    return chains


def slips(graph, floors, exceptions):
    """What is wrong with an import graph, a sentence each; imports are followed through any number of files.

    Args:
        graph: Module -> the modules that it imports.
        floors: Floor -> its modules, from bottom to top.
        exceptions: Imports (who, whom) that are not followed.
    """
    found = []
    floor = {name: floors_of(name, floors) for name in graph}
    for name, numbers in floor.items():
        if len(numbers) != 1:
            found.append(f"{name} stands on {len(numbers)} floors: enter it in FLOORS of this file, once")
    for names in floors.values():
        for entry in names:
            if entry not in graph and not any(covers(entry, name) for name in graph):
                found.append(f"FLOORS names {entry}, which is not there")
    for who, whom in exceptions:
        if whom not in graph.get(who, ()):
            found.append(f"EXCEPTIONS names {who} > {whom}, which is not imported")
    kept = {who: {whom for whom in others if (who, whom) not in exceptions} for who, others in graph.items()}
    if any(len(numbers) != 1 for numbers in floor.values()):
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


def test_imports_follow_the_floors():
    """If it names an exception that is no longer one: delete its line."""
    assert slips(GRAPH, FLOORS, EXCEPTIONS) == []


UPRIGHT = {
    "bench": set(),
    "bench.contract": {"bench"},
    "bench.methods.a": {"bench.contract"},
    "bench.studies.s": {"bench.contract"},
    "bench.studies.t": {"bench.studies.s"},
    "bench.tasks.a": {"bench.contract", "bench.studies.t"},
    "bench.tasks.b": {"bench.contract"},
    "bench.records": {"bench.contract"},
    "bench.runner": {"bench.records"},
}
SMALL = {
    "ground": {"bench"},
    "contract": {"bench.contract"},
    "methods": {"bench.methods.*"},
    "studies": {"bench.studies.*"},
    "tasks": {"bench.tasks.*"},
    "top": {"bench.records", "bench.runner"},
}
SLIPS = {
    "upwards": ({"bench.contract": {"bench.records"}}, "bench.contract > bench.records leads upwards"),
    "through two files": (
        {"bench.studies.s": {"bench.records"}},
        "bench.tasks.a > bench.studies.t > bench.studies.s > bench.records leads upwards",
    ),
    "method and task": (
        {"bench.tasks.a": {"bench.methods.a"}},
        "bench.tasks.a > bench.methods.a: methods and",
    ),
    "task and task": ({"bench.tasks.a": {"bench.tasks.b"}}, "bench.tasks.a > bench.tasks.b: methods and"),
    "engine and method": (
        {"bench.runner": {"bench.methods.a"}},
        "bench.runner > bench.methods.a: methods and",
    ),
    "two files that need each other": (
        {"bench.records": {"bench.runner"}},
        "bench.records > bench.runner > bench.records is a cycle",
    ),
    "three files in a ring": (
        {"bench.studies.s": {"bench.studies.u"}, "bench.studies.u": {"bench.studies.t"}},
        "bench.studies.s > bench.studies.u > bench.studies.t > bench.studies.s is a cycle",
    ),
    "a file on no floor": (
        {"bench.helper": set(), "bench.tasks.a": {"bench.helper"}},
        "bench.helper stands on 0",
    ),
    "a file on no floor in a new folder": ({"bench.rooms.a": set()}, "bench.rooms.a stands on 0"),
    "a folder deeper": (
        {"bench.studies.deep.x": {"bench.runner"}},
        "bench.studies.deep.x > bench.runner leads upwards",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), SLIPS.values(), ids=SLIPS)
def test_made_up_slips_are_caught(change, sentence):
    assert slips(UPRIGHT, SMALL, {}) == []
    found = slips(
        {name: UPRIGHT.get(name, set()) | change.get(name, set()) for name in UPRIGHT | change}, SMALL, {}
    )
    assert [f for f in found if f.startswith(sentence)], found


def test_exceptions_and_floors_that_are_no_more_are_caught():
    who, whom = "bench.contract", "bench.records"
    graph = UPRIGHT | {who: {whom}}
    assert slips(graph, SMALL, {(who, whom): "why"}) == []
    assert slips(UPRIGHT, SMALL, {(who, whom): "why"}) == [
        f"EXCEPTIONS names {who} > {whom}, which is not imported"
    ]
    assert slips(UPRIGHT, SMALL | {"roof": {"bench.gone"}}, {}) == [
        "FLOORS names bench.gone, which is not there"
    ]
    (found,) = slips(UPRIGHT, SMALL | {"roof": {"bench.runner"}}, {})
    assert found.startswith("bench.runner stands on 2 floors")


def test_exceptions_say_why():
    assert all(len(reason) > 10 for reason in EXCEPTIONS.values())


def test_every_folder_with_sources_is_a_package_of_the_wheel():
    """In the law's reading and in the package list alike: no file escapes by lying one folder deeper."""
    listed = set(tomllib.loads((MAIN / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    packages = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    assert listed == packages == {name.rpartition(".")[0] for name in SOURCES} - {""}
    assert {"bench.studies.risk", "bench.families.flow"} <= SOURCES.keys()


# ------------------------------------------------------------------------------------- what is not of bench


def knowing(*names):
    """Files that import one of the modules themselves."""
    return {name for name, path in SOURCES.items() if touches(imports(path, name), *names)}


def test_only_hooks_trainer_watch_and_stacked_know_lightning():
    assert knowing("pytorch_lightning", "lightning") == {
        "bench.hooks",
        "bench.stacked",
        "bench.trainer",
        "bench.watch",
    }


def test_methods_do_not_touch_the_trainer():
    """What they need of it `bench.hooks` gives: the epoch, its last step, a decision for all processes."""
    found = [
        f"{name}:{node.lineno}"
        for name, path in SOURCES.items()
        if name.startswith(("bench.methods.", "bench.families."))
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and node.attr in ("trainer", "_trainer")
    ]
    assert not found


def test_no_file_is_too_long_to_be_read():
    """In one go: 450 lines in bench, 400 in the contract, which a newcomer reads first."""
    sources = {name: path for name, path in SOURCES.items() if "bench" in path.relative_to(MAIN).parts}
    lines = {name: len(path.read_text().splitlines()) for name, path in sources.items()}
    assert {name: n for name, n in lines.items() if n > 450} == {}
    assert lines["bench.contract"] < 400


@pytest.mark.parametrize(
    ("package", "files"),
    [
        ("wandb", {"bench.wandb_run", "bench.commands.dashboard"}),
        ("wandb_workspaces", {"bench.commands.dashboard"}),
        ("tensorboard", {"bench.loggers"}),
        ("torch.utils.tensorboard", {"bench.loggers"}),
    ],
)
def test_few_files_know_a_logger(package, files):
    assert knowing(package) == files


def test_tasks_know_no_optimiser_and_the_leaderboard_no_engine():
    assert not {name for name in knowing("torch.optim") if name.startswith("bench.tasks.")}
    assert not {
        name for name in GRAPH if name.startswith("bench.leaderboard.") and "bench.engine" in GRAPH[name]
    }


def test_only_catalogue_and_registry_import_what_a_string_says():
    """Any other file could hide from the floors that way."""
    assert {
        name
        for name, path in SOURCES.items()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Name | ast.Attribute | ast.alias)
        and ast.unparse(node).split(".")[-1].split(" ")[0] in DYNAMIC
    } == {"bench.registry", "bench.catalogue"}


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

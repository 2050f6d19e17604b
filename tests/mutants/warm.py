"""A process that imports what it is told, and runs tests in forks of itself: to import torch takes seconds.

It reads a line of JSON per job, `{"tree", "file", "tests", "told"}`, and answers with the exit status of the
fork, which wrote what came of the tests to `told`. It imports nothing of the project, which each fork takes
from its own tree.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

SECONDS = 300
"""Time after which a fork is ended."""


class Witness:
    """A plugin of pytest that notes how tests ended."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[dict[str, Any]] = []
        self.broken: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Any:
        """Notes a test that passed or failed; one that is skipped did neither."""
        report = yield
        if report.failed and call.excinfo is not None:
            kind = call.excinfo.type
            asserts = call.when == "call" and issubclass(kind, AssertionError | pytest.fail.Exception)
            said = f"{kind.__name__}: {call.excinfo.value}".splitlines()[0]
            self.failed.append({"test": item.nodeid, "asserts": asserts, "said": said})
        elif call.when == "call" and report.passed:
            self.passed.append(item.nodeid)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes a file that cannot be collected."""
        if report.failed:
            self.broken.append(str(report.longrepr).strip().splitlines()[-1])


def run(job: dict[str, Any]) -> None:
    """Runs a job's tests in this process, and writes what came of them."""
    tree = Path(job["tree"])
    os.chdir(tree)
    sys.path[0] = os.environ["PYTHONPATH"] = str(tree)
    witness = Witness()
    code = pytest.main([*job["tests"], "-x", "-q", "-p", "no:cacheprovider"], plugins=[witness])
    files = {name: Path(m.__file__) for name, m in sys.modules.items() if getattr(m, "__file__", None)}
    found = {
        "code": int(code),
        "imported": any(path.resolve() == tree.resolve() / job["file"] for path in files.values()),
        "outside": [n for n, p in files.items() if n.split(".")[0] == "bench" and tree not in p.parents],
        **vars(witness),
    }
    Path(job["told"]).write_text(json.dumps(found))


def main() -> None:
    """Serves jobs until there are no more."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            with open(job["told"] + ".log", "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            try:
                run(job)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()

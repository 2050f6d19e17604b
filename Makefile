# make demo | test | test-fast | test-ddp | test-mutants | lint | site | clean
# Another interpreter: make test PYTHON=python3.12. More options for pytest: make test ARGS='-k radial -x'.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --no-compile
ARGS ?=
# A process of one thread per core, and one more, since tests wait for disks, browsers and other processes a seventh
# of their time; each takes about 1 GB. Each file's tests are in one of them, since they share runs.
CORES = $(shell nproc || getconf _NPROCESSORS_ONLN)
PARALLEL = -n $(shell expr $(CORES) + 1) --dist loadfile --no-loadscope-reorder
test test-fast test-ddp test-mutants: export OMP_NUM_THREADS := 1
# Tests start many processes: each would compile every source again.
test test-fast test-ddp test-mutants: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-fast test-ddp test-mutants lint site clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo 'make demo       install, then run radial on split_digits (about a minute on two cores, no download of data)'
	@echo 'make test       every test, with coverage of at least 90 %'
	@echo 'make test-fast  every law once on every method, in under five minutes on two cores'
	@echo 'make test-ddp   every method on every task in two and in three processes, beside one (40 minutes on two cores)'
	@echo 'make test-mutants every planted fault of the science by itself: each must be seen by a test (ten minutes of processor time)'
	@echo 'make lint       ruff, mypy, and the modules of the wheel'
	@echo 'make site       the documentation with the board, in website/index.html (no network)'
	@echo 'make clean      remove everything that make made, $(VENV) too'

demo: $(VENV)/.installed-demo
	$(BIN)/bench run radial split_digits --force

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=term-missing:skip-covered --cov-fail-under=90 $(ARGS)

test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not gpu' $(ARGS)

test-ddp: $(VENV)/.installed
	BENCH_TEST_DDP=1 $(BIN)/python -m pytest tests/test_ddp.py $(ARGS)

# A line as each fault ends, and what survived once more at the end; ARGS='-k laplace' takes those of that name.
test-mutants: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --dist worksteal -v -p no:cacheprovider tests/mutants/every_fault.py $(ARGS)

# A worker of mypy has three seconds to start, which a busy machine may not give it; mypy then ends with 2, and one
# process, which needs no worker, checks the same.
# mypy reads the sources: links in bench/ lead to the packages that lie in folders of their own. The wheel has
# to hold the same modules, of which only the list in pyproject.toml makes sure.
lint: $(VENV)/.installed
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy --num-workers $(CORES) -p bench || { [ $$? -eq 2 ] && $(BIN)/python -m mypy -p bench; }
	@rm -rf .lint build
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir .lint .
	@rm -rf build
	@find bench methods tasks leaderboard -name '*.py' \
	  | awk '{ print (/^bench/ ? "" : "bench/") $$0 }' | LC_ALL=C sort > .lint/sources
	@$(BIN)/python -m zipfile -l .lint/*.whl | awk '$$1 ~ /\.py$$/ { print $$1 }' | LC_ALL=C sort > .lint/wheel
	@diff .lint/sources .lint/wheel || { echo 'the wheel holds other modules than the sources: see [tool.setuptools] in pyproject.toml' >&2; exit 1; }

site: $(VENV)/.installed-site
	$(BIN)/python docs/website.py

clean:
	rm -rf $(VENV) .lint website build dist posterior_bench.egg-info .coverage .coverage.* \
	  .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find bench methods tasks leaderboard tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo "posterior-bench needs Python 3.11, 3.12 or 3.13; $(PYTHON) is: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo 'name another one: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo '$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@touch $@

$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(VENV)/.created
	$(INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.created
	$(INSTALL) -c constraints.txt -e '.[test]'
	@touch $(VENV)/.installed-demo $@

$(VENV)/.installed-site: pyproject.toml constraints.txt | $(VENV)/.created
	$(INSTALL) -c constraints.txt -e '.[docs]'
	@touch $(VENV)/.installed-demo $@

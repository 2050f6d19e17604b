# make demo | test | test-fast | test-ddp | lint | site | clean
# Another interpreter: make test PYTHON=python3.12. More options for pytest: make test ARGS='-k radial -x'.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
# A process per core, of one thread; each file's tests are in one of them, since they share runs.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder
test test-fast test-ddp: export OMP_NUM_THREADS := 1
# Tests start many processes: each would compile every source again.
test test-fast test-ddp: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-fast test-ddp lint site clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo 'make demo       install, then run radial on split_digits (about a minute on two cores, no download of data)'
	@echo 'make test       every test, with coverage of at least 90 %'
	@echo 'make test-fast  every law once on every method, in under five minutes on two cores'
	@echo 'make test-ddp   every method on every task in two and in three processes, beside one (40 minutes on two cores)'
	@echo 'make lint       ruff, the wheel, and mypy on the wheel'
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

# The source tree has the packages bench.methods, bench.tasks and bench.leaderboard in folders of
# its root, where mypy does not look for them; so mypy reads the built wheel, away from the sources,
# and its messages are rewritten to name the sources.
lint: $(VENV)/.installed
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	@rm -rf .lint build
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir .lint .
	@rm -rf build
	$(PIP) install --quiet --no-deps --no-compile --target .lint/site .lint/*.whl
	@find bench methods tasks leaderboard -name '*.py' | sed 's|^bench/||' | LC_ALL=C sort > .lint/sources
	@(cd .lint/site/bench && find . -name '*.py') | sed 's|^\./||' | LC_ALL=C sort > .lint/wheel
	@diff .lint/sources .lint/wheel || { echo 'the wheel holds other modules than the sources: see [tool.setuptools] in pyproject.toml' >&2; exit 1; }
	@test "$$(ls .lint/site | grep -vc -e dist-info -e '^bin$$')" = 1 || { echo 'the wheel holds another top-level package than bench' >&2; exit 1; }
	@echo 'mypy -p bench (on the wheel)'
	@status=0; (cd .lint && MYPYPATH=site ../$(BIN)/python -m mypy --config-file ../pyproject.toml \
	  --cache-dir ../.mypy_cache -p bench) > .lint/mypy.txt || status=$$?; \
	  sed -E 's,^site/bench/((methods|tasks|leaderboard)/),\1,; s,^site/,,' .lint/mypy.txt; exit $$status

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
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) install -c constraints.txt -e '.[test]'
	@touch $(VENV)/.installed-demo $@

$(VENV)/.installed-site: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $(VENV)/.installed-demo $@

# Needs make, Python 3.11 or newer, and a package index that pip can reach. Everything else goes to .venv.

PYTHON ?= python3
SEEDS ?= 20000
PYTEST_ARGS ?= -n 3
LOCK_ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo check test coverage lint docs bench soak lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(INSTALLED) ## make .venv with everything that is locked (PYTHON=python3.12 chooses the Python)

demo: $(INSTALLED) ## show what inturn does, in a minute; draws demo-report.html
	$(VENV)/bin/inturn demo

check: lint ## lint, unit tests, the contract suite on one bed, and 50 simulated histories: within 3 minutes
	$(PY) -m pytest $(PYTEST_ARGS) --quick
	$(PY) -m simulator.soak --seeds 50

test: lint ## lint, all tests, and 300 simulated histories (PYTEST_ARGS="-n 3")
	$(PY) -m pytest $(PYTEST_ARGS)
	$(PY) -m simulator.soak --seeds 300

coverage: $(INSTALLED) ## the share of lines and branches that the tests of `make check` run
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest --quick
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report --skip-covered --sort=cover

lint: $(INSTALLED) ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(INSTALLED) ## write docs/requirements.md again, from the tests
	$(PY) -m tests.requirement_table

bench: $(INSTALLED) ## all benchmarks, full length
	$(VENV)/bin/inturn bench all

soak: $(INSTALLED) ## the simulation, over SEEDS=20000 seeds; or HOURS=2, half of it with real processes and faults
ifdef HOURS
	$(PY) -m simulator.soak --minutes $$(awk 'BEGIN { print $(HOURS) * 30 }')
	$(PY) -m simulator.processes.soak --minutes $$(awk 'BEGIN { print $(HOURS) * 30 }')
else
	$(PY) -m pytest $(PYTEST_ARGS) -m slow
	$(PY) -m simulator.soak --seeds $(SEEDS)
endif

lock: | $(PY) ## write requirements.lock again (LOCK_ARGS=--upgrade for newer versions)
	$(PY) -m uv --version >/dev/null 2>&1 || $(PY) -m pip install --quiet uv
	$(PY) -m uv pip compile pyproject.toml --extra dev --extra otel --extra plot --extra postgres --extra spark --extra zstd \
		--universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-emit-find-links \
		--no-annotate --quiet $(LOCK_ARGS) --output-file requirements.lock

clean: ## remove .venv, caches and what was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* htmlcov
	find src tests examples benchmarks simulator demo -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "inturn needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing);" \
			"choose another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): requirements.lock pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

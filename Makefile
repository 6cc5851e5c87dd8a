# `make serve` and `make test` need Python 3.11 or newer, gcc and git, and nothing else.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
PYTEST := $(BIN)/python -m pytest

.PHONY: help serve test setup setup-dev lint format unit guard kernels plugin state tree train e2e gpu docs clean

help:
	@echo "make serve   set up, then serve the bundled tiny model on 127.0.0.1:8000 (ARGS=… are thor-spec serve's)"
	@echo "make test    set up, then lint and every test that this machine can run"
	@echo "also: lint format unit guard kernels plugin state tree train e2e gpu docs clean"

serve: setup
	@$(BIN)/thor-spec serve $(ARGS)

# Tests that share engines or servers share a file, and a file a worker: the long ones first, where the number of a file's
# tests does not tell.
test: lint
	$(PYTEST) -n auto --dist loadfile --no-loadscope-reorder tests/plugin tests/kernels tests/train tests/unit $(ARGS)
	$(PYTEST) -n auto --dist loadfile tests/state tests/tree $(ARGS)
	$(PYTEST) -n auto --dist loadfile tests/guard tests/serve $(ARGS)
	$(PYTEST) -n auto --dist loadfile --no-loadscope-reorder tests/e2e $(ARGS)

setup:
	@$(PYTHON) tools/setup.py

setup-dev:
	@$(PYTHON) tools/setup.py --dev

lint: setup-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/cli_docs.py --check

format: setup-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

unit guard kernels plugin state tree train e2e: setup-dev
	$(PYTEST) tests/$@ $(ARGS)

gpu: setup-dev
	$(PYTEST) -m gpu $(ARGS)

docs: setup-dev
	$(BIN)/python tools/cli_docs.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Each target does its own set-up: a virtual environment in .venv, torch first, then the package.
# Needs Python 3.10 or newer and a C++ compiler. PYTHON=... picks another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
PYTEST_ARGS ?= -n 2
# Everything in the tests is small: more threads only wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: help demo test test-all check lint format clean

help:
	@echo "make demo      Gemma-3-270M with real weights, eager against kvtailor (a few minutes)"
	@echo "make test      the tests that are neither slow nor need a GPU"
	@echo "make test-all  every test"
	@echo "make check     linters, types and make test: what CI runs"
	@echo "make format    format the code"
	@echo "make clean     remove .venv and caches"

demo: $(VENV)/demo.stamp
	$(BIN)/kvtailor demo

test: $(VENV)/dev.stamp
	$(PYTEST) -m "not slow and not gpu"

test-all: $(VENV)/dev.stamp
	$(PYTEST)

check: lint test

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch on its own and first: another package's range must not choose its version.
$(VENV)/torch.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "kvtailor needs Python 3.10 or newer, got $$($(PYTHON) -V)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch into $(VENV)"
	$(INSTALL) torch
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/torch.stamp
	@echo "installing kvtailor[dev] into $(VENV)"
	$(INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/demo.stamp: pyproject.toml $(VENV)/torch.stamp
	@echo "installing kvtailor[demo] into $(VENV): the weights are 250 MB"
	$(INSTALL) -e '.[demo]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

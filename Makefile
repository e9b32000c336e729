# make serve ARGS="layout=dop ranks=4"    make test ARGS="-k layouts"    make test JOBS=0    make check
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Processes that share the tests, each a file at a time; 0: this one alone.
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PINS := pyproject.toml constraints.txt

.PHONY: serve test check format clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo 'make serve   start the server on this machine   (ARGS="layout=dop ranks=4 port=8000")'
	@echo 'make test    run every test this machine can    (ARGS="-k layouts")'
	@echo 'make check   lint, formatting, types and import direction'
	@echo 'make format  rewrite the code as the formatter wants it'
	@echo 'make clean   remove the environment and every cache'

serve: $(VENV)/.installed
	@exec $(BIN)/python -m splash.serve $(ARGS)

test: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

check: $(VENV)/.installed-dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/check

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pinned torch goes first and by itself, so that an index that offers a CPU build is taken at its word.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "SPLASH needs Python 3.11 or later; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch

$(VENV)/.installed: $(PINS) | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(PINS) | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make lab` opens JupyterLab on the notebooks, `make test` runs every test.
# Both make the environment that they need in .venv, once.

PYTHON ?= python3
PORT ?=
ARGS ?=
BIN := .venv/bin
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help lab test lint format notebooks clean

help:
	@echo "make lab [PORT=8890] [ARGS=--no-browser]   JupyterLab on the notebooks"
	@echo "make test                                  lint, types, tests, notebooks"
	@echo "make format                                format the code"
	@echo "make notebooks                             run the notebooks, save outputs"
	@echo "make clean                                 remove .venv"

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "labkit needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	    "Name another one: make lab PYTHON=python3.12"; exit 1; }
	@echo "Making .venv with $$($(PYTHON) -V); the first time takes a few minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[test]"
	@touch $@

lab: .venv/installed
	@echo "Starting JupyterLab; open the URL with the token that it prints."
	$(BIN)/jupyter lab $(ROOT) $(if $(PORT),--port=$(PORT)) $(ARGS) notebooks

test: .venv/installed lint
	$(BIN)/pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: .venv/installed
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb

clean:
	rm -rf .venv

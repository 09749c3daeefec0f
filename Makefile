# Every target makes its own virtual environment, .venv, with the pinned versions of .ci/constraints.txt, and nothing else
# of the machine is touched. `make PYTHON=python3.12 ...` chooses the Python. The MPI comes with it (the `mpi` extra), so that
# tests and figures are of a known one; `make EXTRAS=test,models ...` uses the machine's own MPI instead.

PYTHON ?= python3
EXTRAS ?= test,models,mpi

VENV := .venv
STAMP := $(VENV)/.installed
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help demo check test smoke bench golden clean

help: ## Show this list
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):[^#]*## /\1\t/; s/%/N/' | \
		awk -F '\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

demo: $(STAMP) ## Compile the quick start, train it with sync on the device and through the host, compare
	sambasim demo

check: $(STAMP) ## Lint, formatting, strict types, and the walls between the rooms
	ruff check sambasim tests
	ruff format --check sambasim tests
	mypy
	lint-imports

test: check ## Everything in check, then every test
	pytest

test-mpi-%: $(STAMP) ## The MPI tests, each at N ranks
	SAMBASIM_TEST_RANKS=$* pytest tests/mpi

smoke: $(STAMP) ## The quick start at its tiniest: an exit code and one line of JSON
	sambasim demo --smoke

bench: $(STAMP) ## Measure against the named peers; ratios, each from one run
	python -m tests.benchmarks

golden: $(STAMP) ## Write the golden files of the tests anew; look at the difference before you commit it
	pytest tests/golden --update-golden

clean: ## Remove the virtual environment and everything that tools left
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find sambasim tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[$(EXTRAS)]'
	touch $(STAMP)

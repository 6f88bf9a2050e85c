# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

.PHONY: help setup demo docs study-weight-sharing test test-fast test-all lint clean

help:
	@echo "make demo       train five encodings on embedded text, draw how each extrapolates (10 min)"
	@echo "make test       the test suite (under 8 min on 2 cores)"
	@echo "make test-fast  a quick subset"
	@echo "make test-all   the suite, its large grids and the live peers; a skip fails"
	@echo "make lint       lint, format and type checks"

# The folder is complete when the file is there: an interrupted installation is done again.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "posenc needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.peers: $(VENV)/.dev
	$(PIP) --editable '.[peers]'
	@touch $@

setup: $(VENV)/.installed

demo: setup
	$(BIN)/python -m studies.demo

# The results that the README shows: from the demo's rows, by the committed code.
docs: demo
	mkdir -p docs/demo
	cp demo/report/rows.jsonl demo/report/table.md demo/report/figure.png docs/demo/
	$(BIN)/python -m studies.readme

# The results under studies/weight_sharing: rows, table and figure, 25 minutes.
study-weight-sharing: setup
	$(BIN)/python -m studies.weight_sharing
	for kind in text facts contributions; do \
	  mkdir -p studies/weight_sharing/results/$$kind; \
	  cp weight_sharing/results/$$kind/rows.jsonl studies/weight_sharing/results/$$kind/; done
	cp weight_sharing/results/table.md weight_sharing/results/figure.png studies/weight_sharing/results/

test: setup
	$(PYTEST) -m 'not slow and not peers'

test-fast: setup
	$(PYTEST) -m 'fast and not slow and not peers'

test-all: $(VENV)/.peers
	$(PYTEST) --fail-on-skip

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) demo

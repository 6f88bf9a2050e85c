# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

.PHONY: help setup demo docs study-weight-sharing test test-fast test-all test-slurm lint clean

help:
	@echo "make demo       train five encodings on embedded text, draw how each extrapolates (10 min)"
	@echo "make test       the test suite (13 min on 2 cores)"
	@echo "make test-fast  a quick subset"
	@echo "make test-all   the suite, its large grids and the live peers; a skip fails (needs pdflatex)"
	@echo "make test-slurm  sweeps on a Slurm of this machine, started for them (Debian: docs/training.md)"
	@echo "make lint       lint, format and type checks"
	@echo "make docs       the demo, and what the documents show of it"
	@echo "make study-weight-sharing   models whose positions share no weights, compared (25 min)"

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

# What the documents show: tables from rows, and what commands print about the demo's runs.
docs: demo
	mkdir -p docs/demo
	cp demo/report/rows.jsonl demo/report/table.md demo/report/figure.png docs/demo/
	$(BIN)/python train.py --encoding rope --sharing none --train-length 32 --steps 200 --out demo/unshared
	test -e demo/gpt2-random || $(BIN)/python -c "import posenc; posenc.save_gpt2(posenc.Transformer(posenc.preset('gpt2-small'), 'wpe', 1024), 'demo/gpt2-random')"
	$(BIN)/python -m studies.documents README.md docs/weight-sharing.md docs/encodings.md \
	  docs/evaluation.md
	mkdir -p docs/weight-sharing
	set -e; for kind in json png; do \
	  cp demo/audit/gradients-rope-T64-seed0.$$kind docs/weight-sharing/gradients.$$kind; done

# The results under studies/weight_sharing: rows, table and figure, 25 minutes.
study-weight-sharing: setup
	$(BIN)/python -m studies.weight_sharing
	set -e; for kind in text facts contributions; do \
	  mkdir -p studies/weight_sharing/results/$$kind; \
	  cp weight_sharing/results/$$kind/rows.jsonl studies/weight_sharing/results/$$kind/; done
	cp weight_sharing/results/table.md weight_sharing/results/figure.png studies/weight_sharing/results/
	$(BIN)/python -m studies.documents studies/weight_sharing/README.md

test: setup
	$(PYTEST) -m 'not slow and not peers and not slurm'

test-fast: setup
	$(PYTEST) -m 'fast and not slow and not peers'

test-all: $(VENV)/.peers
	$(PYTEST) --fail-on-skip

# Slurm's programs are not of Python, and are not installed here: what is missing is said.
test-slurm: setup
	@$(BIN)/python tests/one_node_slurm.py true
	$(BIN)/python -m pytest -m slurm tests/test_slurm.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) demo

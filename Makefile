# Every target sets up what it needs in .venv by itself; a second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench accuracy install clean

demo: $(STAMP)
	$(BIN)/preplay demo --out demo --force

test: lint
	$(BIN)/python -m pytest -n auto

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.replay
	$(BIN)/python -m benchmarks.reuse
	$(BIN)/python -m benchmarks.ingest

accuracy: $(STAMP)
	$(BIN)/python -m benchmarks.accuracy $(ARGS)

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Preplay needs Python 3.11 or later; name one with PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) demo runs build dist *.egg-info

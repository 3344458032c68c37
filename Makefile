# Every target works alone and makes what it needs. `make help` lists them.
SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.resolute-ready
RES ?= 128,160,224
RECIPE ?= train/recipes/demo.toml
OUT ?= $(if $(SRC),shards,demo/shards)
SHARDS ?= $(OUT)
WORKERS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)

.DEFAULT_GOAL := help
.PHONY: help env demo shards train bench test lint check clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/' | expand -t 16
	@echo '  variables: SRC VAL VAL_LIST VAL_FRAC OUT RES MARGIN QUALITY WORKERS MAX_BAD REBUILD (shards);'
	@echo '             SHARDS RECIPE RUN DEVICE (train); SHARDS (bench); VENV (all)'

env: $(READY)  ## create the environment (VENV=folder, default .venv), the pinned versions of pyproject.toml

$(READY): pyproject.toml
	@test -x $(PY) || python3 -m venv $(VENV)
	@echo 'installing the pinned environment into $(VENV) (about 6 GB, once)'
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo/photos/.demo.json: | $(READY)
	@$(PY) -m prep.demo --out demo/photos --workers $(WORKERS)

demo: $(READY) demo/photos/.demo.json  ## generate the demo photos (demo/photos)

option = $(if $($(1)),--$(2) '$($(1))')
PREP = $(PY) -m prep --src '$(or $(SRC),demo/photos)' --out '$(OUT)' --res '$(RES)' --workers '$(WORKERS)' \
	$(call option,VAL,val) $(call option,VAL_LIST,val-list) $(call option,VAL_FRAC,val-frac) \
	$(call option,MARGIN,margin) $(call option,QUALITY,quality) $(call option,MAX_BAD,max-bad) \
	$(if $(REBUILD),--rebuild)

shards: $(READY) $(if $(SRC),,demo/photos/.demo.json)  ## SRC=photos/train [VAL=photos/val] [OUT=shards] RES=128,160,224
	@$(PREP)

# without SHARDS, `train` and `bench` use the demo's, and make them first
demo/shards/manifest.json: | $(READY) demo/photos/.demo.json
	@$(PY) -m prep --src demo/photos --out demo/shards --res 128,160,224 --workers '$(WORKERS)'

DATA := $(if $(filter demo/shards,$(SHARDS)),demo/shards/manifest.json)

train: $(READY) $(DATA)  ## [SHARDS=shards] [RECIPE=train/recipes/….toml] [RUN=name]; again: resume
	@$(PY) -m train --shards '$(SHARDS)' --recipe '$(RECIPE)' $(call option,RUN,run) $(call option,DEVICE,device)

bench: $(READY) $(DATA)  ## [SHARDS=…] loader speed, switch cost, stalls, beside a torch DataLoader
	@$(PY) -m benchmarks --shards '$(SHARDS)' $(call option,DEVICE,device)

test: $(READY)  ## the whole test suite
	@$(PY) -m pytest

lint: $(READY)  ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m mypy

check: lint test  ## lint and test

clean:  ## remove demo data, demo shards and caches; runs/ and .venv stay
	rm -rf demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

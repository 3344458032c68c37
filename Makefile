# Every target works alone and makes what it needs. `make help` lists them.
SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.resolute-ready
TOOLS := $(VENV)/.resolute-tools
RES ?= 128,160,224
RECIPE ?= train/recipes/demo.toml
OUT ?= $(if $(SRC),shards,demo/shards)
SHARDS ?= $(OUT)
WORKERS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)

.DEFAULT_GOAL := help
.PHONY: help env demo shards verify keys show lr plan train report predict eval export bench test lint check clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/' | expand -t 16
	@echo '  variables: SRC KIND LABELS COLUMNS CLASSES VAL VAL_LIST VAL_FRAC FOLDS OUT RES MARGIN QUALITY'
	@echo '             WORKERS MAX_BAD DRY REBUILD ENGINE RAY_ADDRESS (shards);'
	@echo '             SHARDS RECIPE RUN DEVICE (train, show); GPUS NODES HEAD RESTARTS (train, plan); SAMPLES (lr);'
	@echo '             SHARDS (verify, bench); VENV (all)'

env: $(READY)  ## create the environment (VENV=folder, default .venv), the pinned versions of pyproject.toml

$(READY): pyproject.toml
	@test -x $(PY) || python3 -m venv $(VENV)
	@echo 'installing the pinned environment into $(VENV) (about 6 GB, once)'
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

# what only the tests and checks need: servers to test against, other readers of our shards
$(TOOLS): $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo/photos/.demo.json: | $(READY)
	@$(PY) -m prep.demo --out demo/photos --workers $(WORKERS)

demo: $(READY) demo/photos/.demo.json  ## generate the demo photos (demo/photos)

option = $(if $($(1)),--$(2) '$($(1))')
PREP = $(PY) -m prep --src '$(or $(SRC),demo/photos)' --out '$(OUT)' --res '$(RES)' --workers '$(WORKERS)' \
	$(call option,KIND,kind) $(call option,LABELS,labels) $(call option,COLUMNS,columns) \
	$(call option,CLASSES,classes) $(call option,VAL,val) $(call option,VAL_LIST,val-list) \
	$(call option,VAL_FRAC,val-frac) $(call option,FOLDS,folds) $(call option,MARGIN,margin) \
	$(call option,QUALITY,quality) $(call option,MAX_BAD,max-bad) $(call option,ENGINE,engine) \
	$(call option,RAY_ADDRESS,ray-address) $(if $(DRY),--dry-run) $(if $(REBUILD),--rebuild)

shards: $(READY) $(if $(SRC),,demo/photos/.demo.json)  ## SRC=photos/train [VAL=photos/val] [OUT=shards] RES=128,160,224
	@$(PREP)

verify: $(READY)  ## SHARDS=… re-read and re-decode every byte of a shard set, and say what is damaged
	@$(PY) -m prep.verify '$(SHARDS)' --workers '$(WORKERS)'

# without SHARDS, `train` and `bench` use the demo's, and make them first
demo/shards/manifest.json: | $(READY) demo/photos/.demo.json
	@$(PY) -m prep --src demo/photos --out demo/shards --res 128,160,224 --workers '$(WORKERS)'

DATA := $(if $(filter demo/shards,$(SHARDS)),demo/shards/manifest.json)

keys: $(READY)  ## all keys of a recipe, with their defaults (a Markdown table)
	@$(PY) -m pipeline keys

show: $(READY) $(DATA)  ## [SHARDS=…] [RECIPE=…] draw what the model will see, stage by stage (seen.png)
	@$(PY) -m pipeline show '$(SHARDS)' --recipe '$(RECIPE)'

lr: $(READY) $(if $(SAMPLES),,$(DATA))  ## RECIPE=… [SHARDS=…|SAMPLES=n] draw LR and momentum over all steps (lr.png)
	@$(PY) -m train.draw_lr --recipe '$(RECIPE)' $(if $(SAMPLES),--samples '$(SAMPLES)',--shards '$(SHARDS)')

plan: $(READY) $(DATA)  ## RECIPE=… [SHARDS=…] [BUDGET=11m] [GPU_MEMORY_GIB=24] what a run will take, and what would fit
	@$(LAUNCH) train --plan --shards '$(SHARDS)' --recipe '$(RECIPE)' $(call option,DEVICE,device) \
	$(call option,FOLDS,folds) $(call option,BUDGET,budget) $(call option,GPU_MEMORY_GIB,gpu-memory-gib) \
	$(call option,JSON,json)

# GPUS=8: one process each; several machines run the same command with NODES=2 HEAD=first-machine:29400 besides
# why the variable: a store that outlives a restart has the addresses of the dead; why --: torchrun has a --run-path
RESTARTS ?= 3
LAUNCH = $(if $(HEAD),TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) $(PY) $(if $(GPUS),-m torch.distributed.run \
	--nproc-per-node '$(GPUS)' --max-restarts '$(RESTARTS)' $(if $(HEAD),--nnodes '$(or $(NODES),1)' \
	--rdzv-backend c10d --rdzv-endpoint '$(HEAD)' --rdzv-id '$(or $(RUN),resolute)',--standalone) -m --,-m)

train: $(READY) $(DATA)  ## [SHARDS=shards] [RECIPE=train/recipes/….toml] [RUN=name] [GPUS=8]; again: resume
	@$(LAUNCH) train --shards '$(SHARDS)' --recipe '$(RECIPE)' $(call option,RUN,run) $(call option,DEVICE,device) \
	$(call option,FOLDS,folds) $(call option,FROM,from) $(call option,KEEP,keep) $(if $(TENSORBOARD),--tensorboard) \
	$(call option,GPU_MEMORY_GIB,gpu-memory-gib) $(if $(CALIBRATE),--calibrate)

given = $(if $(filter-out file,$(origin $(1))),$(call option,$(1),$(2)))

predict: $(READY)  ## RUN=runs/name SRC=photos|shards [OUT=pred.csv] classes and probabilities; RUN of folds: their mean
	@$(PY) -m train.predict '$(RUN)' --src '$(SRC)' $(call given,OUT,out) $(call option,DEVICE,device)

eval: $(READY)  ## RUN=runs/name SHARDS=… [RES=160,208,224] exact top-1 and top-5, raw and EMA
	@$(PY) -m train.evaluate '$(RUN)' --shards '$(SHARDS)' $(call given,RES,res) $(call option,DEVICE,device)

export: $(READY)  ## RUN=runs/name [OUT=model.safetensors] the best weights, for timm.create_model
	@$(PY) -m train.export '$(RUN)' $(call given,OUT,out)

report: $(READY)  ## RUN=name draw runs/name/report.html from its log again; a run writes it each epoch
	@$(PY) -m train.page '$(RUN)'

bench: $(READY) $(DATA)  ## [SHARDS=…] loader speed, switch cost, stalls, beside a torch DataLoader
	@$(PY) -m benchmarks --shards '$(SHARDS)' $(call option,DEVICE,device)

test: $(TOOLS)  ## the whole test suite
	@$(PY) -m pytest

lint: $(TOOLS)  ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m mypy

check: lint test  ## lint and test

clean:  ## remove demo data, demo shards and caches; runs/ and .venv stay
	rm -rf demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

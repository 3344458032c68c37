# Every target can be run on its own: it creates what it needs. `make help` lists all targets.
SHELL := /bin/bash
VENV ?= .venv

.DEFAULT_GOAL := help
.PHONY: help env demo shards verify keys show lr lr-find plan train report compare predict eval export bench bench-all \
        gpu-check test test-all lint docs docs-serve check clean

# ---- variables -----------------------------------------------------------------------------------------------------

# The variables that each target reads, besides VENV. Any other variable on the command line is an error.
# DEMO_WORKERS: without SHARDS, these targets make the demo's set, in WORKERS processes
DEMO_WORKERS  := $(if $(subst demo/shards,,$(value SHARDS)),,WORKERS)
demo.reads    := WORKERS
shards.reads  := SRC KIND LABELS COLUMNS TARGET CLASSES VAL VAL_LABELS VAL_LIST VAL_FRAC OUT RES MARGIN QUALITY SEED \
                 SHARD_SAMPLES WORKERS MAX_BAD UNLABELLED DUPLICATES DRY REBUILD EXTEND DROP ENGINE RAY_ADDRESS
verify.reads  := SHARDS WORKERS
show.reads    := SHARDS VAL CLASSES TARGET RECIPE $(DEMO_WORKERS)
lr.reads      := SHARDS VAL CLASSES TARGET RECIPE SAMPLES $(DEMO_WORKERS)
lr-find.reads := SHARDS VAL CLASSES TARGET RECIPE DEVICE $(DEMO_WORKERS)
train.reads   := SHARDS VAL CLASSES TARGET RECIPE RUN DEVICE FOLDS FROM KEEP LOGGERS GPU_MEMORY_GIB CALIBRATE GPUS \
                 NODES HEAD RESTARTS $(DEMO_WORKERS)
plan.reads    := SHARDS VAL CLASSES TARGET RECIPE RUN DEVICE FOLDS GPU_MEMORY_GIB BUDGET SUGGEST JSON GPUS NODES HEAD \
                 RESTARTS $(DEMO_WORKERS)
report.reads  := RUN
compare.reads := RUNS OUT
predict.reads := RUN SRC VAL CLASSES TARGET OUT DEVICE
eval.reads    := RUN SHARDS VAL CLASSES TARGET RES DEVICE
export.reads  := RUN OUT
bench.reads   := SHARDS VAL CLASSES RES DEVICE MODEL OUT $(DEMO_WORKERS)
bench-all.reads := SHARDS VAL CLASSES RES DEVICE $(DEMO_WORKERS)
gpu-check.reads := SHARDS DEVICE OUT WORKERS
env.reads     := CUDA

# what to do instead of setting a variable that a target does not read, if not to leave it out
FOLDS.hint := any set can be trained with folds: `make train FOLDS=5`; VAL_FRAC=0 makes one that holds out nothing

TARGETS := env demo shards verify show lr lr-find train plan report compare predict eval export bench bench-all gpu-check
READERS := $(TARGETS) help keys test test-all lint docs docs-serve check clean
VARIABLES := $(sort VENV $(foreach target,$(TARGETS),$($(target).reads)))
GOALS := $(or $(MAKECMDGOALS),$(.DEFAULT_GOAL))
GIVEN := $(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(name)))

quoted = '$(subst ','\'',$(1))'
CLOSEST := import difflib, sys; print(*difflib.get_close_matches(sys.argv[1].upper(), sys.argv[2:], 1))
closest = $(shell python3 -c '$(CLOSEST)' $(call quoted,$(1)) $(VARIABLES))
guess = $(if $(1),did you mean $(1)?,what a recipe sets goes into the recipe;)

$(foreach name,$(filter-out $(VARIABLES),$(GIVEN)),$(error \
	$(name): not a variable of this Makefile; $(call guess,$(call closest,$(name))) `make help` lists them))
# why the filter: a goal that is a file, such as demo/shards/manifest.json, may read any of them
ifeq ($(filter-out $(READERS),$(GOALS)),)
$(foreach name,$(filter-out VENV $(foreach goal,$(GOALS),$($(goal).reads)),$(GIVEN)),$(error \
	$(name): without effect in `make $(GOALS)`, which reads $(or $(strip \
	$(foreach goal,$(GOALS),$($(goal).reads))),only VENV); $(or $($(name).hint),leave it out)))
endif
# why: SRC="$$FOLDER" with an empty FOLDER must not become the demo
$(foreach name,$(GIVEN),$(if $(value $(name)),,$(error $(name): got an empty value; give it one or leave it out)))

# Values reach the commands through the environment, character for character: make expands no $$ in them, and no shell
# ever parses them.
$(foreach name,$(VARIABLES),$(if $(value $(name)),$(eval override $(name) := $$(value $(name)))$(eval export $(name))))
option = $(if $($(1)),--$(2)="$$$(1)")
flag = $(if $(filter-out 0 no false,$($(1))),--$(2))

# VENV alone is part of file names that make itself has to parse.
UNSAFE := ' " $$ ` ; & | < > \ * ? : % = ! ( ) { } [ ] ~ \#
$(if $(filter-out 1,$(words $(VENV)))$(strip $(foreach sign,$(UNSAFE),$(findstring $(sign),$(VENV)))),$(error \
	VENV: got $(strip $(VENV)), expected a path without spaces, quotes and other signs of the shell; choose another))
PY := $(VENV)/bin/python
READY := $(VENV)/.resolute-ready
TOOLS := $(VENV)/.resolute-tools

RECIPE ?= train/recipes/demo.toml
# Only a bare `make shards` uses the demo photos; with any of these variables but without SRC, prep reports the error.
DEMO := $(if $(SRC)$(OUT)$(KIND)$(LABELS)$(COLUMNS)$(TARGET)$(CLASSES)$(VAL)$(VAL_LABELS)$(VAL_LIST),,demo)
MADE := $(if $(DEMO),demo/shards,$(or $(OUT),shards))
# `make shards train SRC=photos` trains on the set that it has just written
SHARDS ?= $(if $(filter shards,$(GOALS)),$(MADE),demo/shards)
export RECIPE SHARDS MADE
# without SHARDS, targets that read a shard set use the demo's, and make it first
DATA := $(if $(subst demo/shards,,$(SHARDS)),,demo/shards/manifest.json)

# ---- targets -------------------------------------------------------------------------------------------------------

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 18
	@echo '  variables that each target reads (and VENV, all of them):'
	@$(foreach target,$(TARGETS),echo '    $(target): $($(target).reads)';)

env: $(READY)  ## create the environment (VENV=folder, default .venv) with the pins for this driver, or for CUDA=12|13
	@python3 pipeline/cuda_stack.py $< > /dev/null

# the file holds the name of the CUDA stack, which an environment keeps
$(READY): pyproject.toml
	@stack=$$(python3 pipeline/cuda_stack.py $@) && \
	echo "installing the pinned environment ($$stack) into $(VENV) (about 6 GB, once)" && \
	{ test -x $(PY) || python3 -m venv $(VENV); } && \
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[$$stack]" && echo $$stack > $@

# dependencies of the tests and checks only: servers to test against, other readers of the shards
$(TOOLS): $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo/photos/.demo.json: | $(READY)
	@$(PY) -m resolute.pipeline.examples.demo_photos --out demo/photos $(call option,WORKERS,workers)

demo: $(READY) demo/photos/.demo.json  ## generate the demo photos (demo/photos)

PREP = $(PY) -m resolute.prep --src="$${SRC$(if $(DEMO),-demo/photos)}" --out="$$MADE" $(call option,RES,res) \
	$(call option,KIND,kind) $(call option,LABELS,labels) $(call option,COLUMNS,columns) \
	$(call option,TARGET,target) $(call option,CLASSES,classes) $(call option,VAL,val) \
	$(call option,VAL_LABELS,val-labels) $(call option,VAL_LIST,val-list) \
	$(call option,VAL_FRAC,val-frac) $(call option,MARGIN,margin) \
	$(call option,QUALITY,quality) $(call option,SEED,seed) $(call option,SHARD_SAMPLES,shard-samples) \
	$(call option,WORKERS,workers) $(call option,MAX_BAD,max-bad) $(call option,UNLABELLED,unlabelled) \
	$(call option,DUPLICATES,duplicates) $(call option,ENGINE,engine) $(call option,RAY_ADDRESS,ray-address) \
	$(call flag,DRY,dry-run) $(call flag,REBUILD,rebuild) $(call flag,EXTEND,extend) $(call flag,DROP,drop)

shards: $(READY) $(if $(DEMO),demo/photos/.demo.json)  ## SRC=photos/train [LABELS=table.csv TARGET=labels] [VAL=photos/val] [OUT=shards] RES=128,160,224; later EXTEND=1 [DROP=1]
	@$(PREP)

verify: $(READY) $(DATA)  ## [SHARDS=…] read and decode a whole shard set again and report damage
	@$(PY) -m resolute.prep.verify $(call option,WORKERS,workers) -- "$$SHARDS"

demo/shards/manifest.json: | $(READY) demo/photos/.demo.json
	@$(PY) -m resolute.prep --src demo/photos --out demo/shards $(call option,WORKERS,workers)

# for other WebDataset tars; not with the goal `shards`, where both describe the photos to prep
FOREIGN = $(if $(filter shards,$(GOALS)),,$(call option,VAL,val) $(call option,CLASSES,classes) $(call option,TARGET,target))

keys: $(READY)  ## all keys of a recipe, with their defaults (a Markdown table)
	@$(PY) -m resolute.train keys

show: $(READY) $(DATA)  ## [SHARDS=…] [RECIPE=…] draw what the model will see, stage by stage (seen.html)
	@$(PY) -m resolute.train show --recipe="$$RECIPE" $(FOREIGN) -- "$$SHARDS"

lr: $(READY) $(if $(SAMPLES),,$(DATA))  ## RECIPE=… [SHARDS=…|SAMPLES=n] draw LR, resolution and regularisation over all steps (lr.html)
	@$(PY) -m resolute.train lr --recipe="$$RECIPE" $(or $(call option,SAMPLES,samples),--shards="$$SHARDS" $(FOREIGN))

lr-find: $(READY) $(DATA)  ## RECIPE=… [SHARDS=…] LR range test on the first stage; suggests optim.lr (lr-find.html)
	@$(PY) -m resolute.train lr-find --shards="$$SHARDS" $(FOREIGN) --recipe="$$RECIPE" $(call option,DEVICE,device)

plan: $(READY) $(DATA)  ## RECIPE=… [SHARDS=…] [BUDGET=11m [SUGGEST=new.toml]] [GPU_MEMORY_GIB=24] estimate a run; write a recipe for BUDGET
	@$(ENOUGH_GPUS) $(LAUNCH) resolute.train plan --shards="$$SHARDS" $(FOREIGN) --recipe="$$RECIPE" $(call option,RUN,run) \
	$(call option,DEVICE,device) $(call option,FOLDS,folds) $(call option,BUDGET,budget) $(call option,GPU_MEMORY_GIB,gpu-memory-gib) \
	$(call option,SUGGEST,suggest) $(call option,JSON,json)

# GPUS=8: one process each; several machines run the same command with NODES=2 HEAD=first-machine:29400 besides
# why the variable: a store that outlives a restart has the addresses of the dead; why --: torchrun has a --run-path
LAUNCH = $(if $(HEAD),TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) $(PY) $(if $(GPUS),-m resolute.train.devices.launch \
	--nproc-per-node="$$GPUS" --max-restarts="$${RESTARTS-$(if $(FROM),0,3)}" $(if $(HEAD),--nnodes="$${NODES-1}" \
	--rdzv-backend c10d --rdzv-endpoint="$$HEAD" --rdzv-id="$${RUN-resolute}",--standalone) -m --,-m)

# why before: torchrun starts its processes again after an error
ENOUGH_GPUS = $(if $(GPUS),$(if $(filter cpu,$(DEVICE)),,$(PY) -m resolute.train.devices.device --gpus="$$GPUS" &&))

train: $(READY) $(DATA)  ## [SHARDS=shards] [RECIPE=train/recipes/….toml] [RUN=name] [GPUS=8] [LOGGERS=csv,wandb]; again: resume
	@$(ENOUGH_GPUS) $(LAUNCH) resolute.train train --shards="$$SHARDS" $(FOREIGN) --recipe="$$RECIPE" $(call option,RUN,run) \
	$(call option,DEVICE,device) $(call option,FOLDS,folds) $(call option,FROM,from) $(call option,KEEP,keep) $(call option,LOGGERS,loggers) \
	$(call option,GPU_MEMORY_GIB,gpu-memory-gib) $(call flag,CALIBRATE,calibrate)

predict: $(READY)  ## RUN=name [SRC=photos|shards] [OUT=pred.csv] classes, labels or values; RUN of folds: their mean
	@$(PY) -m resolute.train predict $(call option,SRC,src) $(FOREIGN) $(call option,OUT,out) $(call option,DEVICE,device) -- "$$RUN"

# why no demo/shards: a run remembers its own set
eval: $(READY)  ## RUN=name [SHARDS=…] [RES=160,208,224] exact metrics, raw and EMA
	@$(PY) -m resolute.train eval $(if $(filter file,$(origin SHARDS)),,--shards="$$SHARDS") $(FOREIGN) $(call option,RES,res) $(call option,DEVICE,device) -- "$$RUN"

export: $(READY)  ## RUN=name [OUT=model.safetensors|model.onnx|folder] the best weights, and a program that loads them
	@$(PY) -m resolute.train export $(call option,OUT,out) -- "$$RUN"

report: $(READY)  ## RUN=name draw runs/name/report.html from its log again; a run writes it each epoch
	@$(PY) -m resolute.train report -- "$$RUN"

# why set -f: the names in RUNS are separated at spaces, and nothing else is done with them
compare: $(READY)  ## RUNS="a b" [OUT=compare.html] accuracy, step times and recipes of several runs on one page
	@set -f; $(PY) -m resolute.train compare $(call option,OUT,out) -- $$RUNS

bench: $(READY) $(DATA)  ## [SHARDS=…] [MODEL=resnet50] in 90 s: loader, model, cost of a change, beside a DataLoader (bench/)
	@$(PY) -m resolute.benchmarks.brief --shards="$$SHARDS" $(FOREIGN) $(call option,RES,res) $(call option,DEVICE,device) \
	$(call option,MODEL,model) $(call option,OUT,out)

bench-all: $(READY) $(DATA)  ## [SHARDS=…] the same at length, in rounds with their spread, and stalls of training (bench/)
	@$(PY) -m resolute.benchmarks --shards="$$SHARDS" $(FOREIGN) $(call option,RES,res) $(call option,DEVICE,device)

# why no demo/shards: the check makes its own set in OUT unless SHARDS is set
gpu-check: $(TOOLS)  ## [SHARDS=…] [OUT=gpu-check] all about a GPU in ten minutes: report.html (DEVICE=cpu: a trial)
	@$(PY) -m resolute.benchmarks.gpu_check $(if $(filter file,$(origin SHARDS)),,--shards="$$SHARDS") $(call option,DEVICE,device) \
	$(call option,OUT,out) $(call option,WORKERS,threads)

# why worksteal: neighbouring tests, which share fixtures, stay in one worker
PYTEST = $(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

test: $(TOOLS)  ## the tests, without those that take minutes
	@$(PYTEST) -m 'not slow'

test-all: $(TOOLS)  ## all tests, as CI runs them
	@$(PYTEST)

lint: $(TOOLS)  ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m mypy

# why the variable: the theme's authors announce another program on every build
MKDOCS = NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs

docs: $(TOOLS)  ## build the site into site/; any warning is an error
	@$(MKDOCS) build --quiet --strict

docs-serve: $(TOOLS)  ## show the site on this machine, built again at every change
	@$(MKDOCS) serve

check: lint docs test  ## the gate: lint, the site, and the tests without those that take minutes

clean:  ## remove demo data, demo shards and caches; runs/ and .venv stay
	rm -rf demo build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

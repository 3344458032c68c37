# `make COMMAND NAME=value …` runs `resolute COMMAND --name=value …` (`resolute COMMAND --help` lists the names), after
# creating what it needs: the environment and, for commands that read a shard set, the demo's if SHARDS is not given.
SHELL := /bin/bash
.SHELLFLAGS := -ec
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help env demo shards verify keys show lr lr-find plan train report compare predict eval export bench bench-all recipe \
        test test-all test-gpu lint docs docs-serve check clean
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.resolute-ready
TOOLS := $(VENV)/.resolute-tools

# The variables of the command line as options. Values arrive character for character: `value` expands nothing in them,
# and the shell sees them in single quotes; .ONESHELL keeps line breaks.
quote = '$(subst ','\'',$(1))'
given := $(filter-out VENV CUDA,$(sort $(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(name)))))
flag = $(call quote,--$(shell tr A-Z_ a-z- <<< $(call quote,$(1))))
OPTIONS = $(foreach name,$(filter-out RUNS,$(given)),$(call flag,$(name))=$(call quote,$(value $(name))))
has = $(filter $(1),$(given))
# else make would expand them for the environment of the commands
unexport $(given)

# what is used instead of variables that are not given
DEMO := $(if $(call has,SRC OUT KIND LABELS COLUMNS TARGET CLASSES VAL VAL_LABELS VAL_LIST),,demo/photos/.demo.json)
DATA := $(if $(call has,SHARDS SAMPLES MORE_EPOCHS),,demo/shards/manifest.json)
SET := $(if $(DATA),--shards=demo/shards)
RECIPE_OPTION := $(if $(call has,SHARDS SAMPLES RECIPE MORE_EPOCHS),,--recipe=train/recipes/demo.toml)
shards: DEFAULTS = $(if $(DEMO),--src=demo/photos --out=demo/shards)
verify bench: DEFAULTS = $(SET)
show lr lr-find plan train: DEFAULTS = $(SET) $(RECIPE_OPTION)
compare: DEFAULTS = $(foreach run,$(value RUNS),$(call quote,$(run)))

plain := $(filter help env test test-all test-gpu lint docs docs-serve check clean,$(MAKECMDGOALS))
$(if $(plain),$(if $(given),$(error $(given): without effect in `make $(MAKECMDGOALS)`; leave it out)))
# VENV alone is part of file names that make itself has to parse
$(if $(shell [[ $(call quote,$(value VENV)) =~ ^[A-Za-z0-9_./@+,-]+$$ ]] || echo bad),$(error VENV: got $(strip $(value VENV)), \
	expected a path without spaces, quotes and other signs of the shell; choose another))

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 18
env: $(READY)  ## create the environment (VENV=folder, default .venv) with the pins for this driver, or for CUDA=12|13
	@python3 resolute/cuda_stack.py $< > /dev/null
demo: demo/photos/.demo.json  ## generate the demo photos (demo/photos)
shards: $(DEMO)  ## SRC=photos [LABELS=table.csv] [VAL=photos/val] [OUT=shards] RES=128,160,224; later EXTEND=1
verify: $(DATA)  ## [SHARDS=…] read and decode a whole shard set again and report damage
keys:  ## all keys of a recipe, with their defaults (a Markdown table)
show: $(DATA)  ## [SHARDS=…] [RECIPE=…] draw what the model will see (runs/…-show.html)
recipe:  ## OUT=my.toml SHARDS=… [MODEL=resnet18] [BUDGET=20m] write a starter recipe that fits the set, to edit
lr: $(DATA)  ## [SHARDS=…] [RECIPE=…|SAMPLES=n] draw LR, resolution and so on over all steps (runs/…-lr.html)
lr-find: $(DATA)  ## [SHARDS=…] [RECIPE=…] LR range test on the first stage; suggests optim.lr (runs/…-lr-find.html)
plan: $(DATA)  ## [SHARDS=…] [RECIPE=…] [BUDGET=11m] estimate a run; name the scale_epochs that fits BUDGET
train: $(DATA)  ## [SHARDS=shards] [RECIPE=my.toml] [SET="optim.lr=0.1"] [RUN=name] [GPUS=8]; again: resume
predict:  ## RUN=name [SRC=photos|shards] [OUT=pred.csv] [SAMPLE=sample_submission.csv] classes, labels or values
eval:  ## RUN=name [SHARDS=…] [RES=160,208,224] exact metrics, raw and EMA
export:  ## RUN=name [FORMAT=onnx] [OUT=folder] the best weights, and a program that predicts (runs/name/export)
report:  ## RUN=name draw runs/name/report.html from its log again; a run writes it each epoch
compare:  ## RUNS="a b" [OUT=runs/compare.html] accuracy, step times and recipes of several runs on one page
bench: $(DATA)  ## [SHARDS=…] [MODEL=resnet50] [ROUNDS=3] in 90 s a round: loader, model, cost of a change (bench/)
bench-all:  ## DATA=folder [TIMM=checkout] [FFCV_PYTHON=…] [PUBLISH=1] all that README and docs/ show, in hours; continues
shards verify keys show recipe lr lr-find plan train predict eval export report compare bench bench-all: $(READY)
	@$(PY) -m resolute $@ $(DEFAULTS) $(OPTIONS)
test: $(TOOLS)  ## the tests, without those that take minutes
	@$(PYTEST) -m 'not slow and not nightly'
test-all: $(TOOLS)  ## all tests, as CI runs them, but those of .ci/nightly
	@$(PYTEST) -m 'not nightly'
test-gpu: $(TOOLS)  ## check a GPU: kernels, pixels, memory, resuming, two processes
	@$(PY) -m pytest -m gpu -n 0 tests/gpu
lint: $(TOOLS)  ## ruff and mypy
	@$(PY) -m ruff format --check --quiet .
	$(PY) -m ruff check .
	$(PY) -m mypy
docs: $(TOOLS)  ## build the site into site/; any warning is an error
	@$(MKDOCS) build --quiet --strict
docs-serve: $(TOOLS)  ## show the site on this machine, built again at every change
	@$(MKDOCS) serve
check: lint docs test  ## the gate: lint, the site, and the tests without those that take minutes
clean:  ## remove demo data, demo shards and caches; runs/ and .venv stay
	rm -rf demo build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# why by file: its tests share fixtures, which each worker would make; in the order of tests/conftest.py; why three
# workers, also on two cores: many tests wait for processes that they start
PYTEST = $(PY) -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
# why the variable: the theme's authors announce another program on every build
MKDOCS = NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs

demo/photos/.demo.json: | $(READY)
	@$(PY) -m resolute.pipeline.examples.demo_photos --out demo/photos
demo/shards/manifest.json: | $(READY) demo/photos/.demo.json
	@set -o pipefail
	$(PY) -m resolute shards --src demo/photos --out demo/shards | { grep -v ^next: || true; }
INSTALL = if command -v uv > /dev/null; then uv pip install --quiet --python $(PY) "$$@"; \
          else $(PY) -m pip install --quiet --disable-pip-version-check "$$@"; fi
# the file holds the name of the CUDA stack, which an environment keeps
$(READY): pyproject.toml locks/cuda12.txt locks/cuda13.txt
	@stack=$$(python3 resolute/cuda_stack.py $@)
	echo "installing the pinned environment ($$stack) into $(VENV) (about 6 GB, once)"
	test -x $(PY) || python3 -m venv $(VENV)
	set -- --constraint locks/$$stack.txt --editable ".[$$stack,train]"
	$(INSTALL) && echo $$stack > $@
# dependencies of the tests and checks only: servers to test against, other readers of the shards
$(TOOLS): $(READY)
	@set -- --constraint locks/$$(cat $(READY)).txt --editable ".[$$(cat $(READY)),dev]"
	$(INSTALL) && touch $@

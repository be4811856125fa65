# Every target does its own set-up, in .venv. On Linux without a GPU, PIP_EXTRA_INDEX_URL can name an index of CPU builds of torch.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
COMPAT := .venv/compat

.PHONY: demo test check gpu clean

demo: .venv/.cli
	$(BIN)/fp8attn demo

test: check .venv/.dev
	$(PYTEST) -n 2 --dist loadfile --cov --cov-report=term:skip-covered --cov-fail-under=90
	PYTHONPATH=$(COMPAT) $(PYTEST) tests/test_transformers.py tests/test_transformers_edges.py -n 2

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# On a machine with a Hopper GPU, torch, Triton and transformers; installs nothing there.
gpu:
	for name in gpu_tests accumulation accuracy prefill decode sdpa llama_decode llama_prefill wan slice overhead perplexity drift plot sanitize; do \
		PYTHONPATH=src $(PYTHON) -m benchmarks.$$name || exit; \
	done

.venv/.python:
	$(PYTHON) -m venv .venv
	touch $@

.venv/.cli: .venv/.python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[cli]'
	touch $@

# The oldest transformers that a GPU machine of ours has stands beside the newest.
.venv/.dev: .venv/.python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps --upgrade --target $(COMPAT) transformers==5.17.0 'huggingface-hub<2' \
		httpx httpcore h11 anyio sniffio certifi idna
	touch $@

clean:
	rm -rf .venv out

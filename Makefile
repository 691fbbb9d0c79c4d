# Developers' commands; `make` alone lists them. What they need is installed by `make setup`, which each of them runs:
# it takes a second when nothing has changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Tests start the command and gateways by the thousand; without compiled files each start compiles all it imports.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
PYTEST_ARGS ?=
# A file of tests stays with one worker, so that its tests share what is costly to make; tests/ordering.py says which
# files come first.
WORKERS ?= 4
VM_ARGS ?=
LONG_ARGS ?=
NODES ?= 1
NODE ?= node-1
CNI ?= cilium
FUZZ_SECONDS ?= 600
FUZZ_SEED ?= 0
FUZZ_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
CHAOS_ARGS ?=

# The system's Python first: a python3 on PATH may be a slow shim.
FIND_PYTHON := for p in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; done; echo "$$p"

LOCK := $(VENV)/bin/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-emit-find-links --no-annotate --no-header --quiet

.PHONY: help setup deps check format components cluster cluster-shell cluster-down test test-long test-packages test-vm chaos soak fuzz bench bench-peers bench-publish gen lock clean

help: ## Print this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: deps $(VENV)/.ready ## Install everything that development needs, into .venv and K8E_HOME

# gVisor, runc, tsx and Debian packages; quick when they are in place.
deps:
	@sh install.sh --deps-only --quiet

$(VENV)/.ready: requirements/dev.txt pyproject.toml src/k8e/_version.py
	@echo "making $(VENV) with the locked development packages"
	@if ! $(PY) -c pass 2>/dev/null; then rm -rf $(VENV); "$$($(FIND_PYTHON))" -m venv $(VENV); fi
	@$(PIP) install --require-hashes -r requirements/dev.txt
	@$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

check: setup ## Lint, check formatting, types and layers
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/pyright --warnings
	$(PY) proto/generate.py --check
	$(PY) tools/generate_client.py --check
	$(PY) sdk/typescript/generate.py --check
	@sh sdk/typescript/check.sh

format: setup ## Format, and fix what ruff can fix
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

test-packages: $(VENV)/.ready # Packages of Debian and npm that only the tests use
	@sh tests/packages.sh $(VENV)/packages
	@sh tests/mcp/clients.sh $(VENV)/mcp-clients
	@sh tests/agent_sandbox/client.sh $(PY) $(VENV)/agent-sandbox-client
	@sh sdk/typescript/setup.sh

# Half an hour on a new machine with two CPUs, seconds on others: what is there and right is kept, outside of this folder.
components: setup ## Get the upstream programs of a cluster, building them where that is needed
	@if [ "$$(id -u)" = 0 ]; then nice -n 10 $(PY) -m k8e components install >/dev/null; \
	else echo "not root: tests that need a cluster's programs will be skipped"; fi

test: setup test-packages components ## Run the tests (as root all of them; PYTEST_ARGS="-k word")
	$(PY) -m pytest -rs -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-long: setup test-packages components ## What takes too long for make test; writes tests/cluster/*.json (LONG_ARGS="--kills 100")
	$(PY) -m tests.cluster.loops $(LONG_ARGS)
	$(PY) -m tests.controller.loops
	nice -n 10 $(PY) -m k8e components install kubernetes-tests >/dev/null
	ended=0; $(PY) -m tests.cluster.kubernetes_tests || ended=$$?; $(PY) docs/generate.py; exit $$ended

cluster: setup ## Start a Kubernetes cluster on machines of its own (NODES=2 CNI=basic)
	@$(PY) -m tests.cluster up --nodes $(NODES) --cni $(CNI)

cluster-shell: ## Enter a machine of it (NODE=node-2)
	@$(PY) -m tests.cluster shell --node $(NODE)

cluster-down: ## End it, and remove its machines
	@$(PY) -m tests.cluster down

chaos: setup test-packages ## Kill gateways at random moments (CHAOS_ARGS="--count 500 --seed 1 --runtime gvisor")
	$(PY) -m tests.chaos $(CHAOS_ARGS)

test-vm: setup ## Try the limits on a cgroup v2 kernel, in QEMU (15 minutes; VM_ARGS="user container limits.pids")
	$(PY) tests/vm/run.py $(VM_ARGS)

fuzz: setup ## Send nonsense for FUZZ_SECONDS=600 (FUZZ_SEED=1 repeats a run; FUZZ_ARGS="-k guest")
	$(PY) -m tests.fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) $(FUZZ_ARGS)

bench: setup ## Measure; prints a table and writes JSON (BENCH_ARGS=...)
	$(PY) -m benchmarks $(BENCH_ARGS)

soak: setup ## 5,000 sessions of mixed work; fails if anything is left (half an hour; SOAK_ARGS="--sessions 500")
	$(PY) -m benchmarks.soak $(SOAK_ARGS)

bench-peers: ## Install what `make bench` compares with, if it is there: podman, docker, srt
	@sh benchmarks/peers/install.sh

bench-publish: setup ## Measure everything and write docs/performance.* (half an hour on a quiet machine)
	$(PY) -m benchmarks --publish --cycles 1000 $(BENCH_ARGS)

gen: setup ## Regenerate src/k8e/_generated, the synchronous client and generated parts of the TypeScript SDK
	$(PY) proto/generate.py
	$(PY) tools/generate_client.py
	$(PY) sdk/typescript/generate.py

lock: setup ## Pin the newest allowed versions in requirements/
	$(LOCK) --upgrade pyproject.toml --extra gateway -o requirements/gateway.txt
	$(LOCK) --upgrade --group build -o requirements/build.txt
	$(LOCK) --upgrade pyproject.toml --extra gateway --extra postgres -c requirements/gateway.txt -o requirements/postgres.txt
	$(LOCK) --upgrade pyproject.toml --extra gateway --extra postgres --group dev -c requirements/postgres.txt \
		-c requirements/gateway.txt -c requirements/build.txt -o requirements/dev.txt
	for folder in requirements/tools requirements/mcp-clients sdk/typescript; do (cd $$folder && npm install --package-lock-only \
		--omit-lockfile-registry-resolved --ignore-scripts --no-audit --no-fund); done

clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) build dist sdk/typescript/dist sdk/typescript/node_modules .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

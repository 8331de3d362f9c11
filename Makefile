# Everything runs in .venv, which scripts/bootstrap.py makes and keeps current; there is nothing to install by hand.

PYTHON ?= $(shell for p in .venv/bin/python python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done || echo python3)
BIN := .venv/bin
ARGS ?=

.PHONY: serve test install dev check bench

# make serve ARGS="--port 30001"
serve: install
	@exec $(BIN)/forebay serve $(ARGS)

# make test ARGS="-k scheduler"
test: check
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

install:
	@$(PYTHON) scripts/bootstrap.py

dev:
	@$(PYTHON) scripts/bootstrap.py --dev

check: dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q -n 0 tests/test_floors.py tests/test_bans.py

# A server of its own beside transformers' generate, some minutes; make bench ARGS="--max-concurrency 16"
bench: dev
	@$(BIN)/python benchmarks/compare_transformers.py $(ARGS)

# rollstream: `make demo` and `make test` do all their set-up themselves.
SHELL := /bin/bash
PYTHON ?= python3
TOOLS := .tools
UV ?= $(TOOLS)/uv
export UV_PROJECT_ENVIRONMENT := .venv
export UV_PYTHON_DOWNLOADS := never
# Installed packages are compiled once at set-up; without this each process would compile them again.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
SYNC := $(UV) sync --quiet --frozen --inexact --compile-bytecode --python $(PYTHON)
DEMO_EXTRAS := --extra learner --extra harness --extra ui
TEST_EXTRAS := $(DEMO_EXTRAS) --extra dev
SEED ?= 0

.PHONY: demo demo-long test test-compose up down status lint format bench replay-verify clean help

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

demo: .venv/.demo ## Train the tiny policy on real harness trials (10-20 minutes); resumes after Ctrl-C
	@$(BIN)/rollstream demo --seed $(SEED)

demo-long: .venv/.demo ## The longer recipe
	@$(BIN)/rollstream demo --long --seed $(SEED)

test: .venv/.test ## All tests, with a real broker, engine, harness and sandboxes
	@$(BIN)/python -m pytest tests -m "not compose and not long" -n 3 --dist loadfile

test-compose: .venv/.test ## infra/compose.yaml on a real Docker engine (root)
	@$(BIN)/python -m pytest tests/integration -m compose

up: .venv/.demo ## Start the local stack
	@$(BIN)/rollstream up

down: ## Stop the local stack
	@test ! -x $(BIN)/rollstream || $(BIN)/rollstream down

status: .venv/.demo ## Live table of the newest run
	@$(BIN)/rollstream status --watch

replay-verify: .venv/.demo ## Verify the demo's run against the log
	@$(BIN)/rollstream demo --verify

bench: .venv/.test ## Benchmarks; writes bench.json
	@$(BIN)/python -m tests.bench

lint: .venv/.test ## ruff, mypy, import contracts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

format: .venv/.test ## Format the code
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean: down ## Remove the environment and the local data
	rm -rf .venv .tools .rollstream .mypy_cache .ruff_cache .pytest_cache

$(TOOLS)/uv: uv.lock
	@$(PYTHON) infra/bootstrap.py $(TOOLS)
	@touch $@

# The set-up of what is run, and no more. A stamp says which lock file it was made from.
.venv/.demo: pyproject.toml uv.lock | $(UV)
	@echo "installing rollstream (the first time this downloads about 5 GB)"
	@$(SYNC) $(DEMO_EXTRAS)
	@touch $@

.venv/.test: pyproject.toml uv.lock | $(UV)
	@echo "installing rollstream with its test tools (the first time this downloads about 5 GB)"
	@$(SYNC) $(TEST_EXTRAS)
	@touch $@ .venv/.demo

# A uv of your own (make UV=uv) is not built here.
uv:
	@true

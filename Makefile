# Everything a person types while working on Semel. It needs Python 3.11 or newer, make, and PyPI; nothing else.

PYTHON ?= python3
BIN := .venv/bin
# The demo needs little of what the tests need, and is not to wait for the rest of it; where that is there, it will do.
DEMO := $(if $(wildcard .venv/.ready),.venv/.ready,.venv/.demo)

.PHONY: help demo rides report parcels test walks cover check model fix bench torture clean
.DEFAULT_GOAL := help

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO) ## See a payment retried, raced and crashed, and made once.
	@$(BIN)/semel demo

rides: .venv/.ready ## See an API of several steps killed half-way, and resumed.
	@$(BIN)/python -m examples.rides

report: .venv/.ready ## See a ten-second job with its progress bar, and its worker killed half-way.
	@$(BIN)/python -m examples.report

parcels: .venv/.ready ## See orders become parcels through a broker, with everything on the way killed.
	@$(BIN)/python -m examples.parcels

test: .venv/.ready ## Run the tests, on real PostgreSQL and Redis, on every core.
	@$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

walks: .venv/.ready ## Run the slow tests: walks of many kills, and every other store and server.
	@$(BIN)/python -m pytest -n auto --dist worksteal -m slow

cover: .venv/.ready ## Run the tests of core and flows, and show each branch they miss.
	@$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" tests/core tests/flows --cov

model: .venv/.ready ## Check the model of claims and messages with TLC, and that each planted bug is found. It takes minutes.
	@$(BIN)/python -m pytest -n auto --dist worksteal -m "slow or not slow" tests/model

check: .venv/.ready ## Look for faults without running anything: format, lint, types, layers, docs.
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/docs.py --check

fix: .venv/.ready ## Format the code and mend what ruff can mend.
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

bench: .venv/.ready ## Measure what Semel costs, against the same app without it.
	@$(BIN)/python -m bench
	@$(BIN)/python -m bench messages
	@$(BIN)/python -m bench client
	@$(BIN)/python -m bench proxy
	@$(BIN)/python -m bench telemetry
	@$(BIN)/python -m bench console --rows 100000
	@$(BIN)/python -m bench partitions

torture: .venv/.failover ## Kill it at every line, and count what was done twice or lost. It takes minutes.
	@$(BIN)/python -m torture

clean: ## Remove what make and the tools made.
	@rm -rf .venv dist .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so an interrupted installation is taken up again.
.venv/.demo: EXTRAS = demo
.venv/.demo: WHAT = Semel and what its demo needs into .venv (some seconds, once)
.venv/.ready: EXTRAS = dev,postgres,redis,cli
.venv/.ready: WHAT = Semel and its tools into .venv (a minute or two, once)
.venv/.demo .venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Semel needs Python 3.11 or newer, and \"$(PYTHON)\" is not: try make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Installing $(WHAT)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]' -c constraints.txt
	@touch $@

# A PostgreSQL that fails over: large, and of no use to the other targets.
.venv/.failover: .venv/.ready
	@echo "Installing Patroni and etcd into .venv (some seconds, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[failover]' -c constraints.txt
	@touch $@

# Needs make, Python 3.11+ and, for all but `lint` and `test-fast`, Java 17+. Everything else comes into .venv.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup java peers audit torture demo demo-kafka test test-fast lint bench bench-quick clean

PY := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" .venv/bin/python

help: ## Show what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 20

setup: ## Make .venv with the locked dependencies
	@.ci/setup

java:
	@.ci/java

demo: java setup ## Real flights, a disaster, a restore, a proof: about three minutes on two cores
	@$(PY) -m recovery.demo $(ARGS)

demo-kafka: java setup ## The same on a Kafka broker, which it starts itself
	@$(PY) -m recovery.demo --kafka $(ARGS)

test: java setup lint ## Lint, then all tests
	@PY='.venv/bin/python' PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" .ci/tests $(ARGS)

test-fast: setup ## Unit and model tests, no JVM: under a minute
	@FAST=1 PY='.venv/bin/python' PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" .ci/tests $(ARGS)

torture: java setup ## Hunt: processes killed at random for twice DURATION=120 s, then MINUTES=480 of faults and fuzz
	@$(PY) -m tests.crash.random_kills --seconds $(or $(DURATION),120) --seed $(or $(SEED),0)
	@$(PY) -m tests.crash.random_kills --seconds $(or $(DURATION),120) --seed $(or $(SEED),0) --standalone
	@$(PY) -m tests.crash.torture $(or $(MINUTES),480) $(or $(SEED),0)

lint: setup ## Style, types, and the arrows between packages
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet .
	@.venv/bin/mypy
	@PYTHONPATH="$(CURDIR)" .venv/bin/lint-imports --no-cache --no-logo

audit: setup ## Look up the locked dependencies among known vulnerabilities; asks a service on the network
	@[ -x .venv-audit/bin/pip-audit ] || { .venv/bin/python -m venv .venv-audit && \
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check --retries 5 "pip-audit>=2.9,<3"; }
	@.venv-audit/bin/pip-audit --requirement requirements.lock --require-hashes --disable-pip --strict $(ARGS)

peers: setup ## Make .venv-peers with what the benchmarks compare with; never needed by the product
	@.ci/peers

bench: java peers ## Side by side with Spark's own operators
	@$(PY) -m bench $(ARGS)

bench-quick: java peers ## The same, small
	@$(PY) -m bench --quick $(ARGS)

clean: ## Remove what runs left behind, not .venv
	@rm -rf demo-out spark-warehouse metastore_db derby.log .pytest_cache .mypy_cache .ruff_cache

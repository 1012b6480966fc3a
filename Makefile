# Needs make, Python 3.11+ and, for all but `lint` and `test-fast`, Java 17+. Everything else comes into .venv.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup java peers archives audit look torture demo demo-kafka test test-long test-fast test-postgres lint docs bench bench-quick matrix clean

PY := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" .venv/bin/python

# the command after it, with Java started quickly: the archives of loaded classes that it needs are made once
QUICK := $(PY) -m tests.support.quick_java

# with ARGS one pytest, which gets them; without, all by tests/runner
TESTS = .venv/bin/python $(if $(ARGS),-m pytest $(ARGS),-m tests.runner)

SITE := NO_MKDOCS_2_WARNING=1 PYTHONPATH="$(CURDIR)" .venv/bin/mkdocs build

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

test: java setup lint archives ## Lint, then all tests but the long ones
	@$(QUICK) $(TESTS)

archives: java setup
	@$(QUICK) true

test-long: java setup ## What takes long: kill points, two hosts, drills, demos, storms: over an hour
	@GROUP=long $(QUICK) $(TESTS)

test-fast: setup ## Unit and model tests, no JVM: under a minute
	@GROUP=fast $(PY) $(if $(ARGS),-m pytest tests/model tests/unit -m "not long and not slow" $(ARGS),-m tests.runner)

test-postgres: setup ## The SQL sink on PostgreSQL: an installed one, or REWIND_POSTGRES=postgresql+psycopg://user@host/database
	@REWIND_POSTGRES="$${REWIND_POSTGRES:-need}" $(PY) -m pytest -p no:cacheprovider tests/postgres $(ARGS)

torture: java setup ## Hunt: processes killed at random for twice DURATION=120 s, then MINUTES=480 of faults and fuzz
	@$(PY) -m tests.crash.random_kills --seconds $(or $(DURATION),120) --seed $(or $(SEED),0)
	@$(PY) -m tests.crash.random_kills --seconds $(or $(DURATION),120) --seed $(or $(SEED),0) --standalone
	@$(PY) -m tests.crash.torture $(or $(MINUTES),480) $(or $(SEED),0)

# mkdocs' own --quiet would hide the warnings from --strict
lint: setup ## Style, types, the arrows between packages, and the docs as a site
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet .
	@.venv/bin/mypy
	@PYTHONPATH="$(CURDIR)" .venv/bin/lint-imports --no-cache --no-logo
	@out=$$(mktemp -d) && trap 'rm -r "$$out"' EXIT && \
	{ $(SITE) --strict --site-dir "$$out/site" >"$$out/said" 2>&1 || { cat "$$out/said"; exit 1; }; }

docs: setup ## The docs as a site, in site/; needs no network
	@$(SITE) --strict --site-dir site

audit: setup ## Look up the locked dependencies among known vulnerabilities; asks a service on the network
	@[ -x .venv-audit/bin/pip-audit ] || { .venv/bin/python -m venv .venv-audit && \
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check --retries 5 "pip-audit>=2.9,<3"; }
	@.venv-audit/bin/pip-audit --requirement requirements.lock --require-hashes --disable-pip --strict $(ARGS)

look: setup ## The drill's page in headless Chromium, which it needs: console, 390 px, light, dark; REPORT=<report.html>
	@$(PY) -m tests.support.look look-out $(REPORT)

peers: setup ## Make .venv-peers with what the benchmarks compare with; never needed by the product
	@.ci/peers

bench: java peers ## Side by side with Spark's own operators
	@$(PY) -m bench $(ARGS)

bench-quick: java peers ## The same, small
	@$(QUICK) .venv/bin/python -m bench --quick $(ARGS)

matrix: java setup ## The tests on each Python and PySpark that can be had, in environments under .matrix; hours
	@.venv/bin/python .ci/matrix $(ARGS)

clean: ## Remove what runs left behind, not .venv
	@rm -rf demo-out look-out spark-warehouse metastore_db derby.log .pytest_cache .mypy_cache .ruff_cache

# Two commands matter: `make demo` and `make test`. Both set themselves up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests wait for processes and servers half of their time.
JOBS ?= $(shell expr $$(nproc 2>/dev/null || echo 2) \* 2)
STAMP := $(VENV)/.installed-dev
DEMO_STAMP := $(VENV)/.installed-demo
DOCS_STAMP := $(VENV)/.installed-docs
COMPILED := hatch_build.py $(wildcard shardkit/*/*.c)

.PHONY: demo quick test lint docs sanitize drills setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tools/install.sh $(COMPILED)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh tools/install.sh dev
	@touch $(STAMP) $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt tools/install.sh $(COMPILED)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh tools/install.sh demo
	@touch $(DEMO_STAMP)

$(DOCS_STAMP): pyproject.toml constraints.txt tools/install.sh $(COMPILED)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh tools/install.sh docs
	@touch $(DOCS_STAMP)

demo: $(DEMO_STAMP)  ## build, verify, train, kill, resume, damage, heal, audit: in 30 seconds to two minutes
	@$(BIN)/python examples/demo.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/import_circles.py
	$(BIN)/codespell
	$(BIN)/python tools/draw_architecture.py --check
	$(BIN)/python tools/make_docs.py --check
	$(BIN)/python tools/bench/interruptions/page.py --check

docs: $(DOCS_STAMP)  ## the site, below build/docs/site; no network once its packages are there
	$(BIN)/python tools/make_docs.py

test: $(STAMP)  ## the whole suite, fast tests first
	@echo "unit, property, integration (processes, S3, torchrun), faults, compat; 15 to 20 minutes on two processors"
	$(BIN)/pytest -n $(JOBS) --dist worksteal

quick: $(STAMP)  ## unit and property tests without the slow ones, in about two minutes: for every edit
	@echo "unit and property tests with fewer examples, without those marked slow or drill; all tests: make test"
	SHARDKIT_HYPOTHESIS=quick $(BIN)/pytest -q -n $(JOBS) --dist worksteal tests/unit tests/property -m "not slow and not drill"

sanitize: $(STAMP)  ## the loader's compiled module with ASAN and UBSAN, under its property tests
	@BIN="$(BIN)" sh tools/sanitize.sh

drills: $(STAMP)  ## the long fault drills at their stated counts; results go to tools/bench/results/
	SHARDKIT_DRILLS=full $(BIN)/pytest -n $(JOBS) --dist worksteal -m drill

clean:
	rm -rf $(VENV) build/docs .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Every target below does its own set-up first: see docs/how-to/set-up.md.
VENV ?= .venv
BIN := $(VENV)/bin
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3)
ARGS ?=
RELEASES ?=
WORKERS ?= 3
# A file's tests stay together, because they share servers.
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Without bytecode, every process of every test would compile the sources again.
COMPILE := $(BIN)/python -m compileall -q src

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak check matrix cpu-matrix catalogue pictures docs lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Each name is tried by running it: a launcher of that name may stand for a Python that is not there.
setup: ## make the virtual environment and the embedded model (once; PYTHON=... chooses the interpreter)
	@for python in $(PYTHONS); do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			exec $$python scripts/setup.py --venv '$(VENV)'; \
		fi; \
	done; \
	echo "setup: none of '$(PYTHONS)' runs and is Python 3.11 or newer; name one that does: make setup PYTHON=/path/to/python" >&2; \
	exit 1

demo: setup ## start a real vLLM with plugins and patches and show what they do
	@$(BIN)/vllm-graft demo $(ARGS)

test: setup ## run the tests in three processes (WORKERS=4), or a part of them in one (ARGS="-k name" goes to pytest)
	@$(COMPILE)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(if $(ARGS),$(ARGS),$(SPREAD) --durations=25)

soak: setup ## run the tests that play thousands of requests, which `make test` leaves out
	@$(COMPILE)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --soak $(ARGS)

check: lint ## lint, and the tests that start no process
	@$(COMPILE)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(SPREAD) --quick -q $(ARGS)

matrix: setup ## run the tests on seven vLLM releases, simulated (RELEASES=0.26.0,0.28.0 chooses)
	@$(BIN)/python scripts/matrix.py $(if $(RELEASES),--releases '$(RELEASES)') $(ARGS)

cpu-matrix: setup ## run the end-to-end tests on three vLLM releases, each a real build for CPUs in .venvs
	@$(BIN)/python scripts/matrix.py --cpu $(if $(RELEASES),--releases '$(RELEASES)') $(ARGS)

catalogue: setup ## build the catalogue of vLLM's releases anew, or add some to it (RELEASES=0.33.0)
	@$(BIN)/python scripts/catalogue.py $(if $(RELEASES),--add '$(RELEASES)')

pictures: setup ## draw the pictures of the samplers and of the cost of KV policies anew
	@$(BIN)/python scripts/sampler_pictures.py
	@$(BIN)/python -m benchmarks.attention quality --record benchmarks/attention/quality.json \
		--svg docs/explanation/benchmarks/attention-quality.svg
	@$(BIN)/python -m benchmarks.attention quality --record benchmarks/attention/quality_qwen.json \
		--svg docs/explanation/benchmarks/attention-quality-qwen.svg

docs: setup ## build the documentation as a site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: setup ## check style, formatting, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## rewrite the sources in the common style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean: ## remove the virtual environments and all that tools left (the model's folder stays)
	rm -rf '$(VENV)' .venvs build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

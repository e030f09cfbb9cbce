# Every target below does its own set-up first: see docs/setup.md.
VENV ?= .venv
BIN := $(VENV)/bin
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3)
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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

test: setup ## run the tests (ARGS="-k name" passes options to pytest)
	$(BIN)/python -m pytest $(ARGS)

lint: setup ## check style, formatting, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## rewrite the sources in the common style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean: ## remove the virtual environment and all that tools left (the model's folder stays)
	rm -rf '$(VENV)' build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

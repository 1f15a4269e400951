# Every target does its own set-up: a virtual environment in .venv with the versions of
# constraints.txt. What a machine needs beforehand: Python 3.10 or newer, and a C++ compiler.

PYTHON ?= python3
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Each test worker computes on one thread, so that JOBS workers do not fight over the cores.
# A worker runs neighbouring tests, which share what their module builds.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: help demo examples test test-all fuzz bench lint format clean

help:
	@echo "make demo      GPT-2 compiled, checked against eager, timed, and its kernels shown"
	@echo "make examples  a GPT, the Trainer of transformers and DDP, trained by fusec"
	@echo "make test      the tests, without the slow ones (JOBS=2 of them at a time)"
	@echo "make test-all  all tests"
	@echo "make fuzz      2,000 random programs against eager and fp64; failures in build/fuzz"
	@echo "make bench     eager, Inductor and fusec side by side on this machine's CPU"
	@echo "make lint      ruff and mypy"
	@echo "make format    rewrite the sources as ruff formats them"
	@echo "make clean     remove the virtual environment and what tools left behind"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check \
	  -c constraints.txt -e ".[cli,demo,test,bench]"
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo_gpt2.py

examples: $(STAMP)
	$(BIN)/python examples/train_gpt.py --plot build/train_gpt.png
	$(BIN)/python examples/hf_trainer.py
	$(BIN)/python examples/ddp.py

test: $(STAMP)
	$(PYTEST)

test-all: $(STAMP)
	$(PYTEST) --slow

fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz

bench: $(STAMP)
	$(BIN)/python -m bench

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Every target does its own set-up: a virtual environment in .venv with the versions of
# constraints.txt. What a machine needs beforehand: Python 3.10 or newer, and a C++ compiler.

PYTHON ?= python3
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The newest torch that is tested, and its Triton, in an environment of their own; and the oldest.
HOURS ?= 8
NEWEST := .venv-newest
NEWEST_STAMP := $(NEWEST)/.installed
OLDEST := .venv-oldest
OLDEST_STAMP := $(OLDEST)/.installed

# What `make bench-peers` measures fusec beside, and how: BUSY=2, ROWS="--only swin".
BESIDE := .venv-peers
BESIDE_STAMP := $(BESIDE)/.installed
BUSY ?= 0
ROWS ?=

# Each test worker computes on one thread, so that JOBS workers do not fight over the cores.
# A worker runs neighbouring tests, which share what their module builds.
# They share the bytecode of tests, too, also where the environment says that none is written.
RUN_TESTS = -m pytest -n $(JOBS) --dist worksteal
ONE_THREAD = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST = $(ONE_THREAD) $(BIN)/python $(RUN_TESTS)
PYTEST_NEWEST = $(ONE_THREAD) $(NEWEST)/bin/python $(RUN_TESTS)
PYTEST_OLDEST = $(ONE_THREAD) $(OLDEST)/bin/python $(RUN_TESTS)

# What stands on the interiors of torch and Triton, and a smoke test of the rest.
INTERIORS := tests/runtime/kernels/test_triton_kernel.py tests/runtime/kernels/test_triton_interior.py \
  tests/tools/test_static_checks.py tests/runtime/calls/test_fake.py tests/runtime/calls/test_cuda_graphs.py \
  tests/runtime/kernels/driver tests/codegen/test_triton_static.py tests/tools/test_cli_check.py tests/frontend \
  tests/ops/test_metadata.py tests/ops/test_data_dependent.py tests/ops/test_errors.py \
  tests/models/test_gpt2_block.py

# A block of each model, trained in the emulator: what is in its kernels, on a GPU that is not here.
EMULATED := gpt2 bert llama vit
EMULATED_ON := sm_90 sm_100 sm_120
EMULATE = OMP_NUM_THREADS=1 $(BIN)/fusec check --emulate --input bf16[2,24,64] --train

.PHONY: help demo examples docs emulate test test-long test-all test-static test-torchao test-newest test-newest-quick test-oldest fuzz bench bench-peers lint format clean

help:
	@echo "make demo      GPT-2 compiled, checked against eager, timed, and its kernels shown"
	@echo "make examples  a GPT, the Trainer of transformers and DDP, trained by fusec"
	@echo "make docs      docs/ as a site, in build/site; what a link misses is an error"
	@echo "make test      nine of ten tests, those that are quick (JOBS=2 of them at a time)"
	@echo "make test-long those that take longest (tests/long.txt); CI runs them, too"
	@echo "make test-all  all tests; with TORCH_TESTS=PATH, PyTorch's folder test, its own"
	@echo "make emulate   GPU kernels run on this CPU: each kind, planted faults, a block of each model"
	@echo "make test-static        GPU kernels of all shapes and of whole models, built and judged"
	@echo "make test-torchao       quantised layers of torchao, a part of make test-all"
	@echo "make test-newest        both with the newest torch and Triton, in .venv-newest"
	@echo "make test-newest-quick  the part of it that stands on their interiors"
	@echo "make test-oldest        both with the oldest torch and Triton, in .venv-oldest"
	@echo "make fuzz      a night of random programs against eager (HOURS=8); failures and corpus in build/fuzz"
	@echo "make bench     eager, Inductor and fusec side by side on this machine's CPU"
	@echo "make bench-peers        the same, OpenVINO and ONNX Runtime, in .venv-peers; BUSY=2 ROWS=--quick"
	@echo "make lint      ruff and mypy"
	@echo "make format    rewrite the sources as ruff formats them"
	@echo "make clean     remove the virtual environments and what tools left behind"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check \
	  -c constraints.txt -e ".[cli,demo,test,bench]"
	@touch $@

# What constraints-newest.txt names stands in the place of what constraints.txt says of it.
$(NEWEST_STAMP) $(OLDEST_STAMP): .venv-%/.installed: \
    pyproject.toml constraints.txt constraints-%.txt
	$(PYTHON) -m venv .venv-$*
	sed -n "s/^\([^#=]*==\).*/^\1/p" constraints-$*.txt | grep -v -f - constraints.txt \
	  | cat - constraints-$*.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --disable-pip-version-check --no-cache-dir \
	  -c .venv-$*/constraints.txt -e ".[cli,demo,test,bench]"
	@touch $@

$(BESIDE_STAMP): pyproject.toml constraints.txt bench/constraints-peers.txt
	$(PYTHON) -m venv $(BESIDE)
	$(BESIDE)/bin/python -m pip install --disable-pip-version-check -c constraints.txt \
	  -c bench/constraints-peers.txt -e ".[bench]" onnx onnxruntime onnxscript openvino pytest
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo_gpt2.py

examples: $(STAMP)
	$(BIN)/python examples/train_gpt.py --plot build/train_gpt.png
	$(BIN)/python examples/hf_trainer.py
	$(BIN)/python examples/ddp.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test: $(STAMP)
	$(PYTEST) --part short

test-long: $(STAMP)
	$(PYTEST) --part long

emulate: $(STAMP)
	$(PYTEST) --slow tests/tools/emulator
	for block in $(EMULATED); do \
	  for target in $(EMULATED_ON); do \
	    for race in library fused; do \
	      $(EMULATE) --target $$target --race $$race tests/tools/emulator/blocks.py:$$block || exit 1; \
	    done; \
	  done; \
	done

test-static: $(STAMP)
	$(PYTEST) --slow tests/codegen/test_*_static.py

# Apart from the rest: wherever torchao is installed, transformers imports it.
test-torchao: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade -c constraints.txt \
	  --target build/torchao torchao
	PYTHONPATH=build/torchao $(PYTEST) --slow tests/models/test_torchao.py

test-all: $(STAMP) test-torchao
	$(PYTEST) --slow $(if $(TORCH_TESTS),--torch-tests $(TORCH_TESTS))

test-newest: $(NEWEST_STAMP)
	$(PYTEST_NEWEST)

test-newest-quick: $(NEWEST_STAMP)
	$(PYTEST_NEWEST) $(INTERIORS)

test-oldest: $(OLDEST_STAMP)
	$(PYTEST_OLDEST)

fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --hours $(HOURS) --jobs 2 --resume

bench: $(STAMP)
	$(BIN)/python -m bench

bench-peers: $(BESIDE_STAMP)
	$(BESIDE)/bin/python -m bench.peers --busy $(BUSY) $(ROWS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(NEWEST) $(OLDEST) $(BESIDE) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

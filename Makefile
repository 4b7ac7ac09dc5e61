# make quickstart: train a small model here, without a GPU. make test: the tests. Needs Python 3.11 to 3.13 and make.

PYTHON ?= python3
VENV ?= .venv
# One exact version whose ordinary wheel runs here without a GPU; with an NVIDIA driver the newest that pip finds.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.9,torch==2.13.0)
EXTRAS ?= dev,notebooks,trl
# Tests: processes, and threads of each.
WORKERS ?= 2
THREADS ?= 1

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# DeepSpeed is built from its sources when it is installed; only the tests need it.
DEEPSPEED := $(VENV)/.deepspeed
# A CPU without AVX-512: torch, MKL and oneDNN take other branches, round otherwise and hold other temporaries.
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
NUMERIC := tests/ops tests/codecs tests/verification tests/planning/test_load_forecast.py tests/models/test_head.py \
	tests/models/test_load_base.py tests/models/test_replace_modules.py tests/convergence/test_stock_60_lines.py
RUN := runs/quickstart
# make quickstart OVERRIDES="train.max_steps=10": keys of configs/quickstart.yaml to change.
OVERRIDES ?=

.PHONY: help setup quickstart test test-long test-quick test-avx2 mutants kernels check docs clean FORCE

help:
	@echo "make quickstart  set up, fetch a small model and data, train into $(RUN), show answers before and after"
	@echo "make test        run the tests (15 minutes on 2 cores)"
	@echo "make test-quick  those of them that start no runs, processes or compilers (2 minutes)"
	@echo "make test-long   the others: several ranks, interpreted kernels, resume at every point (35 minutes)"
	@echo "make test-avx2   run the numeric tests again, as on a CPU without AVX-512"
	@echo "make check       lint, types, layers"
	@echo "make mutants     plant faults in the kernels and see the tests catch each (20 minutes)"
	@echo "make kernels     compile every kernel for every GPU generation, count its traffic (30 minutes, no GPU)"
	@echo "make setup       only the environment, $(VENV)"
	@echo "make docs        write docs/config.md and docs/architecture.svg anew"
	@echo "make clean       remove the environment and caches; runs/ stays"

setup: $(INSTALLED)

# Which torch was asked for; changes, and so reinstalls, when TORCH or EXTRAS do.
$(VENV)/.asked: FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH) $(EXTRAS)' | cmp -s - $@ || echo '$(TORCH) $(EXTRAS)' > $@

$(INSTALLED): pyproject.toml setup.py $(VENV)/.asked
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else "Python 3.11 to 3.13 is needed, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % v)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "Installing into $(VENV); the first time takes a few minutes."
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

$(DEEPSPEED): $(INSTALLED)
	PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS),deepspeed]'
	@echo "DeepSpeed compiles an operation for CPUs, once; it takes a minute or two."
	@if command -v c++ >/dev/null; \
	then DS_ACCELERATOR=cpu $(BIN)/python -c "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Op; Op().load(verbose=False)"; \
	else echo "There is no C++ compiler: the tests of DeepSpeed are left out."; fi
	@touch $@

quickstart: setup
	$(BIN)/frugal fetch smollm2-135m-instruct
	$(BIN)/frugal fetch chatterbot-corpus
	@if test -e $(RUN); then echo "Removing the former quickstart run, $(RUN)."; rm -rf $(RUN); fi
	$(BIN)/frugal train configs/quickstart.yaml $(OVERRIDES)
	@echo
	@echo "The adapter, the log and the samples before and after are in $(RUN)."
	@echo "Try next:"
	@echo "  $(BIN)/frugal chat $(RUN)"
	@echo "  $(BIN)/frugal chat $(RUN) --prompt 'My computer will not turn on.'"
	@echo "  $(BIN)/frugal configs copy quickstart mine.yaml    # then put your own data in"

test: setup $(DEEPSPEED)
	OMP_NUM_THREADS=$(THREADS) TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not long"

test-long: setup $(DEEPSPEED)
	OMP_NUM_THREADS=$(THREADS) TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m long

test-quick: setup
	OMP_NUM_THREADS=$(THREADS) TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow"

test-avx2: setup
	$(AVX2) $(BIN)/python -c 'import torch; assert torch.backends.cpu.get_cpu_capability() == "AVX2"'
	$(AVX2) OMP_NUM_THREADS=$(THREADS) TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(NUMERIC)

mutants: setup
	$(BIN)/python tests/kernels/mutants.py

kernels: setup
	$(BIN)/python benchmarks/kernels_aot.py --json benchmarks/results/kernels_aot.json
	$(BIN)/python benchmarks/kernels_traffic.py --json benchmarks/results/kernels_traffic.json --csv benchmarks/results/kernels_traffic.csv

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup
	$(BIN)/frugal schema --markdown --out docs/config.md
	$(BIN)/python docs/architecture.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find frugal tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

FORCE:

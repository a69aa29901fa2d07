# Every target builds the virtual environment it needs: Python >= 3.11 and network are enough.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export BASE_IMAGE TORCH IMAGE

help:  ## print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

venv: $(VENV)/.done  ## build the virtual environment

$(VENV)/.done: pyproject.toml image/constraints.txt image/make-venv
	image/make-venv "$(PYTHON)" "$(VENV)" train,k8s,dev
	@touch $@

demo: venv  ## train on four local pods, kill one, sample: about four minutes
	$(BIN)/python -m gptddp.demo

test: venv  ## all tests that need no cluster
	$(BIN)/python -m pytest

lint: venv  ## ruff and mypy
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: venv  ## the benchmarks: ratios, measured side by side
	$(BIN)/python benchmarks/trainer.py

image:  ## build the image gptddp:<version>; BASE_IMAGE=... TORCH=cpu|cuda IMAGE=...
	image/build

wheel: venv  ## build the wheel into dist/
	$(BIN)/python -m build --wheel

clean:  ## remove the virtual environment, caches and the demo
	rm -rf "$(VENV)" dist demo .pytest_cache .mypy_cache .ruff_cache

.PHONY: help venv demo test lint bench image wheel clean

# Everything runs in one virtual environment: .venv, or where RAYKV_VENV says.
VENV    := $(or $(RAYKV_VENV),.venv)
PY      := $(VENV)/bin/python
BACKEND ?= cpu
export BACKEND

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test unit integration lint format bench parts soak clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make or update the virtual environment (BACKEND=cuda for NVIDIA GPUs)
	@python3 scripts/setup.py

demo: setup  ## a real model, two real children in Ray actors, a child killed (MODEL=path for your own model)
	@MODEL="$(MODEL)" $(PY) -m examples.demo

test: setup lint unit integration  ## all that must pass before a change goes in

unit: setup  ## tests without Ray, vLLM and other processes that import torch (half a minute)
	$(PY) -m pytest tests -m 'not process and not vllm and not ray and not engine and not soak'

integration: setup  ## tests with other processes, vLLM's own classes, a local Ray, real engines
	$(PY) -m pytest tests -m '(process or vllm or ray) and not engine and not soak'
	@# A shared machine that stands still for longer than a limit costs a child, and a test about it, its process:
	@# so these are tried again. The report names what was.
	$(PY) -m pytest tests -m 'engine and not soak' --reruns 2 --reruns-delay 10

lint: setup  ## ruff (rules and format) and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup  ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup  ## hook time and TTFT against vLLM's own MultiConnector
	$(PY) -m benchmarks.run

parts: setup  ## benchmarks of single parts: look-ups, copies, Directory, peer reads, router (minutes)
	@for part in lookups storage directory peer peer_ttft router metrics hooks; do $(PY) -m benchmarks.$$part || exit 1; done

soak: setup  ## the long tests, and the unit tests with twenty times as many random examples, new ones
	RAYKV_EXAMPLES=new $(PY) -m pytest tests -m 'not process and not vllm and not ray and not engine and not soak'
	$(PY) -m pytest tests -m soak

clean:  ## remove caches, builds and reports; the virtual environment stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-report.json bench-report.json faults-report.json
	find raykv tests examples benchmarks scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

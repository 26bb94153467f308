# make demo    a real model and a small MoE through every step, on this machine
# make test    all tests            make lint    ruff and mypy
# make plans   regenerate the committed plans
# make engines fetch the engines that some tests need (Vulkan, llama-server)
# Each creates the environment it needs in .venv; a second run starts at once.

VENV ?= .venv
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); test $$n -lt 8 && echo $$n || echo 8)
TESTS ?= tests
PY := $(VENV)/bin/python

.PHONY: test demo plans lint engines clean
.DEFAULT_GOAL := test

# What a user needs, and what a developer needs: the second brings the first.
$(VENV)/.user: pyproject.toml
	@test -e $(VENV)/.developer && test ! pyproject.toml -nt $(VENV)/.developer || .ci/environment $(VENV)
	@touch $@
$(VENV)/.developer: pyproject.toml
	@.ci/environment $(VENV) dev
	@touch $@

test: $(VENV)/.developer
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS) $(TESTS)

demo: $(VENV)/.user
	$(VENV)/bin/atsplan demo --folder .cache

plans: $(VENV)/.user
	$(PY) plans/regenerate.py

lint: $(VENV)/.developer
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

engines: $(VENV)/.user
	$(PY) tests/get_engines.py --node

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

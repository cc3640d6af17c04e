# Each target does its own set-up in .venv, once: `make train` and `make test` work in a fresh clone.
# Options go through ARGS: make train ARGS="--seed=1", make test ARGS="-k replay".

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

# One compute thread: tests and training start processes of their own and share the cores with them.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup train test test-all bench bench-peers lint docs clean

help:
	@echo "make train     train CartPole-v1 with DQN until an evaluation of 20 episodes reaches 475"
	@echo "make test      every check that CI runs: style, types, tests; at most 10 minutes"
	@echo "make test-all  all tests, also the long ones"
	@echo "make bench     what each station costs, against the least it could cost"
	@echo "make bench-peers  the same work done by other libraries, in environments of their own; ARGS=--full for all of it"
	@echo "make docs      build the documentation into site/"
	@echo "make setup     only install, into $(VENV) (a part of all the others)"
	@echo "make clean     remove what was built, and $(VENV)"

setup: $(STAMP)

$(STAMP): requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"outrider needs Python 3.11 or later; {sys.executable} is {v[0]}.{v[1]}. Try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' requirements-dev.lock)"
	$(BIN)/python -m pip install --quiet -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

train: setup
	$(BIN)/outrider train cartpole-dqn --evaluator.n_episodes=20 --trainer.target_score=475 $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: lint
	$(BIN)/python -m pytest $(ARGS)

bench: setup
	for part in actor_loop channel replay learner start memory scale; do $(BIN)/python benchmarks/$$part.py || exit 1; done

docs: setup
	$(BIN)/python docs/make_configuration.py
	$(BIN)/python docs/make_metrics.py
	$(BIN)/zensical build --clean --strict
	rm -f site/make_*.py

clean:
	rm -rf $(VENV) benchmarks/.venvs site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

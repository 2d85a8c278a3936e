# All set-up is done by the targets themselves: `make demo` and `make test` work on a fresh clone.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(shell find csrc tests/native -name '*.cpp' -o -name '*.h')

.PHONY: demo test sanitize lint types format wheel clean help

help:
	@echo "make demo    train a small language model on two sharded ranks"
	@echo "make test    run the tests (ARGS='-k name' narrows them down)"
	@echo "make sanitize  run the native parts under the address, undefined-behaviour and thread sanitizers"
	@echo "make lint    ruff and clang-format, checking only"
	@echo "make types   mypy"
	@echo "make format  let ruff and clang-format rewrite the files"
	@echo "make wheel   build dist/*.whl"
	@echo "make clean   remove everything the other targets made"

$(STAMP): constraints.txt pyproject.toml setup.py scripts/bootstrap.sh $(SOURCES)
	scripts/bootstrap.sh $(VENV)
	touch $@

demo: $(STAMP)
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_lm.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest tests $(ARGS)

sanitize:
	scripts/sanitize.sh

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(SOURCES)

types: $(STAMP)
	$(BIN)/mypy --strict zerosharder

format: $(STAMP)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

# build/ goes first: a stale one would carry deleted modules into the wheel.
wheel: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) build dist zerosharder.egg-info zerosharder/_C.*.so .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

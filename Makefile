PYTHON ?= python3
BIN := .venv/bin
SEEDS ?= 2
METHODS ?= frozen-head,dualprompt,dualprompt-rp
# Small enough for four minutes on two cores: fewer pictures, and 160 of the backbone's 224 pixels.
LITTLE ?= --benchmark.train_per_class 8 --benchmark.test_per_class 8 --backbone.input_size 160 --train.epochs 2 --train.batch_size 8 --evaluate.ahead 0
DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: install demo docs test test-slow lint dist try-wheel clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: install
	$(BIN)/dualprompt run mini --methods $(METHODS) --seeds $(SEEDS) $(LITTLE) --out $(DEMO)
	$(BIN)/dualprompt report $(DEMO)

lint: install
	$(BIN)/ruff check src tests tools examples docs
	$(BIN)/ruff format --check src tests tools examples docs
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: install
	$(BIN)/dualprompt publish --check README.md docs/*.md docs/*/*.md
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going docs docs/_build/html
	$(BIN)/python -m tools.site.links docs/_build/html

test: lint
	$(BIN)/python -m pytest -n 3 --dist loadgroup --durations 10

test-slow: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow

dist: install
	rm -rf dist
	$(BIN)/python -m build

# The wheel in a clean environment, with every extra by itself: make try-wheel PYTHON=python3.13 EXTRAS=none
EXTRAS ?= all
try-wheel: dist
	$(BIN)/python tools/try_wheel.py --python $(PYTHON) --extras $(EXTRAS)

clean:
	rm -rf .venv build dist docs/_build .pytest_cache .ruff_cache .hypothesis .import_linter_cache

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -c constraints.txt
INSTALLED := .venv/.installed
ZOO_INSTALLED := .venv/.installed-zoo
BENCH_INSTALLED := .venv/.installed-bench
HTML_INSTALLED := .venv/.installed-html

.PHONY: demo test test-html sweep sweep-inductor sweep-special judge search zoo lint check stress bench size names docs clean

demo: $(INSTALLED)
	$(BIN)/monograph demo

# two processes of one thread each
test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

# the page of to_html() in a browser; needs Chromium (Debian: apt install chromium)
test-html: $(HTML_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/html

# torch's own databases of ops, modules and optimizers; started again it goes on where it stopped
sweep: $(INSTALLED)
	$(BIN)/python -m tests.sweep.run
	$(BIN)/python -m tests.sweep.table

# torch's database of ops with the compiled backend; `--minutes 20` stops in between, the next run goes on
sweep-inductor: $(INSTALLED)
	$(BIN)/python -m tests.sweep.run inductor
	$(BIN)/python -m tests.sweep.table

# NaN, infinities, limits and casts in compiled steps, thirty ops in each
sweep-special: $(INSTALLED)
	$(BIN)/python -m tests.sweep.run special
	$(BIN)/python -m tests.sweep.table

# how far compiled steps are from float64, on the workloads of the benchmarks; about half an hour on one thread
judge: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.judge.run
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.judge.run --amp

# a thousand random cases where `make test` tries thirty
search: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal --hypothesis-profile monograph-search -m hypothesis

# models of other libraries
zoo: $(ZOO_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/zoo

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_public_api.py tests/test_tiny.py

stress: $(INSTALLED)
	$(BIN)/python -m tests.stress.mutate_checkpoint --trials 10000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.mutate_artifact --trials 10000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.artifact_ops --calls 100000
	$(BIN)/python -m tests.stress.kill_during_save --trials 200
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.object_programs --trials 20000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.argument_layouts --trials 20000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.float_expressions --trials 20000 --seed 0
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.value_reads --trials 5000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.view_programs --trials 5000

# two hours on a quiet machine; writes the tables of docs/benchmarks.md; broken off, it goes on where it stopped
bench: $(BENCH_INSTALLED)
	$(BIN)/monograph bench --json benchmarks/report.json --chart docs/benchmarks.svg --markdown docs/benchmarks.md --resume

size: $(INSTALLED)
	$(BIN)/python tools/size.py

# docs/oneflow-names.md, from tests/flow/oneflow_names.txt
names: $(INSTALLED)
	$(BIN)/python -m tests.flow.names_page

docs:
	@echo "The documentation is in docs/; begin with README.md and docs/index.md."

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find benchmarks examples monograph tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and under the constraint, so that no later step replaces it
$(INSTALLED): pyproject.toml constraints.txt
	python3 -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[dev]'
	touch $@

$(ZOO_INSTALLED): $(INSTALLED)
	$(PIP) -e '.[dev,zoo]'
	touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	$(PIP) -e '.[dev,bench]'
	touch $@

$(HTML_INSTALLED): $(INSTALLED)
	$(PIP) -e '.[dev,html]'
	touch $@

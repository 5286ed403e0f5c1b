BIN := .venv/bin
PIP := $(BIN)/python -m pip install -c constraints.txt
INSTALLED := .venv/.installed
ZOO_INSTALLED := .venv/.installed-zoo
BENCH_INSTALLED := .venv/.installed-bench
HTML_INSTALLED := .venv/.installed-html
INTEGRATIONS_INSTALLED := .venv/.installed-integrations
DOCS_INSTALLED := .venv/.installed-docs
# two processes of one thread each
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal

.PHONY: demo unit test test-all ranks test-html test-integrations sweep sweep-inductor sweep-special judge search zoo zoo-sizes lint check stress mutants bench size names docs clean ci-installed

demo: $(INSTALLED)
	$(BIN)/monograph demo

# the quick tests of one folder of the package: make unit DIR=capture/guards
unit: $(INSTALLED)
	$(PYTEST) -m "not long" $(or $(DIR:%=tests/%),$(error which folder? make unit DIR=capture))

# what each change needs: every promise by a case that stands for it
test: $(INSTALLED)
	$(PYTEST) -m "not long"

test-all: test-integrations
	$(PYTEST) -m "not ranks and not search"

# all that `make test-all` leaves out of what is for several processes: optimizers, layouts and workloads on two and four;
# half an hour on two cores
ranks: $(INSTALLED)
	$(PYTEST) --dist loadfile -m "ranks or search" tests/distributed tests/checkpoint/ranks

# the page of to_html() in a browser; needs Chromium (Debian: apt install chromium)
test-html: $(HTML_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/html

# training loops of other libraries, with the libraries themselves; a minute
test-integrations: $(INTEGRATIONS_INSTALLED)
	OMP_NUM_THREADS=1 $(PYTEST) tests/integrations

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
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.numerics.judge
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.numerics.judge --amp

# a thousand random cases where `make test-all` tries thirty, and all cases of tests of which it runs five
search: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PYTEST) --hypothesis-profile monograph-search -m "hypothesis or search"

# models of other libraries
zoo: $(ZOO_INSTALLED)
	OMP_NUM_THREADS=1 $(PYTEST) tests/zoo --ignore tests/zoo/test_zoo_sizes.py

# 57 of them at five sizes each; ten minutes on one thread
zoo-sizes: $(ZOO_INSTALLED)
	OMP_NUM_THREADS=1 $(PYTEST) tests/zoo/test_zoo_sizes.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# what every change can break: layers, public names, words, the list of mutations, the smallest step;
# and the quick tests of the folders that the change touches
check: lint
	$(PYTEST) -m "not long" tests/house tests/stress/test_mutations.py tests/graph/test_tiny.py \
		$$($(BIN)/python tools/touched.py)

stress: $(INSTALLED)
	$(BIN)/python -m tests.stress.mutate_checkpoint --trials 10000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.mutate_artifact --trials 10000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.artifact_ops --calls 100000
	$(BIN)/python -m tests.stress.kill_during_save --trials 200
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.processes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.refused_values
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.object_programs --trials 20000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.argument_layouts --trials 20000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.float_expressions --trials 20000 --seed 0
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.value_reads --trials 5000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.view_programs --trials 5000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.view_programs --trials 1600 --both-ways
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.stress.kill_compiler --trials 50

# faults put into the package, one at a time, and the tests that should notice; an hour and a half
mutants: $(INSTALLED)
	$(BIN)/python -m tests.stress.mutate_package

# hours on a quiet machine; writes the tables of docs/benchmarks.md; broken off, it goes on where it stopped
bench: $(BENCH_INSTALLED)
	$(BIN)/monograph bench --json benchmarks/report.json --chart docs/benchmarks.svg --markdown docs/benchmarks.md --resume

size: $(INSTALLED)
	$(BIN)/python tools/size.py

# docs/oneflow-names.md, from tests/flow/oneflow_names.txt
names: $(INSTALLED)
	$(BIN)/python -m tests.flow.names_page

# the site, in build/site: a link that leads nowhere, or a page that the navigation lacks, is an error
docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site"

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find benchmarks examples monograph tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and under the constraint, so that no later step replaces it
$(INSTALLED): pyproject.toml constraints.txt
	python3 -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[dev]'
	touch $@

# what .ci/run needs, in one go
ci-installed: $(INSTALLED)
	$(PIP) -e '.[dev,docs,html,integrations]'
	touch $(DOCS_INSTALLED) $(HTML_INSTALLED) $(INTEGRATIONS_INSTALLED)

$(ZOO_INSTALLED): $(INSTALLED)
	$(PIP) -e '.[dev,zoo]'
	touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	$(PIP) -e '.[dev,bench]'
	touch $@

$(HTML_INSTALLED): $(INSTALLED)
	$(PIP) -e '.[dev,html]'
	touch $@

$(INTEGRATIONS_INSTALLED): $(INSTALLED)
	$(PIP) -e '.[dev,integrations]'
	touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(PIP) -e '.[dev,docs]'
	touch $@

# Each target sets up what it needs in $(VENV); a second call does only what has changed since.

PYTHON ?= python3
VENV ?= .venv
# The versions that development and its tests are pinned to; the package itself takes torch >= 2.1, tensorflow >= 2.16.
TORCH ?= torch==2.13.0
TENSORFLOW ?= tensorflow-cpu==2.21.0
# Without its dependencies: it names the package `tensorflow`, which pip would put over `tensorflow-cpu`.
TF_KERAS ?= tf_keras==2.21.0
# Further options of `pip install`, such as an index that holds small CPU-only builds of PyTorch.
PIP_FLAGS ?=
# One more than the two cores of a small machine: tests often wait for what they have started or stopped.
TEST_JOBS ?= 3
TEST_FLAGS ?=
BENCH_FLAGS ?=
# With `-t online` the site links to the documentation of Python, NumPy and PyTorch.
DOCS_FLAGS ?=

BIN := $(abspath $(VENV))/bin
STAMPS := $(VENV)/stamps
PACKAGING := build/packaging
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile $(PIP_FLAGS)
PYTEST := $(BIN)/pytest -n $(TEST_JOBS) --dist loadgroup $(TEST_FLAGS)
# Folders are listed too, so that removing a file counts as a change.
SOURCES := pyproject.toml $(shell find horovodlike bindings launcher -name __pycache__ -prune -o -print)
CXX_SOURCES = $(shell find horovodlike bindings launcher packaging tests \( -name '*.h' -o -name '*.cc' -o -name '*.c' \) -print)

# Without its files of bytecode each process that imports a framework would compile it anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help dev ecosystem demo demo-tf test test-slow test-all test-aarch64 sanitize tools wheels bench gpu lint docs \
  pictures clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

dev: $(STAMPS)/dev build/import ## build and install into .venv, with what `make test`, `make lint` and editors need

ecosystem: $(STAMPS)/ecosystem ## install Ray, Spark, Sphinx and what else `make test-slow`, `docs` and `bench` need

demo: $(STAMPS)/package ## train on real data with 2 ranks and with 1, and compare
	$(BIN)/python examples/demo.py

demo-tf: $(STAMPS)/package $(STAMPS)/tensorflow ## the same with TensorFlow, and with Keras on both backends
	$(BIN)/python examples/demo.py tensorflow

test: $(STAMPS)/dev ## run the tests; tests/support/selection.py says which it leaves out
	$(PYTEST) -m 'not slow'

test-slow: $(STAMPS)/ecosystem ## run the tests that take long, which have to pass each night
	$(PYTEST) -m slow

test-all: $(STAMPS)/ecosystem ## run every test, with all combinations of parameters, and the core under sanitizers
	$(PYTEST) --thorough

sanitize: $(STAMPS)/dev ## run the tests of the core under ThreadSanitizer and AddressSanitizer
	$(PYTEST) --thorough -m thorough tests/native

test-aarch64: $(STAMPS)/dev $(PACKAGING)/stamp ## compile the tests of the core for aarch64, and run them in qemu
	$(PYTEST) -m aarch64 -v tests/native

tools: ## as root on Debian, install the servers that the tests of several hosts start
	packages=$$($(PYTHON) tests/cluster/tools.py); test -z "$$packages" || { apt-get update -q && \
	DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $$packages; }

wheels: $(PACKAGING)/stamp ## build the sdist and the wheels of each architecture into dist
	$(PACKAGING)/bin/python packaging/wheels.py

bench: $(STAMPS)/ecosystem ## measure against Gloo, MPI, memcpy, DDP and iperf3: twenty minutes on a quiet machine
	$(BIN)/python -m benchmarks $(BENCH_FLAGS)

# Without a GPU it fails at once and says why: tests that skip themselves would look like success.
gpu: $(STAMPS)/dev ## on a machine with a GPU: its tests, compute-sanitizer if it is in PATH, measurements
	$(BIN)/python tests/gpu/check.py

# mypy and import-linter run outside the checkout: they check what is installed, not the source folder of that name.
lint: $(STAMPS)/dev ## ruff, mypy, import-linter, clang-format, wording
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(VENV) && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p horovodlike
	cd $(VENV) && $(BIN)/lint-imports --no-cache $(CURDIR)/pyproject.toml
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/python tests/docs/words.py

docs: $(STAMPS)/ecosystem ## write what comes from the source (settings.md, diagrams), and the site: build/docs/site
	$(BIN)/python docs/developers/diagram.py
	$(BIN)/python docs/generate.py
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/sphinx-build -W --keep-going -q -c docs -d build/docs/doctrees $(DOCS_FLAGS) build/docs/source \
	  build/docs/site

pictures: $(STAMPS)/ecosystem ## write the pictures in docs/users that the browser makes of the monitor's page
	$(BIN)/pytest --pictures tests/monitor/test_monitor_page.py::test_the_picture_in_the_documentation

clean: ## remove all that make made, except benchmarks/results
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The folders under the names that they are installed as: where editors find them (`extraPaths` in pyproject.toml).
build/import: Makefile horovodlike
	rm -rf $@
	mkdir -p $@/horovodlike
	ln -s $(addprefix ../../../,$(wildcard horovodlike/*)) $@/horovodlike
	ln -s $(addprefix ../../../bindings/,torch tensorflow keras ray spark) ../../../launcher $@/horovodlike
	touch $@

$(STAMPS)/venv:
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

# The tools of the build and of `make dev`: to build, `pip` would install them anew each time, in a new folder, so
# nothing could be reused.
$(STAMPS)/build: $(STAMPS)/venv
	$(PIP_INSTALL) 'scikit-build-core>=0.11' 'cffi>=2.1' 'cmake>=3.25' 'ninja>=1.11' 'uv>=0.11'
	touch $@

# The tools of the wheels; pinned, since what is released depends on them.
$(PACKAGING)/stamp: packaging/requirements.txt
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS) -r $<
	touch $@

# Before the package, and pinned: left to its own `torch>=2.1`, pip would take the newest there is.
$(STAMPS)/torch: $(STAMPS)/venv
	$(PIP_INSTALL) $(TORCH)
	touch $@

$(STAMPS)/tensorflow: $(STAMPS)/venv
	$(PIP_INSTALL) $(TENSORFLOW)
	$(PIP_INSTALL) --no-deps $(TF_KERAS)
	touch $@

$(STAMPS)/package: $(STAMPS)/build $(STAMPS)/torch $(SOURCES)
	PATH="$(BIN):$$PATH" $(PIP_INSTALL) --no-build-isolation --config-settings=cmake.define.HVL_TESTS=OFF '.[torch,examples]'
	touch $@

# Holds all that the demo needs as well. The tests of the core are made of its objects, so they are built with it; what
# `make test` imports is installed meanwhile, and the frameworks are imported once: each of the test processes, which
# begin together, would compile them to bytecode. A process each: TensorFlow and Triton, which PyTorch's compiler
# imports, can abort in one. For so many packages pip takes minutes, uv seconds; but the frameworks come first, by pip,
# which knows its settings.
$(STAMPS)/dev: $(STAMPS)/build $(SOURCES) $(shell find tests/native -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)
	rm -rf build/wheels
	PATH="$(BIN):$$PATH" $(BIN)/python -m pip wheel --disable-pip-version-check --quiet $(PIP_FLAGS) --no-deps \
	  --no-build-isolation --config-settings=cmake.define.HVL_TESTS=ON --wheel-dir build/wheels . & building=$$!; \
	$(MAKE) --no-print-directory $(STAMPS)/torch $(STAMPS)/tensorflow && $(BIN)/uv pip install --python $(BIN)/python \
	  --quiet --system-certs $(PIP_FLAGS) -r pyproject.toml --extra torch --extra tensorflow --extra test && \
	$(BIN)/python -c 'import torch._dynamo' && TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -c 'import keras, tensorflow' && \
	wait $$building
	$(PIP_INSTALL) --force-reinstall --no-deps build/wheels/*.whl
	touch $(STAMPS)/package $@

# Some of these packages import the frameworks, so their versions are resolved together.
$(STAMPS)/ecosystem: pyproject.toml | $(STAMPS)/dev
	$(BIN)/uv pip install --python $(BIN)/python --quiet --system-certs $(PIP_FLAGS) -r pyproject.toml \
	  --extra torch --extra tensorflow --extra test --extra ecosystem
	touch $@

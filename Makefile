# Every target sets up and uses .venv; only Python 3.10+ and make need to be installed.

PYTHON ?= python3
BIN = .venv/bin
SIZE ?= 1GiB

.PHONY: demo word2vec test lint docs pictures package gpu bench rows programs budget overhead clean

demo: .venv/plot
	$(BIN)/python examples/demo.py $(if $(NPY),--npy "$(NPY)",--size $(SIZE))

# Run the tests on every core, with one torch thread in each process. MARK=slow runs the cases that
# repeat a proof at more sizes. To run one test:
# .venv/bin/python -m pytest tests/pipeline -k name
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal $(if $(MARK),-m "$(MARK)")

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Build the pages from docs/ and the docstrings into site/, with warnings as errors.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Redraw the pictures of the protocol, of orders, of benchmarks/results/, and of loops that run for
# seconds.
pictures: .venv/docs
	$(BIN)/python docs/pictures/protocol.py
	$(BIN)/python docs/pictures/orders.py
	$(BIN)/python -m docs.pictures.measured
	$(BIN)/python docs/pictures/timelines.py

# Build wheel and sdist into dist/, and try them in a clean environment of each installed Python.
package: .venv/packager
	$(BIN)/python .ci/package.py

# Train word vectors on the standard library's sources, with both tables in host memory. QUICK=1
# takes a few seconds.
word2vec: .venv/plot
	$(BIN)/python examples/word2vec.py $(if $(QUICK),--quick)

# Compare streaming of a .npy file with other loaders in three minutes, and print one table to send to
# others. The whole benchmark: python -m benchmarks.streaming
bench: .venv/peers
	$(BIN)/python -m benchmarks.streaming --quick

# Compare training of host table rows with and without prefetching. The whole benchmark:
# python -m benchmarks.rows
rows: .venv/peers
	$(BIN)/python -m benchmarks.rows --quick

# Compare programs of other projects with their pinfeed versions: results, time and memory.
programs: .venv/installed
	$(BIN)/python -m benchmarks.programs --quick

# Compare predicted and measured peaks of training steps, and gradients and peaks of BigBatch.
budget: .venv/installed
	$(BIN)/python -m benchmarks.budget
	$(BIN)/python -m benchmarks.big

# Measure the cost of pinfeed per batch.
overhead: .venv/installed
	$(BIN)/python -m benchmarks.overhead

# On a machine with a CUDA device, run its tests and measurements, which write benchmarks/results/.
gpu: .venv/cuda
	$(BIN)/python -m benchmarks.gpu

# pinfeed, with its compiled part, and what the examples need. Without an NVIDIA GPU, torch's CPU
# build is tried first, which is a tenth of the size; the default build works on every machine.
.venv/plot: pyproject.toml constraints.txt hatch_build.py pinfeed/native/build.py \
		$(wildcard pinfeed/native/*.[ch])
	@echo "Making .venv. This takes one to five minutes once, most of it to download torch."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	-command -v nvidia-smi > /dev/null || $(BIN)/python -m pip install --no-deps --retries 1 \
		--timeout 15 -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e ".[plot]"
	touch $@

.venv/installed: .venv/plot
	$(BIN)/python -m pip install --quiet -c constraints.txt --group test --group lint
	touch $@

# Install CuPy for the CUDA version that torch was built for.
.venv/cuda: .venv/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt \
		-e ".[cuda$$($(BIN)/python -c 'import torch; print((torch.version.cuda or "13").split(".")[0])')]"
	touch $@

.venv/packager: .venv/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt --group package
	touch $@

.venv/peers: .venv/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt --group bench
	touch $@

.venv/docs: .venv/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt --group docs
	touch $@

clean:
	rm -rf .venv demo dist site

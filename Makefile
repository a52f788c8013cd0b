# Everything happens in .venv; nothing but Python 3.10+ and make need be installed. The README says the same as plain pip commands.

PYTHON ?= python3
BIN = .venv/bin
SIZE ?= 2GiB

.PHONY: demo word2vec test lint docs pictures package gpu bench rows budget overhead clean

demo: .venv/installed
	$(BIN)/python examples/demo.py $(if $(NPY),--npy "$(NPY)",--size $(SIZE))

# On every core; torch with one thread in each process. One test: .venv/bin/python -m pytest tests/test_x.py -k y
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The guide, from docs/ and the docstrings, into site/; warnings are errors. Open site/index.html.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The guide's pictures that are drawn by scripts, anew: of the protocol, of what benchmarks/results/ has, and of loops that run for seconds.
pictures: .venv/docs
	$(BIN)/python docs/pictures/protocol.py
	$(BIN)/python docs/pictures/measured.py
	$(BIN)/python docs/pictures/timelines.py

# Wheel and sdist in dist/, tried in a clean environment of each Python that there is.
package: .venv/packager
	$(BIN)/python .ci/package.py

# Word vectors of the standard library's sources, both tables in host memory; a few seconds with QUICK=1.
word2vec: .venv/installed
	$(BIN)/python examples/word2vec.py $(if $(QUICK),--quick)

# Batches of a .npy beside other loaders, in under three minutes; all of it: python -m benchmarks.streaming
bench: .venv/peers
	$(BIN)/python -m benchmarks.streaming --quick

# Rows of a table on the host, trained: a step with prefetching, without, and in other ways; all of it: python -m benchmarks.rows
rows: .venv/installed
	$(BIN)/python -m benchmarks.rows --quick

# Predicted beside measured peaks of training steps, training under a limit; gradients and peaks of BigBatch.
budget: .venv/installed
	$(BIN)/python -m benchmarks.budget
	$(BIN)/python -m benchmarks.big

# What pinfeed itself costs per batch.
overhead: .venv/installed
	$(BIN)/python -m benchmarks.overhead

# On a machine with a CUDA device: its tests and measurements, written to benchmarks/results/.
gpu: .venv/cuda
	$(BIN)/python -m benchmarks.gpu

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[plot]" --group test --group lint
	touch $@

# CuPy for the CUDA version that torch was built for.
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

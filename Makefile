# Each target does all set-up that it needs, from a fresh clone on.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: simulate train test test-all campaign fuzz architectures bench gpu papers-gpu text lint docs gallery pictures lock release-check setup clean

simulate: setup
	$(BIN)/ctrans simulate --placement all --dt 0.1

train: setup
	$(BIN)/ctrans train --out out/small --overwrite
	$(BIN)/ctrans generate --checkpoint out/small --prompt "The " --tokens 300
	@echo "Its losses by step: out/small/loss.png"

# each row of each table of cases, in at most 180 s on two quiet cores. A test is meant to take at most 0.3 s, unless it
# stands in tests/end_to_end.py. Processes that tests start read the bytecode of those before them
test: setup
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal -m "not slow" --ignore=tests/lint

# all combinations of cases, what is marked slow or cases(n), campaigns and processes; shapes and types are checked at run time
test-all: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

# wrong requests and calls, hostile files, flipped bits, kills, a disk that fails; the counts are kept in benchmarks/results
campaign: setup
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.campaigns

# changed bytes to every parser, guided by coverage, for MINUTES; inputs that reach new lines stay in tests/campaigns/corpora
MINUTES ?= 60
fuzz: setup
	$(BIN)/pip install --quiet atheris==3.0.0
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.campaigns.fuzzing --minutes $(MINUTES)

# every named architecture trained 200 steps beside plain pre-LN; goes on where it was stopped
architectures: setup
	$(BIN)/python benchmarks/architectures.py

# times of ctrans, its peers and the machine's limit on one page: half an hour on two quiet processors, QUICK=1 minutes. PARTS="hjb train" for
# some. It goes on where it was stopped; NANOGPT=PATH for a checkout to train beside. A peer that cannot be installed is left out
bench: setup
	-$(BIN)/pip install --quiet --constraint constraints.txt --requirement benchmarks/bench/requirements.txt
	PYTHONPATH=. $(BIN)/python -m benchmarks.bench $(PARTS) $(if $(QUICK),--quick)

# no set-up: it takes what there is; NANOGPT=PATH for a checkout to train beside
gpu:
	PYTHONPATH=. $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py

# 36 MB of English and its byte pairs, from three dictionaries that Debian has; nothing of them is part of the project
text: setup
	$(BIN)/python benchmarks/text.py

# the papers' headlines at 12 blocks of width 256 on that text, in 12 minutes of a GPU
papers-gpu:
	PYTHONPATH=. $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/papers_gpu.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -m "not slow" tests/lint

# the site, with warnings as errors: out/site/index.html opens from its file
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# the examples' output on the site, made by running them
gallery: setup
	$(BIN)/python docs/_site/gallery.py

# the pictures of README and site, each by its command; ONLY="simulate screen" for some
pictures: setup
	$(BIN)/python docs/_site/pictures.py $(ONLY)

# requirements.lock anew: all that the extras need at the versions of constraints.txt, each file by its hash
lock: setup
	$(BIN)/python benchmarks/lock.py

# what has to hold before a version is released, publishing nothing; CUDA=1 installs builds of torch of gigabytes too, SIGN=KEY signs
release-check: setup
	$(BIN)/python benchmarks/release.py $(if $(CUDA),--cuda) $(if $(SIGN),--sign $(SIGN))

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ctrans needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv out

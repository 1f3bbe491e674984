# `make lab` opens JupyterLab on the notebooks, `make test` runs the tests.
# Both make the environment that they need in .venv, once, with the versions in
# constraints.txt. `make test-third-party`, `make test-oldest` and `make bench` have
# their own.

PYTHON ?= python3
PORT ?=
ARGS ?=
# Of pytest; each starts a lab of two ranks.
WORKERS ?= 2
BIN := .venv/bin
THIRD_PARTY := .venv-third-party
OLDEST := .venv-oldest
PEERS := .venv-peers
PEER_NAMES := $(patsubst benchmarks/peers/requirements-%.txt,%,\
  $(wildcard benchmarks/peers/requirements-*.txt))
INSTALL := python -m pip install --disable-pip-version-check
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# Each of the many processes of a lab would compile labkit again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help lab check test test-long test-hosts test-gpu test-release test-third-party test-oldest lock lint browser sshd
.PHONY: docs format notebooks pictures conformance bench bench-quick clean

help:
	@echo "make lab [PORT=8890] [ARGS=--no-browser]   JupyterLab on the notebooks"
	@echo "make check                                 lint, types, tests without engines"
	@echo "make test [WORKERS=4]                      lint, types, tests, a notebook"
	@echo "make test-long                             chaos, every loop, what takes long"
	@echo "make test-hosts                            three hosts, as network namespaces"
	@echo "make test-gpu                              tests that need a GPU; one is enough"
	@echo "make test-release                          the rest, before a release"
	@echo "make test-third-party                      Trainer, Accelerate, Lightning, PEFT"
	@echo "make test-oldest                           tests with the lowest versions"
	@echo "make lock                                  write .venv to constraints.txt"
	@echo "make docs                                  the site, in docs/_build/html"
	@echo "make format                                format the code"
	@echo "make notebooks                             run the notebooks, save outputs"
	@echo "make pictures                              film a run for the README"
	@echo "make conformance                           regenerate docs/conformance.md"
	@echo "make bench [ARGS=--write]                  beside the peers, 15 minutes"
	@echo "make bench-quick                           a shorter one, 2 to 3 minutes"
	@echo "make clean                                 remove .venv* and test-artifacts"

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "labkit needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	    "Name another one: make lab PYTHON=python3.12"; exit 1; }
	@echo "Making .venv with $$($(PYTHON) -V); the first time takes a few minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/$(INSTALL) -c constraints.txt -e ".[test,docs]"
	@touch $@

lab: .venv/installed
	@echo "Starting JupyterLab; open the URL with the token that it prints."
	@# From here, for the notebooks link to docs/.
	$(BIN)/jupyter lab $(ROOT) $(if $(PORT),--port=$(PORT)) \
	  --LabApp.default_url=/lab/tree/notebooks $(ARGS) .

# A test that fails runs again, as with CPython's `--rerun`, and at most twice: one that
# passes then is listed with its failures, as a race to fix, and does not fail the build.
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
  --durations=20 --reruns 2 --reruns-delay 3

check: .venv/installed lint
	$(BIN)/pytest -n $(WORKERS) -q -m "not engine and not long and not release" tests

# Three suit two cores: one works while the labs of the others wait.
test: WORKERS = 3
test: .venv/installed lint browser
	$(PYTEST) -m "not long and not release and not hosts and not gpu"

test-long: WORKERS = 3
test-long: .venv/installed browser
	$(PYTEST) -m "long and not release"

# Three hosts, as network namespaces: it takes root, iproute2 and OpenSSH's server.
# One test at a time: they all have the same hosts.
HOST_TESTS = $(BIN)/pytest --reruns 2 --reruns-delay 3 -rs --durations=20 tests/hosts

test-hosts: .venv/installed sshd
	$(HOST_TESTS) -m "hosts and not release"

# One test at a time: ranks of several tests would compete for the GPU.
test-gpu: .venv/installed
	$(BIN)/pytest -rs --durations=20 tests/gpu

test-release: .venv/installed browser sshd
	$(PYTEST) -m "release and not hosts"
	$(HOST_TESTS) -m "hosts and release"

$(THIRD_PARTY)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(THIRD_PARTY)
	$(THIRD_PARTY)/bin/$(INSTALL) -c constraints.txt -e ".[test,third-party]"
	@touch $@

# Not part of `make test`: scripts and libraries of others, on real ranks.
test-third-party: $(THIRD_PARTY)/installed
	$(THIRD_PARTY)/bin/pytest tests/third_party

# The least that pyproject.toml allows. Its torch is a CUDA build of some GB.
$(OLDEST)/installed: pyproject.toml tests/lower_bounds.py
	$(PYTHON) -m venv $(OLDEST)
	$(PYTHON) tests/lower_bounds.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/$(INSTALL) -c $(OLDEST)/constraints.txt -e ".[test]"
	@touch $@

# Not part of `make test`.
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests

# To upgrade: install in .venv what is to be newer, run the tests, then this.
lock: .venv/installed
	$(BIN)/python -m pip freeze --all --exclude-editable > .venv/frozen
	{ echo "# Versions of \`make lab\` and \`make test\`; \`make lock\` writes this file."; \
	  sed -e '/ @ /d' -e '/^pip==/d' -e 's/+.*//' .venv/frozen; } > .venv/constraints.txt
	grep -q '^torch=' .venv/constraints.txt  # gone where it came from a file
	mv .venv/constraints.txt constraints.txt
	@touch $<

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

# $(call install,PACKAGES,WHAT FOR): where apt-get can; it never fails.
APT := apt-get -qy -o DPkg::Lock::Timeout=120 -o Acquire::http::Timeout=30
define install
root=; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
if ! command -v apt-get > /dev/null || ! $$root true 2> /dev/null; then \
  echo "There is no right to install $(1) with apt-get: $(2) will be skipped."; exit 0; fi; \
echo "Installing $(1) with apt-get, for $(2)."; \
{ $$root $(APT) update && $$root env DEBIAN_FRONTEND=noninteractive \
  $(APT) install --no-install-recommends $(1); } || \
echo "$(1) was not installed: $(2) will be skipped."
endef

# Some tests use JupyterLab in a browser, and skip where there is none.
browser:
	@for name in chromium google-chrome chromium-browser; do \
	  if command -v $$name > /dev/null; then exit 0; fi; \
	done; \
	$(call install,chromium fonts-dejavu-core,the tests in a browser)

# Elsewhere nobody is given a server that others can log in to.
sshd:
	@if [ -z "$$CI" ]; then exit 0; fi; \
	if [ -x /usr/sbin/sshd ] && [ -x /usr/sbin/slurmd ] && \
	  command -v ip > /dev/null && command -v mpiexec > /dev/null; then exit 0; fi; \
	$(call install,openssh-server openssh-client iproute2 slurmctld slurmd \
	  slurm-client munge openmpi-bin,the tests on several hosts)

docs: .venv/installed
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html
	@echo "The site is in docs/_build/html/index.html"

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

SAVE = $(BIN)/jupyter nbconvert --to notebook --execute --inplace \
  --ExecutePreprocessor.record_timing=False
ON_HOSTS = notebooks/17_go_to_two_hosts.ipynb

# The last of them where network namespaces can be made; elsewhere make says why not.
notebooks: .venv/installed
	$(SAVE) $(filter-out $(ON_HOSTS),$(wildcard notebooks/*.ipynb))
	-$(BIN)/python tests/hosts/namespaces.py $(SAVE) $(ON_HOSTS)
	$(BIN)/jupyter nbconvert --coalesce-streams --inplace notebooks/*.ipynb
	sed -i 's#/[^ "\\]*/site-packages/#site-packages/#g' notebooks/*.ipynb

pictures: .venv/installed browser
	$(BIN)/python docs/make_pictures.py

conformance: .venv/installed
	$(BIN)/python -m tests.conformance --out docs/conformance.md

# Each peer in an environment of its own, with the torch that labkit has. Where one
# cannot be installed the others are measured, and the table says so.
$(PEERS)/%/installed: benchmarks/peers/requirements-%.txt constraints.txt
	rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) -q -r $< "$$(grep '^torch=' constraints.txt)" && touch $@ || \
	  echo "pip could not install $<" > $(@D)/failed

BENCH = $(BIN)/python benchmarks/side_by_side.py

bench: .venv/installed $(PEER_NAMES:%=$(PEERS)/%/installed)
	$(BENCH) $(ARGS)

bench-quick: .venv/installed $(PEER_NAMES:%=$(PEERS)/%/installed)
	$(BENCH) --quick $(ARGS)

clean:
	rm -rf .venv $(THIRD_PARTY) $(OLDEST) $(PEERS) test-artifacts docs/_build docs/notebooks

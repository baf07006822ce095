# podfabric: each target works alone on a fresh Debian 12 or 13 machine, as root.

PY := .venv/bin/python
SOURCES := agent base cli cni deploy deviceplugin gpu host ipam kube node policy tests bench tools

# Whose wording `make check` looks at.
PLAIN := README.md CONTRIBUTING.md docs netattach-examples $(SOURCES)

# Else every agent that a test starts compiles all of its modules again, half a second each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-fast cni gpu setup check docs reference test-host test-kernel test-cluster test-nodes test-api \
	durations coverage image manifests format lock protos bench bench-gpu quick-start clean

help: ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

demo: cni ## two pods on an InfiniBand fabric: attach, ping, check, detach
	@$(PY) -m tests.kernel.vm prepare
	@colour=; if [ -t 1 ]; then colour=1; fi; \
	$(PY) -m tests.kernel.vm run -- env FORCE_COLOR=$$colour $(PY) -m tools.demo

test: setup cni check test-host test-kernel ## everything CI runs

test-fast: ## unit tests that are quick and need no root, in about a minute
	@tools/setup.sh base
	$(PY) -m pytest -n auto --dist worksteal -q -m 'not (root or slow)' tests/unit

cni: ## the CNI executables, in build/cni/bin
	@tools/setup.sh base
	@$(PY) -m tools.make_cni build/cni/bin

gpu: ## what containers with a part of a GPU need: libraries, in build/gpu/shim
	@tools/setup.sh base
	@$(PY) -m tools.build_shim

setup:
	@tools/setup.sh test

check: docs ## format, lint, types, import contracts, wording, the site
	.venv/bin/ruff format --check $(SOURCES)
	.venv/bin/ruff check $(SOURCES)
	.venv/bin/mypy $(SOURCES)
	.venv/bin/lint-imports
	$(PY) -m tools.plain_english $(PLAIN)

# In memory where there is room: most tests make hundreds of files, and wait for no disk there.
ROOM := $(shell df --output=avail /dev/shm | tail -1)
TMP := $(shell [ "$(ROOM)" -gt 2000000 ] && echo /dev/shm || echo /tmp)

# More workers than two CPUs can keep busy: many of these tests wait, for the kernel or a time-out.
WORKERS := 4

# A process that would take all memory fails at this limit (KiB), and shows where.
MOST_MEMORY := 6291456

# Behind a suite's tests: prints its durations beside the recorded ones, unless they were broken off.
DURATIONS = status=$$?; [ $$status -gt 1 ] || $(PY) -m tools.durations

test-host: setup cni ## tests in namespaces of this machine
	files=$$(mktemp -d $(TMP)/pf.XXXX) && trap 'rm -rf "$$files"' EXIT && \
		ulimit -S -d $(MOST_MEMORY) && TMPDIR=$(TMP) $(PY) -m pytest --basetemp "$$files/t" -n $(WORKERS) --dist worksteal --durations 10 -q -m 'not long' \
		--junitxml build/durations/host.xml tests; $(DURATIONS) host; exit $$status

# Tests of what happens at once, for a machine with two CPUs; all others are quicker on one.
TWO_CPUS := $(patsubst %,tests/kernel/test_%.py,agent_killed ipoib_removal) \
	$(patsubst %,tests/kernel/test_%.py,devices sriov_many sriov_infiniband)
ONE_CPU := $(filter-out $(TWO_CPUS),$(sort $(wildcard tests/kernel/test_*.py)))
SRIOV := $(filter tests/kernel/test_sriov_% tests/kernel/test_plugins_killed.py,$(ONE_CPU))

test-kernel: setup cni ## tests with real InfiniBand drivers, in two virtual machines
	$(PY) -m tests.kernel.vm prepare
	PODFABRIC_VM_TIMEOUT=$${PODFABRIC_VM_TIMEOUT:-2400} $(PY) -m tests.kernel.vm \
		pytest --cpus 2 -q --durations 25 $(TWO_CPUS) \
		--and -q --durations 25 $(filter-out $(SRIOV),$(ONE_CPU)) tests/conformance $(SRIOV); \
		$(DURATIONS) kernel; exit $$status

# The version of Kubernetes; what is built stays in PODFABRIC_CACHE (~/.cache/podfabric).
KUBERNETES := 1.36.3
# Which of the tests, as pytest's -m takes it: all, or 'not long'.
SELECT :=

test-cluster: setup cni ## tests on a real Kubernetes: KUBERNETES=1.36.3 SELECT='not long'
	nice -n 10 $(PY) -m tests.cluster.programs $(KUBERNETES)
	$(PY) -m tests.kernel.vm prepare
	$(MAKE) -j 2 test-nodes test-api

PYTEST_OF_CLUSTER = KUBERNETES=$(KUBERNETES) $(PY) -m pytest -v --timeout 3600 --durations 10 -m '$(SELECT)' \
	--junitxml build/durations/$(1).xml

# The two parts of test-cluster, which run beside each other: each waits for much.
test-nodes:
	$(call PYTEST_OF_CLUSTER,nodes) tests/cluster; $(DURATIONS) nodes; exit $$status

test-api: # what it prints comes at its end
	mkdir -p build
	$(call PYTEST_OF_CLUSTER,api) tests/api > build/api.log 2>&1; \
		$(DURATIONS) api >> build/api.log; cat build/api.log; exit $$status

durations: setup ## record how long each suite's last run took
	$(PY) -m tools.durations --record

# What `make coverage` measures.
SUITES := test-host test-kernel test-cluster

coverage: setup ## branch coverage of all suites together: SUITES='test-host test-api'
	PODFABRIC_VM_TIMEOUT=7200 $(PY) -m tools.branch_coverage make -k $(SUITES)

image: ## the image, in build/image; BASE= its base, PUSH=registry/name where to push it
	@BASE='$(BASE)' PUSH='$(PUSH)' tools/image.sh

manifests: setup ## write deploy/kustomize/base from deploy/chart
	@$(PY) -m tools.manifests

reference: setup ## write the lists of docs that come from the code
	@$(PY) -m tools.reference

docs: setup ## the site of docs, in build/site
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --site-dir build/site

quick-start: setup ## objects and lines of the quick starts, beside another operator's
	@$(PY) -m tools.quick_start

format: setup ## put the code into its form
	.venv/bin/ruff format $(SOURCES)
	.venv/bin/ruff check --fix $(SOURCES)

lock: setup ## write the lock files from pyproject.toml
	tools/lock.sh

protos: setup ## make the modules of the kubelet's APIs from their .proto files
	$(PY) -m grpc_tools.protoc -I . --python_out=. --grpc_python_out=. --pyi_out=. \
		deviceplugin/api/*.proto

bench: setup cni ## measure against the reference plugins
	$(PY) -m bench

bench-gpu: setup ## measure limits of GPUs, over the tests' stand-in for the driver
	@bench/gpu.sh --stand-in --short
	@bench/gpu.sh --stand-in g6 g7 g13 g14 g15

clean: ## forget everything that was built
	rm -rf build .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis

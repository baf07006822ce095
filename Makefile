# podfabric: each target works alone on a fresh Debian 12 or 13 machine, as root.

PY := .venv/bin/python
SOURCES := agent base cni deviceplugin host ipam cli tests bench tools

# Else every agent that a test starts compiles all of its modules again, half a second each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test cni setup check test-host test-kernel format lock protos bench clean

help: ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

demo: cni ## two pods on an InfiniBand fabric: attach, ping, check, detach
	@$(PY) -m tests.kernel.vm prepare
	@colour=; if [ -t 1 ]; then colour=1; fi; \
	$(PY) -m tests.kernel.vm run -- env FORCE_COLOR=$$colour $(PY) -m tools.demo

test: setup cni check test-host test-kernel ## everything CI runs

cni: ## the CNI executables, in build/cni/bin
	@tools/setup.sh base
	@$(PY) -m tools.make_cni build/cni/bin

setup:
	@tools/setup.sh test

check: setup ## format, lint, types, import contracts
	.venv/bin/ruff format --check $(SOURCES)
	.venv/bin/ruff check $(SOURCES)
	.venv/bin/mypy $(SOURCES)
	.venv/bin/lint-imports

# In memory where there is room: most tests make hundreds of files, and wait for no disk there.
ROOM := $(shell df --output=avail /dev/shm | tail -1)
TMP := $(shell [ "$(ROOM)" -gt 2000000 ] && echo /dev/shm || echo /tmp)

test-host: setup cni ## tests in namespaces of this machine
	files=$$(mktemp -d $(TMP)/pf.XXXX) && trap 'rm -rf "$$files"' EXIT && \
		TMPDIR=$(TMP) $(PY) -m pytest --basetemp "$$files/t" -n 2 --dist worksteal -q tests

# Tests of what happens at once, for a machine with two CPUs; all others are quicker on one. In either
# machine, what plugs the software HCAs in again comes after the look at what they dropped until then.
DROPPED := tests/kernel/test_vm.py::test_nothing_was_dropped_that_only_a_defect_drops
TWO_CPUS := $(patsubst %,tests/kernel/test_%.py,examples agent_killed ipoib_load ipoib_removal) \
	$(DROPPED) $(patsubst %,tests/kernel/test_%.py,devices sriov_many)
ONE_CPU := $(filter-out $(TWO_CPUS),$(sort $(wildcard tests/kernel/test_*.py)))
SRIOV := $(filter tests/kernel/test_sriov_%,$(ONE_CPU))

test-kernel: setup cni ## tests with real InfiniBand drivers, in two virtual machines
	$(PY) -m tests.kernel.vm prepare
	PODFABRIC_VM_TIMEOUT=2400 $(PY) -m tests.kernel.vm \
		pytest --cpus 2 -q $(TWO_CPUS) \
		--and -q $(filter-out $(SRIOV),$(ONE_CPU)) tests/conformance $(SRIOV)

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

clean: ## forget everything that was built
	rm -rf build .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis

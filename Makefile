# SPDX-License-Identifier: Apache-2.0 OR MIT
# Thin: each target installs what it needs (scripts/bootstrap), and scripts do the rest. `make help` lists the targets.
SHELL := /bin/bash
export PATH := $(PATH):$(HOME)/.cargo/bin
export TOMBOLO_CACHE ?= $(CURDIR)/.cache
CARGO ?= cargo
# The guest kernels to build and test with.
KERNELS ?= 6.1 6.12
export KERNELS

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
.DEFAULT_GOAL := help

.PHONY: ready ready-test ready-lint
ready:
	@scripts/bootstrap build
ready-test:
	@scripts/bootstrap build test
ready-lint:
	@scripts/bootstrap build test lint

.PHONY: build
build: ready ## the programs, in target/release
	@$(CARGO) build --release --locked

# guest/build fetches a kernel, builds tombolo.ko for it and packs the images, in this order.
.PHONY: kernels module guest guest-test guest-update
kernels: ready-test
	@guest/build $(KERNELS:%=--kernel %) --until kernel
module: ready-test ## tombolo.ko for every guest kernel
	@guest/build $(KERNELS:%=--kernel %) --until module
guest: ready-test ## guest kernels and the base image, tombolo.ko in it
	@guest/build $(KERNELS:%=--kernel %)
guest-test: ready-test
	@guest/build $(KERNELS:%=--kernel %) --flavour test
guest-update: ready-test ## newer kernels, if Debian has them
	@for series in $(KERNELS); do guest/kernel $$series || exit 1; done
	@$(MAKE) guest

.PHONY: test test-native test-vm test-lab test-long lab
test: ## all tests but the lab's
	@scripts/prepare test
	@scripts/run-tests native vm
test-native: ready-test ## tests without guests
	@scripts/run-tests native
test-vm: guest-test ## tests in real guests under QEMU
	@scripts/run-tests vm
test-lab: guest-test ## tests in the emulated KVM host
	@scripts/run-tests lab
test-long: guest-test ## what takes minutes: real programs, models of lock-free code in every order
	@scripts/run-tests long
lab: build ## a shell in the emulated KVM host
	@target/release/tombolo lab shell

.PHONY: demo bench
demo: ## two VMs and the host share one file system in memory
	@scripts/prepare demo
	@demo/run
bench: ## every bench; results in bench/results
	@scripts/prepare bench
	@for what in files share net accel "start run" topology; do target/release/tombolo bench $$what || exit 1; done

.PHONY: lint
lint: ready-lint kernels ## formatting, lints, documentation, shell, C, the module with W=1, what is unused
	@scripts/lint

.PHONY: deb
deb: ## Debian packages, in target/deb
	@scripts/bootstrap build deb
	@scripts/make-deb target/deb

.PHONY: docs
docs: ## the guide as a site, in target/docs/html
	@scripts/bootstrap docs
	@scripts/make-docs

.PHONY: dkms
dkms: ## the modules' source trees for DKMS, in target/dkms
	@guest/dkms/make-source target/dkms

.PHONY: clean distclean
clean: ## what was built
	@rm -rf target files/linux/build vm/passthrough/linux/build
distclean: clean ## and what was fetched
	@rm -rf .cache

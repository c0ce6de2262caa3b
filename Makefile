# Everything starts here. `make demo` and `make test` set up what they need, and say what that is first.

CARGO ?= cargo

# What the authors of file systems need: the crates that can be published.
PUBLISHED := vfs wire engine state serve vhost control fuse virtiofs fs

# The architecture of make static and make container: x86_64 or aarch64.
ARCH ?= $(shell uname -m)

.DEFAULT_GOAL := help
.PHONY: help setup build install uninstall deb rpm static container demo test test-all conformance xfstests bench lint audit fuzz reference

help:
	@echo 'make demo      share a real tree with a real guest, check every byte both ways'
	@echo 'make test      the tests; says at its end which were skipped (with CI=true they fail)'
	@echo 'make test-all  the tests with the long ones (pjdfstest, fsx, fault injection; may take an hour)'
	@echo 'make conformance  rewrites docs/conformance.md from what the last make test-all printed'
	@echo 'make xfstests XFSTESTS=CHECKOUT  the group generic/quick of xfstests, as root (XFSTESTS_COLUMNS: which sources, and how)'
	@echo 'make bench     the benchmarks, against the other servers'
	@echo 'make install   the program, its man pages, completions, systemd units and descriptors for libvirt (PREFIX, DESTDIR)'
	@echo 'make deb, rpm  a package for Debian, and for distributions with RPM, in target/dist'
	@echo 'make static    the programs without shared libraries, in target/static/ARCH (ARCH=aarch64 for another machine)'
	@echo 'make container an image with that program (ARCH), an OCI image directory in target/dist'
	@echo 'make uninstall removes them (with the same PREFIX and DESTDIR)'
	@echo 'make lint      rustfmt, clippy, rustdoc, cargo-deny, and whether what can be published can be packed'
	@echo 'make audit     known vulnerabilities of the dependencies (fetches the list)'
	@echo 'make fuzz      each fuzz target for a minute (FUZZ_SECONDS=N for longer)'
	@echo 'make reference docs/reference, from the table of flags (a test fails when it is stale)'
	@echo 'make setup     only what the others do first: Debian packages and the guest'

setup:
	@scripts/setup

build:
	$(CARGO) build --release --locked -p ferry -p ferry-agent -p ferry-snapshotter

install: build
	@FERRY_SNAPSHOTTER=$${CARGO_TARGET_DIR:-target}/release/ferry-snapshotter scripts/install

# Packages, below target/dist (dist/package has the rest).
deb rpm: build
	@dist/package $@

static:
	@CARGO='$(CARGO)' scripts/static $(ARCH)

container: static
	@ARCH=$(ARCH) dist/package container

uninstall:
	@scripts/install --remove

demo: setup build
	@scripts/demo

test:
	@scripts/setup disk xfs diod dbench erofs composefs umoci registry packages
	@CARGO='$(CARGO)' scripts/test

test-all:
	@scripts/setup disk xfs diod dbench erofs composefs umoci registry skopeo containerd crun podman podman-stable packages packaging qemu-arm64
	@mkdir -p target
	@CARGO='$(CARGO)' scripts/static
	@CARGO='$(CARGO)' scripts/static aarch64 ferry/ferry ferry-agent/ferry-agent ferry-snapshotter/ferry-snapshotter ferry-tests/ferry-probe ferry-tests/ferry-watch
	@CARGO='$(CARGO)' FERRY_TEST_LOG=target/test-all.log scripts/test --profile test-all -- --include-ignored

conformance:
	@scripts/conformance target/test-all.log

xfstests:
	@scripts/setup xfstests
	$(CARGO) build --release --locked -p ferry -p ferry-guest
	@scripts/xfstests '$(XFSTESTS)' $(XFSTESTS_COLUMNS)

bench: setup
	bench/run virtiofs

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTFLAGS='--cfg fuzzing' $(CARGO) check --manifest-path fuzz/Cargo.toml --target-dir target/fuzz --locked
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --locked
	@# Not built from the packages: cargo would take those of the last time for the ones they depend on.
	$(CARGO) package --no-verify --quiet --offline --locked --allow-dirty $(PUBLISHED:%=-p ferry-%)
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny check bans licenses sources; \
	else echo 'lint: cargo-deny is not installed: licences were not checked' >&2; fi

# Apart from lint because it fetches the advisory database: it fails for want of a network, too.
audit:
	$(CARGO) deny check advisories

fuzz:
	@scripts/fuzz

reference:
	FERRY_WRITE_REFERENCE=1 $(CARGO) test --locked -p ferry --bin ferry tests::reference

# `make test` is everything that must hold before a change lands, from a bare Debian with Rust: it installs what is
# missing and leaves alone what is there. The other targets are its parts.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

# Some tools of the network are where only root looks.
export PATH := $(PATH):/usr/sbin:/sbin

CARGO ?= cargo
CARGO_DENY_VERSION := 0.20.2
LOAD := tests/bench/load/Cargo.toml
FUZZ := tests/fuzz/Cargo.toml
CLIENTS := tests/clients/rust/Cargo.toml

SHARED := $(or $(CARGO_TARGET_DIR),target)

# A command that the build or a test calls, and the Debian package that brings it. ring and mimalloc compile C.
# Java and Go are not among them: where they are, their clients are tested too. Redis is run by the tests, on ports of
# their own; where installing it starts one on 6379, that one is nobody's business.
TOOLS := cc:gcc python3:python3 openssl:openssl curl:curl wget:wget git:git node:nodejs npm:npm \
  taskset:util-linux unshare:util-linux ip:iproute2 nft:nftables iptables:iptables \
  redis-server:redis-server

# Suites that drive the proxy with other languages' clients declare what they need beside themselves.
PYTHON_NEEDS := $(wildcard tests/*/requirements.txt)
NODE_NEEDS := $(wildcard tests/*/package-lock.json)

.PHONY: help setup tools python node kubectl fmt lint doc deny advisories unit fuzz-smoke openapi examples clients \
  k8s-test k8s-render image-test test bench simulate clean

help:
	@echo "make test    all that must hold: setup fmt lint doc deny, every test"
	@echo "make unit    the library's and binary's own tests alone"
	@echo "make fuzz-smoke    what must hold for any input, on some thousand (FUZZ_TIMES=100 for more)"
	@echo "make openapi     requests made of the fan-out's description, right and wrong (OPENAPI='--seed 1' for others)"
	@echo "make examples    the examples of agents, among tools that fail"
	@echo "make clients    real clients through every mode (CLIENTS_RUN='--only httpx --mode forward' for some)"
	@echo "make k8s-test    the Kubernetes manifests, against every supported version's schemas and each other"
	@echo "make k8s-render    writes k8s/install.yaml anew"
	@echo "make image-test    the image around a static binary: what is in it, and that it runs (as root)"
	@echo "make bench   what a request costs, beside a bare proxy (BENCH='--rounds 5 --idle 9000' for more)"
	@echo "make simulate    a fleet of up to 10,000 pods, on paper (PODS=8,100 for others, SIMULATE=rates for one table)"
	@echo "make setup   install what the others need"

setup: tools python node kubectl

tools:
	missing=(); \
	for tool in $(TOOLS); do command -v "$${tool%%:*}" >/dev/null || missing+=("$${tool##*:}"); done; \
	python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv); \
	if (( $${#missing[@]} )); then \
	  as_root=(); [[ $$(id -u) == 0 ]] || as_root=(sudo); \
	  "$${as_root[@]}" apt-get update -qq; \
	  DEBIAN_FRONTEND=noninteractive "$${as_root[@]}" apt-get install -y -qq --no-install-recommends "$${missing[@]}"; \
	fi
	for part in fmt clippy; do \
	  $(CARGO) $$part --version >/dev/null 2>&1 || rustup component add "$${part/fmt/rustfmt}"; \
	done
	command -v cargo-deny >/dev/null || \
	  env -u CARGO_TARGET_DIR $(CARGO) install cargo-deny --version $(CARGO_DENY_VERSION) --locked --quiet

# The stamp is as new as the newest list of needs; without any there is nothing to do.
python: $(if $(PYTHON_NEEDS),.venv/installed)

.venv/installed: $(PYTHON_NEEDS)
	python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check $(addprefix -r ,$(PYTHON_NEEDS))
	touch $@

node: $(NODE_NEEDS:package-lock.json=node_modules/.package-lock.json)

tests/%/node_modules/.package-lock.json: tests/%/package-lock.json
	cd tests/$* && npm ci --silent --no-audit --no-fund
	touch $@

kubectl: python
	.venv/bin/python tests/k8s/kubectl.py >/dev/null

fmt:
	$(CARGO) fmt --check
	$(CARGO) fmt --check --manifest-path $(LOAD)
	$(CARGO) fmt --check --manifest-path $(FUZZ)
	$(CARGO) fmt --check --manifest-path $(CLIENTS)

lint:
	$(CARGO) clippy --locked --all-targets -- -D warnings
	$(CARGO) clippy --locked --all-targets --manifest-path $(LOAD) -- -D warnings
	$(CARGO) clippy --locked --all-targets --manifest-path $(FUZZ) --target-dir $(SHARED) -- -D warnings
	$(CARGO) clippy --locked --all-targets --manifest-path $(CLIENTS) --target-dir $(SHARED) -- -D warnings

doc:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps --lib

deny: tools
	$(CARGO) deny --locked --config .deny.toml check bans licenses sources

# Apart from `test`: the advisory database is a repository that not every build may reach. The floors in
# .deny.toml stand in for it.
advisories: tools
	$(CARGO) deny --locked --config .deny.toml check advisories

unit:
	$(CARGO) test --locked --lib --bins

# It has nearly the proxy's own dependencies, so it is built in the same folder.
fuzz-smoke:
	$(CARGO) test --locked --manifest-path $(FUZZ) --target-dir $(SHARED) --test smoke

# Names and addresses in the requests are made up; the suite's policy keeps them on this machine.
openapi: tools python
	$(CARGO) build --locked
	.venv/bin/python tests/openapi/run.py --bin $(SHARED)/debug/hedgerow -- $(OPENAPI)

examples: tools python node
	$(CARGO) build --locked
	.venv/bin/python tests/examples/run.py --bin $(SHARED)/debug/hedgerow

# Its programs in Rust are built beside the binary that they are run against.
clients: tools python node
	$(CARGO) build --locked
	$(CARGO) build --locked --manifest-path $(CLIENTS) --target-dir $(SHARED)
	.venv/bin/python tests/clients/run.py --bin $(SHARED)/debug/hedgerow $(CLIENTS_RUN)

# A target is named so that the flags are for the binary alone, and nothing else is built anew.
STATIC := $(shell uname -m)-unknown-linux-gnu

image-test:
	$(MAKE) tools TOOLS="buildah:buildah ip:iproute2 unshare:util-linux python3:python3"
	RUSTFLAGS="-C target-feature=+crt-static" CARGO_PROFILE_RELEASE_STRIP=symbols \
	  $(CARGO) build --release --locked --target $(STATIC)
	tests/image/run.sh $(SHARED)/$(STATIC)/release/hedgerow

k8s-test: tools python kubectl
	$(CARGO) build --locked
	.venv/bin/python tests/k8s/run.py --bin $(SHARED)/debug/hedgerow

k8s-render: kubectl
	kubectl=$$(.venv/bin/python tests/k8s/kubectl.py); \
	{ echo '# Rendered from k8s/overlays/cert-manager by `make k8s-render`. It needs cert-manager in the cluster.'; \
	  "$$kubectl" kustomize k8s/overlays/cert-manager; } >k8s/install.yaml

# The load benchmark is built and unit-tested with the rest, so that it does not rot; it is run by `bench`.
test: setup fmt lint doc deny
	$(CARGO) test --locked
	$(MAKE) fuzz-smoke
	$(CARGO) test --locked --manifest-path $(LOAD)
	$(MAKE) openapi
	$(MAKE) examples
	$(MAKE) clients
	$(MAKE) k8s-test

bench:
	$(CARGO) build --release --locked
	$(CARGO) build --release --locked --manifest-path $(LOAD)
	target="$${CARGO_TARGET_DIR:-target}"; own="$${CARGO_TARGET_DIR:-$(dir $(LOAD))target}"; \
	HEDGEROW_BIN="$${HEDGEROW_BIN:-$$target/release/hedgerow}" "$$own/release/load" $(BENCH)

# Minutes for the largest fleet; the small one is among the unit tests.
simulate: PODS ?= 8,100,1000,10000
simulate:
	HEDGEROW_SIMULATE=$(PODS) HEDGEROW_SIMULATE_ONLY=$(SIMULATE) \
	  $(CARGO) test --locked --profile simulation --lib fleet_simulation::tables -- --nocapture

clean:
	$(CARGO) clean
	$(CARGO) clean --manifest-path $(LOAD)
	rm -rf tests/fuzz/target tests/clients/rust/target tests/examples/build
	rm -rf .venv tests/*/node_modules

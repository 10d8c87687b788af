# Recipes for people and for CI. Long steps say what they do and for how long it took. What they leave behind
# is removed by `make clean-all`; caches live outside the clone, in ~/.cache/kruntimes.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

export CARGO_TARGET_DIR ?= $(or $(KRUNTIMES_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kruntimes)/target
export KUBECONFIG_EXTERNAL JOB

.PHONY: help demo demo-cluster test test-fast check check-each generate tools build images up down e2e load bench bench-callers soak bench-path profile chaos fuzz conformance sim clean-all

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' Makefile

demo: demo-cluster ## a function answers over HTTPS, on a real cluster that this starts (the quickest true demonstration)

demo-cluster: ## the same, by its lasting name
	@dev/demo

test: ## everything: checks, unit tests, end to end on an API server and on a cluster
	@dev/test all

test-fast: ## checks of the repository and unit tests; no cluster
	@dev/test fast

check: ## formatting, lints, documentation, licences and dependencies, scripts, charts
	@dev/check

check-each: ## every crate compiles alone, so that no feature is borrowed from a neighbour
	@dev/check each

generate: ## writes what is generated and committed (stubs of proto/, CRDs of charts/)
	@dev/generate

tools: ## builds Kubernetes, etcd, helm and cert-manager from their Go modules, into the cache
	@dev/prereqs
	@dev/tools/build

build: ## compiles the binaries into build/bin
	@dev/build

images: ## builds the container images [PROFILE=release] and loads them into the running cluster, if there is one
	@dev/prereqs base
	@dev/build $(if $(filter release,$(PROFILE)),--release)
	@if [[ -n "$$KUBECONFIG_EXTERNAL" ]] || dev/in true 2>/dev/null; then dev/images/load; else dev/images/build; fi

up: ## starts a one-node cluster; `dev/in kubectl …` talks to it
	@dev/prereqs base
	@dev/up node

down: ## ends the clusters of this clone
	@dev/down all

e2e: ## end-to-end tests on the cluster; T=cluster runs one target [T=cluster::path:: a part of it]
	@dev/test e2e $(T)

load: ## k6 against functions like the demo's; SCENARIO=smoke|steady|ramp|many-functions|one-function|cold|rollout|rotation|bodies|bad [JOB=1 in a Pod]
	@dev/load $(or $(SCENARIO),smoke)

conformance: ## the Runtime Server protocol, on every built-in server or on yours [ADDRESS= WORKSPACE= LANGUAGE= FIXTURES=]
	@ADDRESS='$(ADDRESS)' WORKSPACE='$(WORKSPACE)' FIXTURES='$(FIXTURES)' EXCEPT='$(EXCEPT)' \
	  LANGUAGE='$(if $(findstring command,$(origin LANGUAGE)),$(LANGUAGE))' dev/test conformance

sim: ## the deciding parts of all processes under seeded schedules of faults [SEEDS=1000]; SEED=n replays one with its trace [VARIANT=1..5 broken]
	@SEEDS='$(SEEDS)' SEED='$(SEED)' VARIANT='$(VARIANT)' dev/sim

bench: ## the gateway beside Envoy, nginx and a plain one, on loopback [ROUNDS=3] [ROUTES=10000] [TARGETS=] [CELLS=] [WORKERS=1]
	@ROUNDS='$(ROUNDS)' ROUTES='$(ROUTES)' TARGETS='$(TARGETS)' CELLS='$(CELLS)' WORKERS='$(WORKERS)' dev/bench

bench-callers: ## what 1, 100 and 10,000 callers cost the gateway, and what a storm of new ones does to the others [ROUNDS=3]
	@ROUNDS='$(ROUNDS)' dev/bench-callers

soak: ## one gateway process under millions of calls while routes come and go: does it grow? [CALLS=5000000]
	@CALLS='$(CALLS)' dev/soak

bench-path: ## what a warm call of a Python function takes, on the cluster [LEVEL=loopback] [CELLS="paced one sixteen crowd"] [PROFILE=debug]
	@LEVEL='$(LEVEL)' CELLS='$(CELLS)' dev/bench-path

profile: ## records what code warm calls run, by which release binaries are optimised; once before a release
	@dev/profile

chaos: ## kills, freezes, cuts, fills and deletes at random under load, then compares histories; MINUTES=10 [SEED=n] [DELETIONS=20]
	@MINUTES='$(MINUTES)' SEED='$(SEED)' DELETIONS='$(DELETIONS)' dev/chaos

fuzz: ## what strangers and owners send to the gateway, guided by coverage; MINUTES=1 each [TARGETS="path token head front_h1 front_h2 hop"]
	@MINUTES='$(MINUTES)' TARGETS='$(TARGETS)' dev/fuzz

clean-all: ## ends everything and removes build/; caches stay
	@dev/down all
	@rm -rf build

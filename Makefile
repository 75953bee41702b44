# Everything that a developer, an operator or CI runs. `make help` lists it.

GO       ?= go
BIN      := bin/tombolo
PEERS    := $(CURDIR)/.cache/peers
EARLIER  := $(CURDIR)/.cache/earlier
BUDGET   ?= 55m
DESTDIR  ?=
CNI_BIN  ?= /opt/cni/bin
CNI_CONF ?= /etc/cni/net.d

# Static and reproducible; the go command stamps version and commit from git.
BUILD := CGO_ENABLED=0 $(GO) build -buildvcs=auto -trimpath -ldflags "-s -w"

.PHONY: help build build-arm64 demo test test-long lint bench profile install deps peers earlier clean

help: ## this text
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## bin/tombolo and bin/tombolod, static
	$(BUILD) -o $(BIN) ./cmd/tombolo
	$(BUILD) -o $(BIN)d ./cmd/tombolod

build-arm64: ## the same for arm64: bin/tombolo-arm64, bin/tombolod-arm64
	GOARCH=arm64 $(BUILD) -o $(BIN)-arm64 ./cmd/tombolo
	GOARCH=arm64 $(BUILD) -o $(BIN)d-arm64 ./cmd/tombolod

demo: build ## five pods in a sandbox of their own, and what they reach (needs root)
	$(BIN) demo

test: deps build peers earlier ## all tests, in namespaces of their own (needs root; under 15 minutes)
	TOMBOLO_PEERS=$(PEERS) TOMBOLO_EARLIER=$(EARLIER) TOMBOLO_BIN=$(CURDIR)/$(BIN) test/all.sh

test-long: deps build peers earlier ## sweeps, churn, fuzzing, race detector, for BUDGET (55m)
	TOMBOLO_PEERS=$(PEERS) TOMBOLO_EARLIER=$(EARLIER) TOMBOLO_BIN=$(CURDIR)/$(BIN) test/long.sh $(BUDGET)

lint: ## gofmt, vet, staticcheck
	test/lint.sh

bench: deps build peers ## ADD, DEL and Attach beside the reference and the floor, as ratios (needs root)
	$(GO) run ./bench -peers $(PEERS) -tombolo $(BIN) $(BENCHFLAGS)

profile: ## CPU and allocation profile of Attach in .cache/
	@mkdir -p .cache
	$(GO) test ./bench -run '^$$' -bench AttachDetach -benchmem -cpuprofile .cache/cpu.prof -memprofile .cache/mem.prof -o .cache/bench.test
	$(GO) tool pprof -top -nodecount 25 .cache/bench.test .cache/cpu.prof

install: build ## into a node's directories, tombolod too: DESTDIR, CNI_BIN, CNI_CONF
	install -D -m 0755 $(BIN) $(DESTDIR)$(CNI_BIN)/tombolo
	install -D -m 0755 $(BIN)d $(DESTDIR)/usr/local/bin/tombolod
	install -D -m 0644 deploy/systemd/tombolod.service $(DESTDIR)/etc/systemd/system/tombolod.service
	install -D -m 0644 deploy/10-tombolo.conflist $(DESTDIR)$(CNI_CONF)/10-tombolo.conflist.example
	install -D -m 0644 deploy/modules-load.d/tombolo.conf $(DESTDIR)/etc/modules-load.d/tombolo.conf
	@echo "installed; rename $(CNI_CONF)/10-tombolo.conflist.example to 10-tombolo.conflist to use it"

deps: ## install what the tests need and this machine lacks (apt, root)
	@test/deps.sh

peers: ## the reference plugins and the floor program, for tests and bench
	@bench/build.sh $(PEERS)

earlier: ## the versions that nodes are upgraded from, out of this clone's history, for tests
	@test/earlier/build.sh $(EARLIER)

clean: ## remove what was built
	rm -rf bin .cache

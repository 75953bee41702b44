# Everything that a developer, an operator or CI runs. `make help` lists it.

GO       ?= go
BIN      := bin
PEERS    := $(CURDIR)/.cache/peers
BUDGET   ?= 55m
ROUNDS   ?= 80
WHAT     ?= .|Exec
KINDNET  ?= kindnet
DESTDIR  ?=
CNI_BIN  ?= /opt/cni/bin
CNI_CONF ?= /etc/cni/net.d
PREFIX   ?= /usr/local
SYSTEMD  ?= /etc/systemd/system
MODULES  ?= /etc/modules-load.d
NETWORKD ?= /etc/systemd/network
NM_CONF  ?= /etc/NetworkManager/conf.d
ZSH      ?= $(PREFIX)/share/zsh/site-functions
UNITS    := tombolod.service tombolo-docker.socket tombolo-repair.service tombolo-repair.timer
VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo v0.0.0)
ARCHES   ?= amd64 arm64

# Static and reproducible; the go command stamps version and commit from git. The garbage collector of Go 1.26 keeps
# marks within each span, whose page a call touches for nothing: without it an ADD is 2 % shorter (docs/dev/limits.md).
# A version of Go that names the experiment is none to govulncheck, which then reports no faults of Go's library.
GOEXPERIMENT ?= nogreenteagc
BUILD = CGO_ENABLED=0 GOEXPERIMENT=$(GOEXPERIMENT) $(GO) build -buildvcs=auto -trimpath \
	-ldflags "-s -w -X 'runtime.buildVersion=$(shell $(GO) env GOVERSION)'"

.PHONY: help build build-arm64 demo tested test quick quick-arm64 test-long test-cluster cluster lint bench bench-report profile install uninstall deb release deps peers clean

help: ## this text
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## the plugin bin/tombolo-cni, the command bin/tombolo, the keeper bin/tombolod; static
	$(BUILD) -o $(BIN)/ ./cmd/...

build-arm64: ## the same for arm64, in bin/arm64
	GOARCH=arm64 $(BUILD) -o $(BIN)/arm64/ ./cmd/...

demo: build ## five pods and a container on a LAN, in a sandbox, and what they reach (needs root)
	$(GO) run ./test/demo $(BIN)/tombolo-cni

# The programs that tests start look after the order of locks (internal/lockorder).
tested: deps peers
	GOFLAGS='$(GOFLAGS) -tags=lockorder' $(MAKE) build BIN=.cache/tested

quick: lint tested ## lint and the tests that a pull request runs (needs root; 8 minutes)
	TOMBOLO_PEERS=$(PEERS) TOMBOLO_BIN=$(CURDIR)/.cache/tested test/all.sh quick

quick-arm64: ## the demo and unit tests on an emulated arm64 (5 minutes)
	test/vm/run.sh arm64

test: tested ## all tests, in namespaces of their own (needs root; 10 minutes)
	TOMBOLO_PEERS=$(PEERS) TOMBOLO_BIN=$(CURDIR)/.cache/tested test/all.sh

test-long: tested ## sweeps, churn, fuzzing, race detector, for BUDGET (55m)
	TOMBOLO_PEERS=$(PEERS) TOMBOLO_BIN=$(CURDIR)/.cache/tested test/long.sh $(BUDGET)

test-cluster: deps build ## a Kubernetes cluster in namespaces, and what pods reach there (needs root; see test/cluster/README.md)
	test/cluster/run.sh

cluster: deps build ## the same cluster, left up: `test/cluster/cluster.sh down` ends it
	test/cluster/cluster.sh up

lint: ## gofmt, vet, staticcheck and others, plain comments
	test/lint.sh

# Standard error is the progress; the lines, which benchstat reads, are in .cache/bench.txt.
bench: deps build ## what a pod costs, beside others, in ROUNDS (80); WHAT=Exec/ipv4$ is some of it (needs root)
	@GOEXPERIMENT=$(GOEXPERIMENT) bench/build.sh $(PEERS) $(KINDNET) $(KINDNET_CLONE)
	$(GO) test -c -o .cache/bench.test ./bench
	cd bench && TOMBOLO_PEERS=$(PEERS) TOMBOLO_BIN=$(abspath $(BIN)) ../.cache/bench.test \
		-test.run '^$$' -test.timeout 1h -test.bench '$(value WHAT)' -test.benchtime $(ROUNDS)x >../.cache/bench.txt; \
		status=$$?; case '$(value WHAT)' in *\|Exec) \
		TOMBOLO_LONG=1 $(GO) test -C ../test/docker -v -count=1 -run PortsBesideDocker . >../.cache/ports.txt || status=1; \
		sed -n 's/^ *Benchmark/Benchmark/p' ../.cache/ports.txt >>../.cache/bench.txt ;; esac; \
		grep -A 9 -e '^--- FAIL' ../.cache/bench.txt; cd report && $(GO) run . ../../.cache/bench.txt && exit $$status

bench-report: export BENCH_QUIET := 1
bench-report: bench ## the same on a quiet machine, and docs/benchmarks.md, its plots and README's table of it (10 minutes)
	cd bench/report && $(GO) run . -write ../.. ../../.cache/bench.txt

profile: ## CPU and allocations of thousands of ADDs: .cache/{cpu,mem}.prof (needs root)
	@mkdir -p .cache
	$(GO) test ./bench -run '^$$' -bench Add -cpuprofile .cache/cpu.prof -memprofile .cache/mem.prof -o .cache/bench.test
	$(GO) tool pprof -top -cum -nodecount 40 -tagfocus verb=ADD .cache/cpu.prof

install: build ## into a node's directories, by DESTDIR, PREFIX, CNI_BIN, CNI_CONF, SYSTEMD
	install -D -m 0755 $(BIN)/tombolo-cni $(DESTDIR)$(CNI_BIN)/tombolo
	deploy/names.sh loopback $(CNI_BIN) $(DESTDIR)
	install -D -m 0755 -t $(DESTDIR)$(PREFIX)/lib/tombolo $(BIN)/tombolo-cni
	install -d $(DESTDIR)$(PREFIX)/lib/netavark && ln -sfn ../tombolo/tombolo-cni $(DESTDIR)$(PREFIX)/lib/netavark/tombolo
	install -D -m 0755 -t $(DESTDIR)$(PREFIX)/bin $(BIN)/tombolo $(BIN)/tombolod
	for unit in $(UNITS); do install -D -m 0644 deploy/systemd/$$unit $(DESTDIR)$(SYSTEMD)/$$unit && \
		sed -i 's|/usr/local/bin|$(PREFIX)/bin|' $(DESTDIR)$(SYSTEMD)/$$unit || exit; done
	install -D -m 0644 deploy/10-tombolo.conflist $(DESTDIR)$(CNI_CONF)/10-tombolo.conflist.example
	install -D -m 0644 deploy/modules-load.d/tombolo.conf $(DESTDIR)$(MODULES)/tombolo.conf
	install -D -m 0644 deploy/networkd/05-tombolo.network $(DESTDIR)$(NETWORKD)/05-tombolo.network
	install -D -m 0644 deploy/NetworkManager/10-tombolo.conf $(DESTDIR)$(NM_CONF)/10-tombolo.conf
	install -D -m 0644 -t $(DESTDIR)$(PREFIX)/share/man/man8 deploy/share/*.8
	install -D -m 0644 deploy/share/tombolo.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/tombolo
	install -D -m 0644 deploy/share/_tombolo $(DESTDIR)$(ZSH)/_tombolo
	@echo "installed; rename $(CNI_CONF)/10-tombolo.conflist.example to 10-tombolo.conflist to use it"

# A network's configuration that somebody named, records, leases and plugins of others stay.
uninstall: ## takes away what install put there
	[ -n "$(DESTDIR)" ] || [ ! -e /run/systemd/system ] || systemctl disable --now tombolo-docker.socket tombolod.service tombolo-repair.timer
	deploy/names.sh --undo $(CNI_BIN) $(DESTDIR)
	rm -f $(addprefix $(DESTDIR),$(CNI_BIN)/tombolo $(PREFIX)/lib/netavark/tombolo $(PREFIX)/lib/tombolo/tombolo-cni $(PREFIX)/bin/tombolo $(PREFIX)/bin/tombolod $(addprefix $(SYSTEMD)/,$(UNITS)) \
		$(CNI_CONF)/10-tombolo.conflist.example $(MODULES)/tombolo.conf $(NETWORKD)/05-tombolo.network $(NM_CONF)/10-tombolo.conf $(addprefix $(PREFIX)/share/man/man8/,$(notdir $(wildcard deploy/share/*.8))) \
		$(PREFIX)/share/bash-completion/completions/tombolo $(ZSH)/_tombolo)

deb: ## dist/tombolo_VERSION_{amd64,arm64}.deb (needs dpkg-deb)
	@for arch in $(ARCHES); do deploy/release/deb.sh $(VERSION) $$arch || exit; done
	@deploy/release/sums.sh

release: ## dist/tombolo-VERSION-{linux,image}-{amd64,arm64}.tar.gz the same bytes each time; dist/SHA256SUMS
	@deploy/release/tarballs.sh $(VERSION) $(ARCHES)
	@deploy/release/sums.sh

deps: ## install what the tests need and this machine lacks (apt, root)
	@test/deps.sh

peers: ## the reference plugins and the floor program, for tests and bench
	@GOEXPERIMENT=$(GOEXPERIMENT) bench/build.sh $(PEERS)

clean: ## remove what was built
	rm -rf bin dist .cache

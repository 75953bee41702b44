package repotest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// layer says which of our packages some packages may import, and why no others. The layers
// come from the ground up: each may import what is above it in the list, and nothing below.
type layer struct {
	packages []string
	may      []string
	why      string
}

func layers() []layer {
	kernel := []string{".", "netns", "internal/nl"}
	return []layer{
		{[]string{"."}, nil, "everything imports the root for its errors, so it can import nothing"},
		{[]string{"internal/file", "internal/ident", "internal/jsontext", "internal/lockorder", "internal/printable"}, nil, "each does one thing for all, and knows nothing of networks and of the others"},
		{[]string{"internal/strict"}, []string{"internal/jsontext"}, "it computes, whatever the configuration is of"},
		{[]string{"netns", "internal/sysctl"}, []string{"."}, "the lowest layer to touch the kernel"},
		{[]string{"internal/nl"}, []string{".", "netns"}, "netlink, whatever is said over it"},
		{[]string{"internal/link"}, []string{"internal/nl", "netns"}, "links are written and read here, for all packages that work on them"},
		{[]string{"internal/nftnl"}, []string{".", "internal/nl"}, "the messages of nf_tables, whatever the tables are for"},
		{[]string{"addr", "route"}, slices.Concat(kernel, []string{"internal/link"}), "each is one kind of object of rtnetlink, of use without the others"},
		{[]string{"internal/tc"}, kernel, "qdiscs and filters, whatever they are for"},
		{[]string{"internal/conntrack", "internal/sockdiag"}, kernel, "each is one view of what the kernel has, of use without the others"},
		{[]string{"internal/icmp"}, []string{"netns"}, "it asks the kernel's view of the network, so it must not share ours"},
		{[]string{"bridge/vlan"}, []string{".", "internal/link", "internal/nl"}, "ports and links are given by their indexes, whatever made them"},
		{[]string{"bridge"}, []string{".", "netns", "internal/link", "internal/nl", "internal/sysctl", "internal/ident", "addr", "route", "bridge/vlan"},
			"other CNIs embed it: it must not bring a firewall, an IPAM, files or CNI along"},
		{[]string{"bridge/uplink"}, []string{".", "netns", "internal/link", "internal/nl", "internal/sysctl", "addr", "route", "bridge", "internal/conntrack", "internal/icmp", "internal/tc"},
			"a host's NIC is taken over for any bridge, with any journal"},
		{[]string{"nft/guard"}, []string{".", "internal/ident", "internal/nftnl"}, "rules and elements as data, whatever tables they go into"},
		{[]string{"nft/internal/ruleset"}, []string{".", "internal/nl", "internal/nftnl", "nft/guard"}, "what tables are made of, whatever endpoints have in them"},
		{[]string{"nft"}, slices.Concat(kernel, []string{"internal/ident", "internal/nftnl", "nft/guard", "nft/internal/ruleset"}), "the firewall goes by names and addresses, and knows nothing of links"},
		{[]string{"nft/foreign"}, slices.Concat(kernel, []string{"internal/ident", "internal/nftnl"}), "other people's firewalls, whatever ours is made of"},
		{[]string{"hostport"}, []string{".", "netns", "nft", "route", "internal/conntrack", "internal/sockdiag"}, "what a host port needs besides rules, and nothing that makes them"},
		{[]string{"bridge/bandwidth", "internal/localnet"}, slices.Concat(kernel, []string{"internal/ident", "internal/link", "internal/tc"}), "each goes by a link's name, and knows no bridge and no firewall"},
		{[]string{"dhcpc/internal/trace"}, nil, "what was said on the way, whatever the protocol"},
		{[]string{"dhcpc"}, []string{".", "dhcpc/internal/trace"}, "a protocol, its times and its packets: its user opens sockets and sets addresses"},
		{[]string{"dhcpc/dhcp6"}, []string{".", "dhcpc", "dhcpc/internal/trace"}, "the same for IPv6: it shares times and causes of failure, and neither knows the other's messages"},
		{[]string{"dhcpc/transport"}, []string{".", "netns", "dhcpc", "dhcpc/dhcp6"}, "sockets, and nothing about links and addresses"},
		{[]string{"ipam"}, []string{".", "route", "internal/file", "internal/lockorder", "internal/strict"},
			"addresses come from a directory; the kernel's are told to it"},
		{[]string{"internal/state"}, []string{"internal/file", "internal/ident", "internal/jsontext", "internal/lockorder", "ipam"}, "what was meant is kept apart from how it is done"},
		{[]string{"internal/firewalld"}, []string{"internal/state"}, "it speaks with a program over a bus: what there is to say is on record"},
		{[]string{"internal/endpoint"}, []string{"nft", "internal/ident", "internal/state", "ipam"}, "what an attachment is to the firewall, for all packages that compose"},
		{[]string{"internal/lease"}, []string{"addr", "dhcpc", "dhcpc/dhcp6", "netns", "route", "internal/file", "internal/ident", "internal/lockorder"}, "records of leases are read by two programs, and do nothing themselves"},
		{[]string{"internal/lease/giveback"}, []string{"bridge", "bridge/vlan", "dhcpc", "dhcpc/transport", "internal/lease", "netns"}, "both programs release what dead pods leased"},
		{[]string{"internal/keeper"}, []string{".", "internal/lease/giveback", "addr", "route", "nft", "netns", "dhcpc", "dhcpc/dhcp6", "dhcpc/transport", "internal/conntrack", "bridge", "bridge/uplink", "internal/endpoint", "internal/file", "internal/lease", "internal/link", "internal/nftnl", "internal/nl", "internal/state", "internal/sysctl", "ipam"},
			"it composes, like network, and neither knows the other"},
		{[]string{"internal/ipam/delegate"}, nil, "it runs plugins of others by the CNI protocol, for anybody"},
		{[]string{"network/internal/fail"}, []string{"."}, "errors, and nothing else"},
		{[]string{"network/internal/loopback"}, []string{"bridge", "internal/endpoint", "internal/localnet", "internal/state", "internal/sysctl"},
			"one thing that the host's 127.0.0.1 needs, for all packages that make bridges"},
		{[]string{"network/internal/takeover"}, []string{".", "addr", "bridge", "bridge/uplink", "dhcpc", "dhcpc/transport", "internal/lease", "internal/state", "network/internal/fail", "network/internal/loopback"},
			"uplinks and their records: it knows nothing of networks and pods"},
		{[]string{"network/internal/dhcplease"}, []string{"addr", ".", "bridge", "dhcpc", "dhcpc/dhcp6", "dhcpc/transport", "internal/lease", "internal/lease/giveback", "internal/link", "internal/lockorder", "internal/nl", "internal/state", "ipam", "netns", "network/internal/fail", "route"},
			"leases of pods: it knows nothing of networks and firewalls"},
		{[]string{"network/internal/recorded"}, []string{".", "addr", "bridge", "bridge/bandwidth", "bridge/vlan", "ipam", "nft", "route", "internal/endpoint", "internal/ident", "internal/state", "internal/sysctl"},
			"what records call for, for all packages that make, compare and delete it"},
		{[]string{"network/internal/session"}, []string{"bridge", "bridge/bandwidth", "ipam", "nft", "nft/foreign", "internal/endpoint", "internal/ident", "internal/lease", "internal/printable", "internal/state", "network/internal/fail", "network/internal/loopback", "network/internal/recorded", "network/internal/takeover"},
			"the node as one call has it open, whatever the call is"},
		{[]string{"network/internal/reroute"}, []string{".", "ipam", "network/internal/fail", "addr", "bridge", "netns", "route", "internal/endpoint", "internal/state", "network/internal/dhcplease", "network/internal/recorded", "network/internal/session"},
			"the pods' way out, after the host's address has changed"},
		{[]string{"network/internal/teardown"}, []string{"addr", "bridge", "bridge/bandwidth", "hostport", "internal/endpoint", "internal/file", "internal/ident", "internal/lease", "internal/link", "internal/nl", "internal/state", "ipam", "netns", "network/internal/dhcplease", "network/internal/fail", "network/internal/loopback", "network/internal/recorded", "network/internal/session", "network/internal/takeover", "nft"},
			"what is gone is gone: it makes nothing"},
		{[]string{"network/internal/build"}, []string{".", "addr", "bridge", "bridge/bandwidth", "bridge/uplink", "ipam", "netns", "nft", "nft/foreign", "route", "internal/endpoint", "internal/lease", "internal/state", "internal/sysctl", "network/internal/fail", "network/internal/loopback", "network/internal/recorded", "network/internal/reroute", "network/internal/session", "network/internal/takeover", "network/internal/teardown"},
			"what pods share: it makes no pod"},
		{[]string{"network/internal/inspect"}, []string{".", "addr", "bridge", "bridge/bandwidth", "ipam", "netns", "nft", "nft/foreign", "route", "internal/endpoint", "internal/state", "internal/sysctl", "network/internal/dhcplease", "network/internal/fail", "network/internal/loopback", "network/internal/recorded", "network/internal/session"},
			"it compares, and changes nothing"},
		{[]string{"network/internal/elements"}, []string{"nft", "internal/endpoint", "internal/state", "network/internal/build", "network/internal/fail", "network/internal/session"},
			"a pod's part in the firewall, while its Add is under way"},
		{[]string{"network/internal/mend"}, []string{"bridge/bandwidth", "nft", "internal/endpoint", "internal/state", "network/internal/fail", "network/internal/inspect", "network/internal/recorded", "network/internal/session"},
			"what pods have lost inside, and what no pod has"},
		{[]string{"network/internal/tuned"}, []string{".", "internal/endpoint", "internal/state", "network/internal/fail", "network/internal/session"},
			"what follows a link that another program changed"},
		{[]string{"network/internal/chained"}, []string{".", "bridge", "bridge/bandwidth", "hostport", "netns", "nft", "internal/endpoint", "internal/link", "internal/nl", "internal/state", "ipam", "network/internal/build", "network/internal/elements", "network/internal/fail", "network/internal/recorded", "network/internal/session", "network/internal/teardown"},
			"what attachments get that are there already, whichever program made them"},
		{[]string{"network"}, []string{".", "network/internal/chained", "network/internal/elements", "network/internal/tuned", "network/internal/mend", "addr", "bridge", "bridge/bandwidth", "bridge/uplink", "bridge/vlan", "dhcpc", "dhcpc/transport", "ipam", "nft", "nft/foreign", "netns", "route", "internal/endpoint", "internal/ident", "internal/lease", "internal/lockorder", "internal/state", "network/internal/build", "network/internal/dhcplease", "network/internal/fail", "hostport", "network/internal/inspect", "network/internal/recorded", "network/internal/reroute", "network/internal/session", "network/internal/takeover", "network/internal/teardown"},
			"it composes, and is the only one for pods that does: it knows nothing of CNI"},
		{[]string{"internal/cni/cniargs"}, nil, "it reads a variable, and does nothing"},
		{[]string{"internal/cni/ipamconf"}, []string{"internal/cni/cniargs", "dhcpc", "ipam", "network", "internal/ident", "internal/ipam/delegate", "internal/lease", "internal/lockorder", "internal/strict"},
			"it reads a configuration, and has others act on it"},
		{[]string{"internal/cni/reference"}, []string{".", "internal/strict", "network"},
			"what the plugins by other names are called with: it does nothing itself"},
		{[]string{"internal/cni/reference/podlink"}, []string{"internal/endpoint", "internal/link", "internal/nl", "netns"},
			"a link of a pod's, whichever plugin made it"},
		{[]string{"internal/cni/reference/ipams"}, []string{".", "dhcpc", "internal/cni/cniargs", "internal/cni/ipamconf", "internal/cni/reference", "internal/cni/reference/podlink", "internal/lease", "internal/link", "internal/nl", "ipam", "netns", "network"},
			"IPAM plugins for others' pods"},
		{[]string{"internal/cni/reference/tuning"}, []string{"internal/cni/cniargs", "internal/cni/reference", "internal/cni/reference/podlink", "internal/file", "internal/link", "internal/nl", "netns", "network"},
			"what a pod's link and kernel parameters are set to, whichever plugin made it"},
		{[]string{"internal/cni/reference/firewall"}, []string{"internal/cni/reference", "internal/nftnl", "internal/nl", "network", "nft"},
			"one plugin of the reference's"},
		{[]string{"internal/cni/reference/limits"}, []string{"bridge/bandwidth", "internal/cni/reference", "network"},
			"one plugin of the reference's"},
		{[]string{"internal/cni/reference/portmap"}, []string{"internal/cni/reference", "internal/endpoint", "network", "nft"},
			"one plugin of the reference's, and how mappings are written"},
		{[]string{"internal/cni/loopback"}, []string{"addr", "internal/cni/reference", "internal/cni/reference/podlink", "internal/link", "internal/nl", "netns"},
			"one link that every pod has: it knows no networks"},
		{[]string{"internal/cni/vlanconf"}, []string{"bridge/vlan"}, "it reads fields, and does nothing"},
		{[]string{"internal/cni"}, []string{"internal/cni/cniargs", "internal/cni/vlanconf", "addr", "bridge", "bridge/bandwidth", "bridge/uplink", "dhcpc", "ipam", "netns", "network", "nft", "route", "internal/cni/ipamconf", "internal/cni/loopback", "internal/cni/reference", "internal/cni/reference/firewall", "internal/cni/reference/ipams", "internal/cni/reference/limits", "internal/cni/reference/podlink", "internal/cni/reference/portmap", "internal/cni/reference/tuning", "internal/endpoint", "internal/ident", "internal/ipam/delegate", "internal/jsontext", "internal/lease", "internal/lockorder", "internal/printable", "internal/state", "internal/strict"},
			"it translates between CNI and package network"},
		{[]string{"internal/cni/conflist"}, []string{"internal/cni", "internal/strict", "network", "nft"}, "it says what a configuration means, and does nothing"},
		{[]string{"internal/report"}, []string{".", "network"}, "it words what package network finds, and knows no kernel and no records"},
		{[]string{"internal/view"}, []string{"bridge/bandwidth", "ipam", "network", "internal/printable", "internal/report", "internal/state"},
			"it draws what records and package network say, and knows no kernel"},
		{[]string{"internal/doctor"}, []string{".", "addr", "bridge", "dhcpc", "dhcpc/transport", "netns", "network", "nft/foreign", "route", "internal/icmp", "internal/nftnl", "internal/nl", "internal/report"},
			"it goes a pod's way, like a pod: what differs from records it is told"},
		{[]string{"internal/install"}, nil, "it puts files into a directory"},
		{[]string{"internal/demo"}, []string{"addr", "bridge", "nft", "netns", "network", "internal/icmp", "internal/ipam/delegate", "internal/state"},
			"it is a user of the rest, like a runtime and an operator"},
		{[]string{"cmd/tombolo"}, []string{"bridge", "bridge/bandwidth", "bridge/uplink", "network", "nft", "internal/cni", "internal/cni/conflist", "internal/demo", "internal/doctor", "internal/install", "internal/lease", "internal/printable", "internal/report", "internal/state", "internal/strict", "internal/view"},
			"the command wires and prints"},
		{[]string{"cmd/tombolod"}, []string{"internal/firewalld", "internal/keeper", "internal/lease", "internal/state", "network"}, "the command wires, what keeps leases and what repairs too"},
		{[]string{"internal/nl/nltest"}, []string{".", "internal/nl", "netns"}, "a kernel for tests of any layer above netlink"},
		{[]string{"internal/golden"}, nil, "files beside tests, whatever is in them"},
		{[]string{"internal/nstest"}, []string{"netns", "internal/icmp"}, "fixtures for tests of any layer above namespaces"},
		{[]string{"internal/nstest/fault"}, []string{"netns"}, "a fixture: it runs programs of any layer"},
		{[]string{"bench"}, []string{"bridge", "internal/cni", "internal/icmp", "internal/lease", "netns", "nft", "route"}, "it has benchmarks only: of the plugin from outside and in process, and of Attach"},
		{[]string{"test/report"}, nil, "it reads what go test prints"},
		{[]string{"test/lan"}, []string{"bridge/uplink", "internal/cni", "internal/keeper", "internal/lease", "internal/state"}, "it has tests only: of takeovers, and of the plugin as it is built"},
		{[]string{"internal/repotest"}, []string{".", "addr", "bridge", "bridge/bandwidth", "bridge/uplink", "bridge/vlan", "dhcpc", "dhcpc/dhcp6", "dhcpc/transport", "hostport", "ipam", "netns", "network", "nft", "nft/foreign", "nft/guard", "route"}, "it has tests only, one of which calls all that is public"},
	}
}

// shown are packages that a package's example, or its tests, show it together with.
func shown() map[string][]string {
	return map[string][]string{
		"bridge/bandwidth": {"bridge"}, "bridge/vlan": {"bridge"}, "network/internal/teardown": {"network"},
		"network/internal/recorded": {"ipam"}, "cmd/tombolo": {"ipam"},
		"nft": {"nft/foreign"}, "dhcpc/dhcp6": {"dhcpc/transport", "netns"}, "nft/foreign": {"nft"},
	}
}

// checkLayers finds imports that no layer allows, and packages that are in none.
// Tests may import fixtures besides, and the plainest views of the kernel.
func checkLayers(layers []layer, list []*pkg) []string {
	var found []string
	for _, p := range list {
		if p.rel() == "" {
			continue
		}
		i := slices.IndexFunc(layers, func(l layer) bool { return slices.Contains(l.packages, p.rel()) })
		if i < 0 {
			found = append(found, fmt.Sprintf("%s is in no layer: give it one, with a reason", p.rel()))
			continue
		}
		l := layers[i]
		for _, imported := range p.Imports {
			if to := relative(imported); to != "" && !slices.Contains(l.may, to) {
				found = append(found, fmt.Sprintf("%s imports %s: %s", p.rel(), to, l.why))
			}
		}
		forTests := slices.Concat(l.may, fixtures(), shown()[p.rel()], []string{p.rel(), ".", "netns", "internal/nl", "addr", "route"})
		for _, imported := range slices.Concat(p.TestImports, p.XTestImports) {
			if to := relative(imported); to != "" && !slices.Contains(forTests, to) {
				found = append(found, fmt.Sprintf("%s imports %s in a test: %s", p.rel(), to, l.why))
			}
		}
	}
	return found
}

func TestImportsKeepToTheirLayer(t *testing.T) {
	t.Parallel()
	list := packages(t)
	for _, finding := range checkLayers(layers(), list) {
		t.Error(finding)
	}
	for _, l := range layers() {
		for _, name := range l.packages {
			if !slices.ContainsFunc(list, func(p *pkg) bool { return p.rel() == name }) {
				t.Errorf("layer of %s, which is not there", name)
			}
		}
		if l.why == "" {
			t.Errorf("layer of %v: no reason", l.packages)
		}
	}
}

func TestImportsOutOfLayerAreFound(t *testing.T) {
	t.Parallel()
	ours := func(names ...string) []string {
		var list []string
		for _, n := range names {
			list = append(list, module+"/"+n)
		}
		return list
	}
	i := slices.IndexFunc(layers(), func(l layer) bool { return slices.Contains(l.packages, "bridge") })
	why := layers()[i].why
	mustFind(t, []string{
		"bridge imports nft: " + why,
		"bridge imports ipam in a test: " + why,
		"uplink is in no layer: give it one, with a reason",
	}, checkLayers(layers(), []*pkg{
		{ImportPath: module + "/bridge", Imports: append(ours("addr", "nft"), "fmt"), TestImports: ours("bridge", "internal/nstest"), XTestImports: ours("ipam")},
		{ImportPath: module + "/uplink"},
		{ImportPath: "example.com/other", Imports: ours("internal/cni")},
	}))
}

// ban forbids packages to some of ours, wherever those come from.
type ban struct {
	who    string
	to     func(*pkg) bool
	banned []string // import paths, with all below them
	why    string
}

func bans() []ban {
	public := func(p *pkg) bool { return slices.Contains(publicPackages(), p.rel()) }
	shippedBut := func(allowed ...string) func(*pkg) bool {
		return func(p *pkg) bool { return p.shipped() && !slices.Contains(allowed, p.rel()) }
	}
	return []ban{
		{"public packages", public, []string{"github.com/containernetworking"}, "a program that embeds them need not speak CNI"},
		// What package network works around goes to the log of its Config.
		{"public packages", func(p *pkg) bool { return public(p) && p.rel() != "network" }, []string{"log", "log/slog"}, "errors go to the caller, which has a log"},
		{"public packages", public, []string{"flag", "os/signal"}, "the command line and the signals are the program's"},
		{"shipped packages", shippedBut("internal/ipam/delegate"), []string{"os/exec", "plugin"},
			"everything is netlink: only the IPAM plugin that a user named is run"},
		{"shipped packages", shippedBut(), []string{"testing", module + "/internal/golden", module + "/internal/nstest", module + "/internal/nstest/fault", module + "/internal/nl/nltest"}, "fixtures are for tests"},
		{"shipped packages", shippedBut("internal/nl"), []string{"unsafe", "C"}, "only the ioctls of internal/nl take pointers; a package that needs it too gets an exception here, with a reason"},
		{"shipped packages", shippedBut(), []string{"github.com/vishvananda", "github.com/ti-mo", "github.com/florianl"},
			"netlink is mdlayher's, and what is said over it jsimonetti's and google's: one way is enough"},
		{"shipped packages", shippedBut("internal/keeper"), []string{"github.com/prometheus"}, "metrics are the keeper's: it would cost each ADD 1.7 ms of start-up"},
		{"shipped packages", shippedBut("internal/firewalld"), []string{"github.com/godbus"}, "a bus is the keeper's to wait for"},
		{"shipped packages", shippedBut("dhcpc/transport"), []string{"github.com/mdlayher/packet"}, "packet sockets take the kernel long to close: they are for DHCP and ARP"},
	}
}

// checkBans finds direct imports that are forbidden.
func checkBans(bans []ban, list []*pkg) []string {
	var found []string
	for _, p := range list {
		for _, b := range bans {
			if !b.to(p) {
				continue
			}
			for _, imported := range p.Imports {
				if slices.ContainsFunc(b.banned, func(banned string) bool { return within(imported, banned) }) {
					found = append(found, fmt.Sprintf("%s imports %s, which %s must not: %s", p.rel(), imported, b.who, b.why))
				}
			}
		}
	}
	return found
}

func within(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }

func TestForbiddenImports(t *testing.T) {
	t.Parallel()
	for _, finding := range checkBans(bans(), packages(t)) {
		t.Error(finding)
	}
}

func TestForbiddenImportsAreFound(t *testing.T) {
	t.Parallel()
	made := func(name string, imports ...string) *pkg {
		return &pkg{ImportPath: module + "/" + name, Imports: imports, GoFiles: []string{"x.go"}}
	}
	mustFind(t, []string{
		"bridge imports github.com/containernetworking/cni/pkg/types, which public packages must not: a program that embeds them need not speak CNI",
		"bridge imports log/slog, which public packages must not: errors go to the caller, which has a log",
		"internal/cni imports os/exec, which shipped packages must not: everything is netlink: only the IPAM plugin that a user named is run",
		"internal/cni imports unsafe, which shipped packages must not: only the ioctls of internal/nl take pointers; a package that needs it too gets an exception here, with a reason",
		"internal/cni imports " + module + "/internal/nstest, which shipped packages must not: fixtures are for tests",
	}, sorted(checkBans(bans(), []*pkg{
		made("bridge", "github.com/containernetworking/cni/pkg/types", "log/slog", "github.com/containernetworkingx"),
		made("internal/cni", "os/exec", "unsafe", module+"/internal/nstest", "log/slog"),
		made("internal/ipam/delegate", "os/exec"),
		made("internal/nstest", "os/exec", "testing"),
		made("bench", "os/exec"),
	})))
}

func sorted(list []string) []string {
	// Upper-case letters and the module's path sort oddly; what matters is that it is stable.
	slices.SortFunc(list, func(a, b string) int {
		return strings.Compare(strings.ReplaceAll(a, module, "~"), strings.ReplaceAll(b, module, "~"))
	})
	return list
}

// What the binary is made of, down to the last dependency.
func TestDependenciesOfThePlugin(t *testing.T) {
	t.Parallel()
	list := packages(t)
	for _, finding := range checkClosure(list) {
		t.Error(finding)
	}
}

// binaryModules are whose code the binary may have.
func binaryModules() map[string]string {
	return map[string]string{
		module:                               "ours",
		"github.com/containernetworking/cni": "the types of the specification, and their conversion",
		"golang.org/x/sys":                   "system calls",
		"golang.org/x/net":                   "the assembler of socket filters",
		"golang.org/x/sync":                  "of mdlayher/socket's",
		"github.com/insomniacslk/dhcp":       "the wire format of DHCP",
		"github.com/u-root/uio":              "of insomniacslk/dhcp's",
		"github.com/pierrec/lz4/v4":          "of u-root/uio's",
		"github.com/go-json-experiment/json": "the syntax of JSON",
		"github.com/google/nftables":         "the expressions of nf_tables",
		"github.com/josharian/native":        "of mdlayher/packet's",
		"github.com/jsimonetti/rtnetlink/v2": "the messages of rtnetlink",
		"github.com/mdlayher/netlink":        "netlink's messages and attributes",
		"github.com/mdlayher/packet":         "packet sockets",
		"github.com/mdlayher/socket":         "of mdlayher/packet's",
	}
}

// tooHeavy are packages that would cost each ADD its start-up time, or megabytes.
func tooHeavy() map[string]string {
	return map[string]string{
		"net/http":      "4 MB, and nothing is fetched",
		"crypto/tls":    "nothing is encrypted",
		"expvar":        "it begins an HTTP server's worth of state",
		"html/template": "text is printed",
		"text/template": "it keeps the linker from dropping methods",
		"encoding/gob":  "state is JSON",
		"database/sql":  "state is files",
		"github.com/containernetworking/cni/libcni":      "that is the runtime's side",
		"github.com/containernetworking/cni/pkg/skel":    "the verbs are read in internal/cni",
		"github.com/prometheus/client_golang/prometheus": "1.7 ms of start-up: metrics are the keeper's",
		"github.com/prometheus/client_model/go":          "the same",
		"google.golang.org/protobuf/proto":               "the same",
		"github.com/vishvananda/netlink":                 "a global handle, and dumps",
		"github.com/godbus/dbus/v5":                      "firewalld is the keeper's to speak with",
		"github.com/spf13/cobra":                         "there are five commands",
	}
}

func checkClosure(list []*pkg) []string {
	byPath := map[string]*pkg{}
	for _, p := range list {
		byPath[p.ImportPath] = p
	}
	command := byPath[module+"/cmd/tombolo"]
	if command == nil {
		return []string{"cmd/tombolo is not there"}
	}
	var found []string
	for _, dep := range command.Deps {
		if why, heavy := tooHeavy()[dep]; heavy {
			found = append(found, fmt.Sprintf("the binary has %s in it: %s", dep, why))
		}
		p := byPath[dep]
		if p == nil || p.Standard {
			continue
		}
		if p.Module == nil || binaryModules()[p.Module.Path] == "" {
			found = append(found, fmt.Sprintf("the binary has %s in it, of a module that is not on the list", dep))
		}
	}
	return found
}

func TestForbiddenDependenciesOfThePluginAreFound(t *testing.T) {
	t.Parallel()
	other := &struct{ Path string }{"example.com/other"}
	mustFind(t, []string{
		"the binary has net/http in it: 4 MB, and nothing is fetched",
		"the binary has example.com/other/x in it, of a module that is not on the list",
	}, checkClosure([]*pkg{
		{ImportPath: module + "/cmd/tombolo", Deps: []string{"fmt", "net/http", "example.com/other/x"}},
		{ImportPath: "net/http", Standard: true},
		{ImportPath: "example.com/other/x", Module: other},
	}))
	mustFind(t, []string{"cmd/tombolo is not there"}, checkClosure(nil))
}

// checkOrder finds what a layer may import that is not above it in the list, so that an
// import that runs back up is seen.
func checkOrder(layers []layer) []string {
	var found []string
	place := map[string]int{}
	for i, l := range layers {
		for _, name := range l.packages {
			place[name] = i
		}
	}
	for i, l := range layers {
		for _, name := range l.may {
			if at, ok := place[name]; !ok || at >= i {
				found = append(found, fmt.Sprintf("%s may import %s, which is not below it", strings.Join(l.packages, ", "), name))
			}
		}
	}
	return found
}

func TestImportsPointOneWay(t *testing.T) {
	t.Parallel()
	for _, finding := range checkOrder(layers()) {
		t.Error(finding)
	}
}

func TestImportsThatRunBackUpAreFound(t *testing.T) {
	t.Parallel()
	mustFind(t, []string{
		"nft, addr may import network, which is not below it",
		"network may import network, which is not below it",
		"network may import gone, which is not below it",
	}, checkOrder([]layer{
		{packages: []string{"netns"}},
		{packages: []string{"nft", "addr"}, may: []string{"netns", "network"}},
		{packages: []string{"network"}, may: []string{"nft", "network", "gone"}},
	}))
}

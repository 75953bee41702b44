package repotest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// floors are the packages from the ground up, by the folders that they are in. This is the
// whole rule: a package imports what is on a floor below its own, or in its own folder.
func floors() [][]string {
	return [][]string{
		{"."},
		{"netns", "internal/trace", "internal/diff", "internal/file", "internal/ident", "internal/lockorder",
			"internal/printable", "internal/strict", "internal/sysctl"},
		{"internal/nl", "internal/icmp"},
		{"internal/link", "internal/nftnl", "internal/tc", "internal/conntrack", "internal/routing"},
		{"addr", "route", "internal/localnet"},
		{"bridge", "nft", "ipam", "dhcpc"},
		{"hostport", "internal/state", "internal/ipam", "internal/dhcp6"},
		{"internal/endpoint", "internal/firewalld", "internal/lease"},
		{"network"},
		{"internal/keeper"},
		{"internal/cni"},
		{"internal/runtimes"},
		{"cmd", "test/lan", "test/docker"},
	}
}

// folder is the one of the floors' folders that the package is in, and its floor; -1 if in none.
func folder(name string) (string, int) {
	dir, floor := "", -1
	for i, folders := range floors() {
		for _, f := range folders {
			if within(name, f) && len(f) > len(dir) {
				dir, floor = f, i
			}
		}
	}
	return dir, floor
}

// checkFloors finds imports of shipped packages that do not point down.
func checkFloors(list []*pkg) []string {
	var found []string
	for _, p := range list {
		if !p.shipped() {
			continue
		}
		from, floor := folder(p.rel())
		if floor < 0 {
			found = append(found, fmt.Sprintf("%s is on no floor", p.rel()))
			continue
		}
		for _, imported := range p.Imports {
			to := relative(imported)
			dir, below := folder(to)
			if to != "" && dir != from && below >= floor {
				found = append(found, fmt.Sprintf("%s imports %s, which is not below it", p.rel(), to))
			}
		}
	}
	return found
}

func TestImportsPointOneWay(t *testing.T) {
	t.Parallel()
	for _, finding := range checkFloors(packages(t)) {
		t.Error(finding)
	}
}

func TestImportsThatRunBackUpAreFound(t *testing.T) {
	t.Parallel()
	imports := func(name string, ours ...string) *pkg {
		p := &pkg{ImportPath: module + "/" + name, GoFiles: []string{"x.go"}, Imports: []string{"fmt"}}
		for _, n := range ours {
			p.Imports = append(p.Imports, module+"/"+n)
		}
		return p
	}
	mustFind(t, []string{
		"bridge/share imports nft, which is not below it",
		"nft imports internal/keeper, which is not below it",
		"uplink is on no floor",
	}, checkFloors([]*pkg{
		imports("bridge/share", "bridge", "bridge/vlan", "addr", "nft"),
		imports("nft", "nft/foreign", "internal/keeper", "internal/testutil/nstest"),
		imports("uplink"),
		{ImportPath: "example.com/other", GoFiles: []string{"x.go"}, Imports: []string{module + "/internal/cni"}},
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
		{"shipped packages", shippedBut(), []string{"testing", module + "/internal/testutil"}, "fixtures are for tests"},
		{"shipped packages", shippedBut("internal/nl", "bridge/share"), []string{"unsafe", "C"}, "only the ioctls of internal/nl and the bpf(2) of bridge/share take pointers; a package that needs it too gets an exception here, with a reason"},
		{"shipped packages", shippedBut(), []string{"github.com/vishvananda", "github.com/ti-mo", "github.com/florianl"},
			"netlink is mdlayher's, and what is said over it jsimonetti's and google's: one way is enough"},
		{"shipped packages", shippedBut("internal/keeper"), []string{"github.com/prometheus"}, "metrics are the keeper's: it would cost each ADD 1.7 ms of start-up"},
		{"shipped packages", shippedBut("cmd/tombolo"), []string{"github.com/spf13"}, "commands are the operator's"},
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
		"internal/cni imports unsafe, which shipped packages must not: only the ioctls of internal/nl and the bpf(2) of bridge/share take pointers; a package that needs it too gets an exception here, with a reason",
		"internal/cni imports " + module + "/internal/testutil/nstest, which shipped packages must not: fixtures are for tests",
	}, sorted(checkBans(bans(), []*pkg{
		made("bridge", "github.com/containernetworking/cni/pkg/types", "log/slog", "github.com/containernetworkingx"),
		made("internal/cni", "os/exec", "unsafe", module+"/internal/testutil/nstest", "log/slog"),
		made("internal/ipam/delegate", "os/exec"),
		made("internal/testutil/nstest", "os/exec", "testing"),
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
		"github.com/spf13/cobra":                         "0.06 ms of start-up: commands are the operator's",
	}
}

func checkClosure(list []*pkg) []string {
	byPath := map[string]*pkg{}
	for _, p := range list {
		byPath[p.ImportPath] = p
	}
	command := byPath[module+"/cmd/tombolo-cni"]
	if command == nil {
		return []string{"cmd/tombolo-cni is not there"}
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
		{ImportPath: module + "/cmd/tombolo-cni", Deps: []string{"fmt", "net/http", "example.com/other/x"}},
		{ImportPath: "net/http", Standard: true},
		{ImportPath: "example.com/other/x", Module: other},
	}))
	mustFind(t, []string{"cmd/tombolo-cni is not there"}, checkClosure(nil))
}

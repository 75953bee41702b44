package cni

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// badConf is a configuration that ADD refuses. The error object is in
// testdata/refused.golden, exactly.
type badConf struct {
	name   string
	fields conf   // besides a good one's
	raw    string // instead of all
	args   string // CNI_ARGS
}

func badConfs() []badConf {
	besides := func(all, fields conf) conf {
		maps.Copy(all, fields)
		return all
	}
	ipam := func(fields conf) conf { return conf{"ipam": besides(hostLocal(subnet4), fields)} }
	ranges := func(sets ...any) conf { return ipam(conf{"ranges": sets}) }
	set := func(fields conf) any { return []any{fields} }
	static := func(fields conf) conf { return conf{"ipam": besides(conf{"type": "static"}, fields)} }
	leased := func(fields conf) conf { return conf{"ipam": besides(conf{"type": "dhcp"}, fields)} }
	onLAN := func(fields conf) conf { return besides(conf{"mode": "lan", "uplink": "eth0"}, fields) }
	return []badConf{
		{name: "not JSON", raw: `{"cniVersion": "1.1.0", }`},
		{name: "empty", raw: ``},
		{name: "not an object", raw: `["tombolo"]`},
		{name: "cut short", raw: `{"cniVersion":"1.1.0","name":"podnet"`},
		{name: "more behind it", raw: `{"cniVersion":"1.1.0","name":"podnet","type":"tombolo"} {}`},
		{name: "a key twice", raw: `{"cniVersion":"1.1.0","name":"podnet","type":"tombolo","mtu":1,"mtu":2}`},
		{name: "no name", fields: conf{"name": ""}},
		{name: "bad name", fields: conf{"name": "../podnet"}},
		{name: "unknown version", fields: conf{"cniVersion": "2.0.0"}},
		{name: "version that is none", fields: conf{"cniVersion": "latest"}},

		{name: "unknown field, nearly one", fields: conf{"isGatway": true}},
		{name: "unknown field, other case", fields: conf{"ipmasq": true}},
		{name: "unknown field, like no other", fields: conf{"zebra": conf{"stripes": 7}}},
		{name: "unknown field of the reference's chain", fields: conf{"snat": false}},
		{name: "unknown field of kubenet's", fields: conf{"addIf": "eth0"}},
		{name: "unknown field of kubelet's", fields: conf{"podCIDR": subnet4}},
		{name: "unknown field with a long value", fields: conf{"zebra": strings.Repeat("x", 200)}},
		{name: "unknown field in dns", fields: conf{"dns": conf{"nameserver": "1.1.1.1"}}},
		{name: "unknown field in ipam", fields: ipam(conf{"rangeStrat": "10.77.0.2"})},
		{name: "unknown field in a range", fields: ranges(set(conf{"subnet": subnet4, "gatway": gateway4}))},
		{name: "unknown field in a route", fields: ipam(conf{"routes": []conf{{"dst": "0.0.0.0/0", "via": gateway4}}})},
		{name: "unknown field in static", fields: static(conf{"address": "10.77.0.2/24"})},
		{name: "unknown field in ipam without type", fields: conf{"ipam": conf{"subnet": subnet4}}},
		{name: "unknown field in ipam, nearly type", fields: conf{"ipam": conf{"typ": "host-local"}}},
		{name: "unknown field in ipam, type in another case", fields: conf{"ipam": conf{"Type": "host-local"}}},
		{name: "unknown field in a route, nearly gw", fields: ipam(conf{"routes": []conf{{"dst": "::/0", "gateway": gateway6}}})},
		{name: "unknown field in static, nearly one", fields: static(conf{"adresses": []conf{}})},

		{name: "annotation that is none", fields: conf{"annotations": []string{"ips", "ip"}, "capabilities": conf{podAnnotations: true}}},
		{name: "annotations without their capability", fields: conf{"annotations": []string{"mac"}, "capabilities": conf{"mac": true}}},
		{name: "annotations of DHCP without it", fields: conf{"annotations": []string{"hostName"}, "capabilities": conf{podAnnotations: true}}},
		{name: "annotation for addresses that nobody reserves", fields: conf{"annotations": []string{"ips"}, "capabilities": conf{podAnnotations: true}, "ipam": conf{"type": "static"}}},
		{name: "annotation that a field overrides", fields: conf{"annotations": []string{"bandwidth"}, "capabilities": conf{podAnnotations: true}, "ingressRate": 8000}},
		{name: "annotations that are no texts", fields: runtimeConfig(podAnnotations, conf{"a": 1})},
		{name: "keep without a pod's name", fields: ipam(conf{"keep": true})},
		{name: "keep of a name with spaces", fields: ipam(conf{"keep": true}), args: "K8S_POD_NAMESPACE=a;K8S_POD_NAME=b c"},
		{name: "promiscMode with hairpinMode", fields: conf{"promiscMode": true, "hairpinMode": true}},
		{name: "ingressPolicy that is none", fields: conf{"ingressPolicy": "closed"}},
		{name: "publishFrom that is none", fields: conf{"publishFrom": "192.0.2.300"}},
		{name: "publishFrom, a prefix that is none", fields: conf{"publishFrom": []string{"eth0", "10.0.0.0/33"}}},
		{name: "publishFrom, an IPv4 prefix in IPv6", fields: conf{"publishFrom": "::ffff:10.0.0.0/104"}},
		{name: "publishFrom, all beside others", fields: conf{"publishFrom": "all, eth0"}},
		{name: "publishFrom, a pattern", fields: conf{"publishFrom": "wg* tcp 80"}},
		{name: "publishFrom, an empty list", fields: conf{"publishFrom": []string{}}},
		{name: "publishFrom, an empty entry", fields: conf{"publishFrom": "eth0,"}},
		{name: "publishFrom, a protocol that is none", fields: conf{"publishFrom": "eth0 icmp"}},
		{name: "publishFrom, a range that is none", fields: conf{"publishFrom": "eth0 tcp 90-80"}},
		{name: "publishFrom, too many words", fields: conf{"publishFrom": "eth0 tcp 80 eth1"}},
		{name: "publishFrom, too many entries", fields: conf{"publishFrom": strings.Repeat("eth0,", 32) + "eth0"}},
		{name: "publishFrom, a number", fields: conf{"publishFrom": 80}},
		{name: "publishFrom of a pod", fields: conf{"runtimeConfig": conf{"publishFrom": "eth 0"}}},
		{name: "publishFrom of args", fields: conf{"args": conf{"cni": conf{"publishFrom": "/24"}}}},
		{name: "publishAdmission that is none", fields: conf{"publishAdmission": "no"}},
		{name: "nonMasqueradeCIDRs that is none", fields: conf{"nonMasqueradeCIDRs": []string{"10.0.0.0"}}},
		{name: "burst without a rate", fields: conf{"ingressBurst": 1000}},
		{name: "rate that is negative", fields: conf{"egressRate": -5}},
		{name: "vlan", fields: conf{"vlan": 4095}},
		{name: "vlan negative", fields: conf{"vlan": -1}},
		{name: "vlan of a bridge whose name is too long", fields: conf{"vlan": 4094, "bridge": "elevenbytes"}},
		{name: "vlan 1 with a gateway", fields: conf{"vlan": 1}},
		{name: "vlan by the host's default route", fields: conf{"vlan": 7, "mode": "lan", "uplink": "eth0", "defaultRoute": "host"}},
		{name: "vlanTrunk", fields: conf{"vlanTrunk": []conf{{"minID": 7, "maxID": 1}}}},
		{name: "vlanTrunk without maxID", fields: conf{"vlanTrunk": []conf{{"minID": 7}}}},
		{name: "vlanTrunk without minID", fields: conf{"vlanTrunk": []conf{{"id": 7}, {"maxID": 7}}}},
		{name: "vlanTrunk too large", fields: conf{"vlanTrunk": []conf{{"minID": 7, "maxID": 4095}}}},
		{name: "vlanTrunk of 0", fields: conf{"vlanTrunk": []conf{{"id": 0}}}},
		{name: "vlanTrunk with another field", fields: conf{"vlanTrunk": []conf{{"vid": 7}}}},
		{name: "vlanTrunk of a guarded pod", fields: conf{"vlanTrunk": []conf{{"id": 1}}, "guard": true}},
		{name: "ipMasqBackend iptables", fields: conf{"ipMasqBackend": "iptables"}},
		{name: "mode lan", fields: conf{"mode": "lan"}},
		{name: "uplink in mode gateway", fields: conf{"uplink": "eth0"}},
		{name: "uplink with a slash", fields: onLAN(conf{"uplink": "et/h0"})},
		{name: "uplink that is the bridge", fields: onLAN(conf{"uplink": "br0"})},
		{name: "defaultRoute that is none", fields: onLAN(conf{"defaultRoute": "gateway"})},
		{name: "ipv6 that is none", fields: onLAN(conf{"ipv6": "dhcpv6"})},
		{name: "gateway on a LAN", fields: onLAN(conf{"isGateway": true})},
		{name: "masquerade on a LAN", fields: onLAN(conf{"ipMasq": true})},
		{name: "promiscMode on a LAN", fields: onLAN(conf{"promiscMode": true})},
		{name: "disableContainerInterface on a LAN", fields: onLAN(conf{"disableContainerInterface": true, "ipam": nil})},
		{name: "defaultRoute in mode l2", fields: conf{"mode": "l2", "uplink": "eth0", "defaultRoute": "host"}},
		{name: "ipv6 in mode gateway", fields: conf{"ipv6": "slaac"}},
		{name: "ipv6 of an interface that is down", fields: conf{"mode": "l2", "ipv6": "slaac", "disableContainerInterface": true, "ipam": nil}},
		{name: "lanGuard without an uplink", fields: conf{"mode": "l2", "lanGuard": true}},
		{name: "mode that is none", fields: conf{"mode": "bridge"}},
		{name: "host port 0", fields: mapping(conf{"containerPort": 80})},
		{name: "host port that is none", fields: mapping(conf{"hostPort": "http", "containerPort": 80})},
		{name: "container port too large", fields: mapping(conf{"hostPort": 80, "containerPort": 65536})},
		{name: "protocol that is none", fields: mapping(conf{"hostPort": 80, "containerPort": 80, "protocol": "icmp"})},
		{name: "hostIP that is none", fields: mapping(conf{"hostPort": 80, "containerPort": 80, "hostIP": "eth0"})},
		{name: "hostIP ::1", fields: mapping(conf{"hostPort": 80, "containerPort": 80, "hostIP": "::1"})},
		{name: "hostIP of a family that the pod has not", fields: conf{"ipam": hostLocal(subnet4),
			"runtimeConfig": conf{"portMappings": []conf{{"hostPort": 80, "containerPort": 80, "hostIP": "2001:db8::1"}}}}},
		{name: "portMappings that is no list", fields: conf{"runtimeConfig": conf{"portMappings": "80:80"}}},
		{name: "bandwidth too small", fields: conf{"runtimeConfig": conf{"bandwidth": conf{"ingressRate": 1}}}},

		{name: "mtu too small", fields: conf{"mtu": 67}},
		{name: "mtu too large", fields: conf{"mtu": 65536}},
		{name: "mtu negative", fields: conf{"mtu": -1}},
		{name: "mtu that is a string", fields: conf{"mtu": "1500"}},
		{name: "mtu with a fraction", fields: conf{"mtu": 1500.5}},
		{name: "boolean that is a string", fields: conf{"isGateway": "true"}},
		{name: "boolean that is a number", fields: conf{"ipMasq": 1}},
		{name: "bridge name that is a number", fields: conf{"bridge": 7}},
		{name: "bridge name too long", fields: conf{"bridge": "a-bridge-with-a-long-name"}},
		{name: "bridge name with a slash", fields: conf{"bridge": "br/0"}},
		{name: "bridge name with a NUL", fields: conf{"bridge": "br\x00"}},
		{name: "bridge name of a dot", fields: conf{"bridge": "."}},
		{name: "deadline that is a number", fields: conf{"deadline": 5}},
		{name: "deadline without a unit", fields: conf{"deadline": "5"}},
		{name: "deadline that is negative", fields: conf{"deadline": "-5s"}},
		{name: "forwardMark of two bits", fields: conf{"forwardMark": 3}},
		{name: "forwardMark of 33 bits", fields: conf{"forwardMark": "0x100000000"}},
		{name: "forwardMark that is none", fields: conf{"forwardMark": "bit 5"}},
		{name: "stateDir that is relative", fields: conf{"stateDir": "state"}},
		{name: "logFile that is relative", fields: conf{"logFile": "log"}},
		{name: "logLevel that is none", fields: conf{"logLevel": "verbose"}},
		{name: "logFile that cannot be written", fields: conf{"logFile": "/dev/null/log"}},
		{name: "disableContainerInterface with ipam", fields: conf{"disableContainerInterface": true}},

		{name: "mac of a group", fields: conf{"runtimeConfig": conf{"mac": "01:00:5e:00:00:01"}}},
		{name: "mac that is none", fields: conf{"args": conf{"cni": conf{"mac": "02-00"}}}},
		{name: "mac that is none, by CNI_ARGS", args: "MAC=02:00"},
		{name: "CNI_ARGS that are none", args: "MAC"},
		{name: "CNI_ARGS with an unknown key", args: "FOO=bar"},
		{name: "CNI_ARGS with an unknown key, not ignored", args: "FOO=bar;IgnoreUnknown=false"},
		{name: "CNI_ARGS that ignore neither nor", args: "IgnoreUnknown=maybe"},
		{name: "prevResult that is none", fields: conf{"prevResult": "none"}},
		{name: "prevResult with a null", fields: conf{"prevResult": conf{"cniVersion": "1.1.0", "ips": []any{nil}}}},
		{name: "prevResult with a bad index", fields: conf{"prevResult": conf{"cniVersion": "1.1.0", "ips": []any{conf{"address": "10.1.0.1/24", "interface": 3}}}}},

		{name: "ipam that is a string", fields: conf{"ipam": "host-local"}},
		{name: "ipam that is a list", fields: conf{"ipam": []any{}}},
		{name: "ipam whose type is a number", fields: conf{"ipam": conf{"type": 1}}},
		{name: "ipam that is not installed", fields: conf{"ipam": conf{"type": "nosuch-ipam"}}},
		{name: "ipam with a path for a type", fields: conf{"ipam": conf{"type": "../bin/sh"}}},
		{name: "no ranges", fields: ipam(conf{"ranges": []any{}})},
		{name: "an empty range set", fields: ranges([]any{})},
		{name: "no subnet", fields: ranges(set(conf{"gateway": gateway4}))},
		{name: "no subnet, inline", fields: conf{"ipam": conf{"type": "host-local", "gateway": gateway4}}},
		{name: "subnet with host bits", fields: ranges(set(conf{"subnet": "10.77.0.5/24"}))},
		{name: "subnet that is none", fields: ranges(set(conf{"subnet": "10.77.0.0"}))},
		{name: "subnet too small", fields: ranges(set(conf{"subnet": "10.77.0.0/31"}))},
		{name: "range outside of its subnet", fields: ranges(set(conf{"subnet": subnet4, "rangeStart": "10.78.0.2"}))},
		{name: "range backwards", fields: ranges(set(conf{"subnet": subnet4, "rangeStart": "10.77.0.9", "rangeEnd": "10.77.0.2"}))},
		{name: "gateway of the other family", fields: ranges(set(conf{"subnet": subnet4, "gateway": gateway6}))},
		{name: "gateway that is none", fields: ranges(set(conf{"subnet": subnet4, "gateway": "router"}))},
		{name: "a range that is in no set", fields: ranges(conf{"subnet": subnet4})},
		{name: "ranges that overlap", fields: ranges(set(conf{"subnet": subnet4}), set(conf{"subnet": "10.77.0.0/16"}))},
		{name: "ranges that overlap with the runtime's", fields: conf{"ipam": conf{"type": "host-local", "subnet": subnet4},
			"runtimeConfig": conf{"ipRanges": []any{set(conf{"subnet": subnet4})}}}},
		{name: "families mixed in a set", fields: ranges([]any{conf{"subnet": subnet4}, conf{"subnet": subnet6}})},
		{name: "dataDir that is relative", fields: ipam(conf{"dataDir": "data"})},
		{name: "resolvConf that is not there", fields: ipam(conf{"resolvConf": "/nonexistent/resolv.conf"})},
		{name: "route without a destination", fields: ipam(conf{"routes": []conf{{"gw": gateway4}}})},
		{name: "route to what is none", fields: ipam(conf{"routes": []conf{{"dst": "default"}}})},
		{name: "route by a gateway with a zone", fields: ipam(conf{"routes": []conf{{"dst": "::/0", "gw": "fe80::1%eth0"}}})},
		{name: "route with an mtu that is a string", fields: ipam(conf{"routes": []conf{{"dst": "::/0", "mtu": "1400"}}})},
		{name: "route with a negative mtu", fields: ipam(conf{"routes": []conf{{"dst": "10.1.0.0/16", "mtu": -5}}})},
		{name: "address outside of the ranges", args: "IP=10.78.0.5"},
		{name: "address behind the range's end", fields: ranges(set(conf{"subnet": subnet4, "rangeEnd": "10.77.0.9"})), args: "IP=10.77.0.10"},
		{name: "two addresses of one range", args: "IP=10.77.0.2,10.77.0.3"},
		{name: "address that is the gateway", args: "IP=" + gateway4},
		{name: "address that is none", args: "IP=localhost"},
		{name: "address with a prefix length that is none", args: "IP=10.77.0.2/33"},
		{name: "address with a zone", args: "IP=fd77::2%eth0"},
		{name: "static without an address", fields: static(nil)},
		{name: "static without a prefix length", fields: static(conf{"addresses": []conf{{"address": "10.77.0.2"}}})},
		{name: "static with a gateway alone", fields: static(conf{"addresses": []conf{{"gateway": gateway4}}})},
		{name: "static with a gateway with a zone", fields: static(conf{"addresses": []conf{{"address": "fd77::5/64", "gateway": "fe80::1%eth0"}}})},
		{name: "static with a route without a destination", fields: static(conf{"routes": []conf{{}}})},
		{name: "static, asked for no prefix", fields: static(nil), args: "IP=10.77.0.5"},
		{name: "static, asked for no gateway", fields: static(nil), args: "GATEWAY=router"},
		{name: "static, asked by args for no address", fields: conf{"ipam": fixed(), "args": conf{"cni": conf{"ips": []string{"x"}}}}},
		{name: "static, asked by the runtime for no address", fields: conf{"ipam": fixed(), "runtimeConfig": conf{"ips": []string{"x"}}}},
		{name: "static with a gateway of the other family", fields: static(conf{"addresses": []conf{{"address": "10.77.0.2/24", "gateway": gateway6}}})},
		{name: "unknown field in dhcp, other case", fields: leased(conf{"clientid": "pod"})},
		{name: "unknown field in dhcp", fields: leased(conf{"transport": "udp"})},
		{name: "unknown field in dhcp of the reference", fields: leased(conf{"daemonSocketPath": "/run/cni/dhcp.sock"})},
		{name: "clientID that is none", fields: leased(conf{"clientID": "host"})},
		{name: "keeper that is none", fields: leased(conf{"keeper": "no"})},
		{name: "timeout that is a number", fields: leased(conf{"timeout": 5})},
		{name: "priority negative", fields: leased(conf{"priority": -1})},
		{name: "option that is none", fields: leased(conf{"request": []conf{{"option": "colour"}}})},
		{name: "option too large", fields: leased(conf{"request": []conf{{"option": 255}}})},
		{name: "route of a lease without a destination", fields: leased(conf{"routes": []conf{{"gw": gateway4}}})},
		{name: "route of a lease that is of IPv6", fields: leased(conf{"routes": []conf{{"dst": "fd00::/8"}}})},
		{name: "mtu too small for IPv6", fields: conf{"mtu": 600}},
	}
}

func mapping(m conf) conf { return runtimeConfig("portMappings", []conf{m}) }

func runtimeConfig(capability string, value any) conf {
	return conf{"runtimeConfig": conf{capability: value}}
}

func TestBadConfigurationsAreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("a")
	var all strings.Builder
	for _, bad := range badConfs() {
		w := n.podnet(nil)
		stdin := w.stdin(bad.fields)
		if bad.fields == nil && bad.args == "" {
			stdin = []byte(bad.raw)
		}
		o := n.call(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", args: bad.args, stdin: stdin})
		if o.status == 0 {
			t.Errorf("%s: ADD took it", bad.name)
			w.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)})
			continue
		}
		settled := strings.NewReplacer(n.state, "STATE", cniPath, "PATH").Replace(o.stdout)
		fmt.Fprintf(&all, "%s\n\t%s\n", bad.name, strings.TrimSpace(settled))
	}
	golden.Compare(t, "refused.golden", all.String())
	n.wantNothing()
	for _, dir := range []string{"attachments", "networks"} {
		got := n.files(n.state + "/" + dir)
		expect.That(t, len(got) == 0, "refused ADDs left %s: %v", dir, got)
	}
}

func TestBadEnvironmentIsRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("a")
	stdin := n.podnet(nil).stdin(nil)
	var all strings.Builder
	for _, tt := range []struct {
		name string
		call call
	}{
		{"unknown verb", call{verb: "UPDATE"}},
		{"verb in lower case", call{verb: "add", id: "a", netns: p.path, ifName: "eth0"}},
		{"ADD without anything", call{verb: "ADD"}},
		{"CHECK without anything", call{verb: "CHECK"}},
		{"DEL without anything", call{verb: "DEL"}},
		{"ADD without an interface", call{verb: "ADD", id: "a", netns: p.path}},
		{"ADD without a namespace", call{verb: "ADD", id: "a", ifName: "eth0"}},
		{"DEL without a container", call{verb: "DEL", ifName: "eth0"}},
		{"DEL without an interface", call{verb: "DEL", id: "a"}},
		{"CHECK without a namespace", call{verb: "CHECK", id: "a", ifName: "eth0"}},
		{"bad container", call{verb: "ADD", id: "../a", netns: p.path, ifName: "eth0"}},
		{"container that begins with a dot", call{verb: "ADD", id: ".a", netns: p.path, ifName: "eth0"}},
		{"container that is not ASCII", call{verb: "ADD", id: "ä", netns: p.path, ifName: "eth0"}},
		{"interface with a colon", call{verb: "ADD", id: "a", netns: p.path, ifName: "eth0:1"}},
		{"interface too long", call{verb: "ADD", id: "a", netns: p.path, ifName: "an-interface-name"}},
		{"interface with a slash", call{verb: "ADD", id: "a", netns: p.path, ifName: "eth/0"}},
		{"interface of dots", call{verb: "DEL", id: "a", ifName: ".."}},
		{"CHECK without prevResult", call{verb: "CHECK", id: "a", netns: p.path, ifName: "eth0"}},
		{"CHECK before its version", call{verb: "CHECK", id: "a", netns: p.path, ifName: "eth0", stdin: []byte(`{"name":"podnet"}`)}},
		{"GC before its version", call{verb: "GC", stdin: []byte(`{"cniVersion":"1.0.0","name":"podnet"}`)}},
		{"STATUS before its version", call{verb: "STATUS", stdin: []byte(`{"cniVersion":"1.0.0","name":"podnet","unknown":1}`)}},
		{"DEL of a later version", call{verb: "DEL", id: "a", ifName: "eth0", stdin: []byte(`{"cniVersion":"1.2.0","name":"podnet"}`)}},
		{"DEL of no network", call{verb: "DEL", id: "a", ifName: "eth0", stdin: []byte(`{"cniVersion":"1.1.0"}`)}},
		{"DEL of a bad name", call{verb: "DEL", id: "a", ifName: "eth0", stdin: []byte(`{"name":"-podnet"}`)}},
		{"DEL of what is cut short", call{verb: "DEL", id: "a", ifName: "eth0", stdin: []byte(`{`)}},
	} {
		if tt.call.stdin == nil {
			tt.call.stdin = stdin
		}
		o := n.call(tt.call)
		expect.That(t, o.status != 0, "%s: it was taken", tt.name)
		fmt.Fprintf(&all, "%s\n\t%s\n", tt.name, strings.TrimSpace(o.stdout))
	}
	golden.Compare(t, "environment.golden", all.String())
	n.wantNothing()
}

// TestFieldsThatRuntimesAndPeopleAddAreNoError has all that is excepted from being
// an unknown field.
func TestFieldsThatRuntimesAndPeopleAddAreNoError(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	w := n.podnet(nil)
	p := n.pod("a")
	ipam := dualStack()
	ipam["_note"] = "a comment"
	extra := conf{
		"ipam":                ipam,
		"capabilities":        conf{"portMappings": true, "whatever": true},
		"cni.dev/attachments": []any{}, "cni.dev/anything": conf{"a": 1},
		"runtimeConfig": conf{"cgroupPath": "/kubepods", "aliases": []string{"web"}, "io.kubernetes.cri.pod-annotations": conf{"a": "b"}, "unknown": 1},
		"args":          conf{"cni": conf{"labels": []conf{{"key": "a", "value": "b"}}}, "org.example": conf{"x": []int{1}}},
		"_comment":      "anything", "_": []int{1},
		// Fields of the reference that ask for nothing.
		"promiscMode": false, "macspoofchk": false, "vlan": 0, "vlanTrunk": []any{}, "preserveDefaultVlan": false,
		"ipMasqBackend": "nftables",
	}
	args := "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_UID=7;WHATEVER=x"
	out := n.callOK(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", args: args, stdin: w.stdin(extra)})
	extra["prevResult"] = json.RawMessage(out)
	n.callOK(call{verb: "CHECK", id: p.id, netns: p.path, ifName: "eth0", args: args, stdin: w.stdin(extra)})
	n.callOK(call{verb: "STATUS", stdin: w.stdin(extra)})
	if ls := n.operate("ls", "--state", n.state); !strings.Contains(ls.stdout, "default/web") {
		t.Errorf("tombolo ls says %q, want the pod's name in it", ls.stdout)
	}
	n.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", args: args, stdin: w.stdin(extra)})
	n.wantNothing()
}

func TestUnknownFieldsOfADelegatedIPAMAreItsOwn(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ipam, _ := fake(t, fakeConf{})
	var section conf
	unmarshal(t, string(marshal(t, ipam)), &section)
	section["poolName"] = "blue"
	w := n.podnet(conf{"ipam": section})
	p := n.pod("a")
	w.add(p)
	w.del(p)
}

func TestSTATUSAndCHECKAreAsStrictAsADD(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	w := n.podnet(nil)
	p := n.pod("a")
	w.add(p)
	spoilt := w.with(conf{"isGatway": true})
	wantError(t, spoilt.status(), 2, "isGateway")
	wantError(t, spoilt.check(p), 2, "isGateway")
}

func TestConfigurationThatIsTooLongIsRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	w := n.podnet(conf{"_pad": strings.Repeat("x", 5<<20)})
	o := n.call(call{verb: "ADD", id: "a", netns: nstest.Path(t, nstest.New(t)), ifName: "eth0", stdin: w.stdin(nil)})
	expect.That(t, o.status != 0 && strings.Contains(o.stdout, `"code":6,`) && strings.Contains(o.stdout, "longer than 4194304 bytes"), "exit status %d: %s", o.status, o.stdout)
}

// A runtime reads an error by the version that it has; one of an old configuration's is not to be
// of the newest.
func TestErrorsCarryTheConfigurationsVersion(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("a")
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0"} {
		w := n.podnet(nil)
		w.version = version
		refused := func(name string, c call) {
			t.Helper()
			var failure struct{ CNIVersion string }
			o := n.call(c)
			unmarshal(t, o.stdout, &failure)
			expect.That(t, o.status != 0 && failure.CNIVersion == version,
				"%s of %s: exit status %d, %s", name, version, o.status, o.stdout)
		}
		for _, bad := range badConfs() {
			if bad.fields["cniVersion"] != nil || bad.fields == nil && bad.args == "" {
				continue // which has none, or none that is known
			}
			refused(bad.name, call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", args: bad.args, stdin: w.stdin(bad.fields)})
		}
		// What the environment lacks is said before the configuration is read.
		for name, c := range map[string]call{
			"a namespace lost": {verb: "ADD", id: "a", netns: "/nonexistent", ifName: "eth0"},
			"no prevResult":    {verb: "CHECK", id: "a", netns: p.path, ifName: "eth0"},
			"too old a verb":   {verb: "STATUS"},
		} {
			c.stdin = w.stdin(nil)
			refused(name, c)
		}
	}
}

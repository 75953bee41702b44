package netavark

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/runtimes"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.Main(m) }

const id = "2f259bab93aaaaa2542ba43ef33eb990d0999ee1b9924b557b7be53c0b7a1bb9"

// call is one of podman's or netavark's, on a node.
func call(t *testing.T, node *netns.NS, stdin string, args ...string) (status int, stdout string) {
	t.Helper()
	var out strings.Builder
	must.Succeed(t, node.Do(func() error {
		var called bool
		status, called = Run(args, strings.NewReader(stdin), &out)
		must.That(t, called, "%q is no call", args)
		return nil
	}))
	return status, out.String()
}

// networks are some as podman gives them to create.
func networks() [][2]string {
	of := func(name, fields string) [2]string {
		return [2]string{name, `{"name": "home", "id": "` + id + `", "driver": "tombolo", "created": "0001-01-01T00:00:00Z", "dns_enabled": true` + fields + "}"}
	}
	const lan = `, "options": {"mode": "lan", "uplink": "eth0", "ipam.keeper": "optional"`
	return [][2]string{
		of("nothing", ``),
		of("what is not known stays", `, "labels": {"a": "b"}, "later": [1, {"x": null}], "subnets": [{"subnet": "10.1.0.0/24", "lease_range": {"start_ip": "10.1.0.9"}}]`),
		of("two subnets", `, "ipv6_enabled": true, "subnets": [{"subnet": "10.1.0.0/24", "gateway": "10.1.0.254"}, {"subnet": "fd01::/64"}]`),
		of("a bridge", `, "network_interface": "br7", "ipam_options": {"driver": "host-local"}`),
		of("a bridge by an option", `, "options": {"bridge": "br8"}`),
		of("two bridges", `, "network_interface": "br7", "options": {"bridge": "br8"}`),
		of("internal", `, "internal": true, "subnets": [{"subnet": "10.1.0.0/24"}]`),
		of("IPv6 without a subnet", `, "ipv6_enabled": true`),
		of("another ipam", `, "ipam_options": {"driver": "dhcp"}`),
		of("routes", `, "routes": [{"destination": "10.9.0.0/16", "gateway": "10.1.0.9"}]`),
		of("an option that is none", `, "options": {"parent": "eth0"}`),
		of("a mode that is none", `, "options": {"mode": "bridge"}`),
		of("lan", lan+`}`),
		of("lan, without its uplink", `, "options": {"mode": "lan"}`),
		of("lan, an uplink that is not there", strings.Replace(lan, "eth0", "eth9", 1)+`}`),
		of("lan, subnets", lan+`}, "subnets": [{"subnet": "10.1.0.0/24", "gateway": "10.1.0.1"}]`),
		of("lan, IPv6", lan+`, "ipv6": "slaac"}, "ipv6_enabled": true`),
		of("lan, internal", lan+`}, "internal": true`),
		of("l2", `, "options": {"mode": "l2", "bridge": "br9"}`),
		{"an array", `[]`}, {"null", `null`}, {"half", `{"name": "ho`}, {"a subnet that is none", `{"subnets": [{"subnet": "10.1.0.0"}]}`},
	}
}

func TestNetworksAreCompletedOrRefused(t *testing.T) {
	t.Parallel()
	node := nstest.New(t)
	nstest.Run(t, node, "sh", "-ec", "ip link add eth0 type veth peer name peer; ip link set eth0 up; ip link set peer up; ip addr add 192.0.2.1/24 dev eth0")
	var text strings.Builder
	for _, n := range networks() {
		status, said := call(t, node, n[1], "create")
		fmt.Fprintf(&text, "%s: %d\n%s", n[0], status, said)
	}
	golden.Compare(t, "create.txt", text.String())
}

func TestASubnetIsChosenBesideTheHostsRoutes(t *testing.T) {
	t.Parallel()
	node := nstest.New(t)
	chosen := func() string {
		var n network
		status, said := call(t, node, networks()[0][1], "create")
		must.That(t, status == 0, "%s", said)
		must.Succeed(t, json.Unmarshal([]byte(said), &n))
		return n.Subnets[0].Prefix.String()
	}
	nstest.Run(t, node, "sh", "-ec", "ip link set lo up; ip route add default dev lo")
	first := chosen()
	nstest.Run(t, node, "ip", "route", "add", "blackhole", first)
	expect.That(t, chosen() != first, "%s is chosen although there is a route to it", first)
	nstest.Run(t, node, "ip", "route", "add", "10.0.0.0/8", "dev", "lo")
	status, said := call(t, node, networks()[0][1], "create")
	expect.That(t, status == 1 && strings.Contains(said, "name a --subnet"), "%d: %s", status, said)
}

// attached is a container as netavark has it; %s is what its network and its own options have more.
const attached = `{"container_id": "c1", "container_name": "web", "port_mappings": %s,
	"network": {"name": "home", "id": "` + id + `", "driver": "tombolo", "options": {%s}, "network_interface": "br7", "subnets": %s, "routes": null},
	"network_options": {"aliases": ["c1"], "interface_name": "eth0", "static_ips": %s, "static_mac": %s}}`

func TestContainers(t *testing.T) {
	t.Parallel()
	const subnets = `[{"subnet": "10.1.0.0/24", "gateway": "10.1.0.1"}, {"subnet": "fd01::/64", "gateway": "fd01::1"}]`
	var text strings.Builder
	for _, tt := range []struct{ name, ports, subnets, ips, mac string }{
		{"leased", `null`, `null`, `null`, `null`},
		{"leased, with a MAC", `[]`, `[]`, `[]`, `"02:00:00:00:00:77"`},
		{"leased, as it is reloaded", `null`, `null`, `["192.0.2.7", "2001:db8::7"]`, `"02:00:00:00:00:77"`},
		{"leased, with an address", `null`, `null`, `["192.0.2.7"]`, `null`},
		{"given", `null`, subnets, `["fd01::7", "10.1.0.7", "10.1.0.8"]`, `null`},
		{"given from elsewhere", `null`, subnets, `["10.2.0.7"]`, `null`},
		{"ports", `[{"container_port": 80, "host_ip": "", "host_port": 8080, "protocol": "tcp", "range": 1}, {"container_port": 53, "host_port": 53, "protocol": "tcp,udp"},
			{"container_port": 9000, "host_ip": "127.0.0.1", "host_port": 9100, "protocol": "", "range": 3}]`, `null`, `null`, `null`},
	} {
		a := new(attachment)
		must.Succeed(t, json.Unmarshal(fmt.Appendf(nil, attached, tt.ports, "", tt.subnets, tt.ips, tt.mac), a), tt.name)
		c, err := a.container("/ns")
		fmt.Fprintf(&text, "%s: %+v\n", tt.name, *c)
		if err != nil {
			fmt.Fprintf(&text, "error: %v\n", err)
		}
	}
	golden.Compare(t, "containers.txt", text.String())
}

func TestStatusHasWhatNetavarkReads(t *testing.T) {
	t.Parallel()
	a := new(attachment)
	a.Options.Interface = "eth0"
	ip := func(s string) net.IPNet {
		p := nstest.Prefix(s)
		return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
	}
	result := &current.Result{
		Interfaces: []*current.Interface{{Name: "br7", Mac: "02:00:00:00:00:01"}, {Name: "veth1"}, {Name: "eth0", Mac: "02:00:00:00:00:77", Sandbox: "/ns"}},
		IPs:        []*current.IPConfig{{Address: ip("10.1.0.7/24"), Gateway: net.ParseIP("10.1.0.1")}, {Address: ip("fd01::7/64")}},
		DNS:        types.DNS{Nameservers: []string{"10.1.0.1", "fe80::1%eth0", "x"}, Domain: "lan"},
	}
	said := must.Of(json.Marshal(a.status(result))).Get(t)
	expect.Equal(t, string(said), `{"dns_search_domains":["lan"],"dns_server_ips":["10.1.0.1"],"interfaces":{"eth0":{"mac_address":"02:00:00:00:00:77",`+
		`"subnets":[{"gateway":"10.1.0.1","ipnet":"10.1.0.7/24"},{"ipnet":"fd01::7/64"}]}}}`)
	result.DNS = types.DNS{Domain: "lan", Search: []string{"a", "b"}}
	said = must.Of(json.Marshal(a.status(result))).Get(t)
	expect.Contains(t, string(said), `{"dns_search_domains":["a","b"],"dns_server_ips":[],`)
}

func TestAContainerIsAttachedAndDetached(t *testing.T) {
	t.Parallel()
	node, pod := nstest.New(t), nstest.New(t)
	path := nstest.Path(t, pod)
	options := fmt.Sprintf(`"stateDir": %q`, t.TempDir())
	stdin := fmt.Sprintf(attached, `[{"container_port": 80, "host_port": 8080}]`, options, `[{"subnet": "10.1.0.0/24", "gateway": "10.1.0.1"}]`, `["10.1.0.7"]`, `"02:00:00:00:00:77"`)
	status, said := call(t, node, stdin, "setup", path)
	expect.That(t, status == 0 && strings.Contains(said, `"eth0":{"mac_address":"02:00:00:00:00:77","subnets":[{"gateway":"10.1.0.1","ipnet":"10.1.0.7/24"}]`), "%d: %s", status, said)
	broken := strings.Replace(strings.Replace(stdin, "10.1.0.7", "10.2.0.7", 1), `"options": {`, `"options": {"parent": "eth0", `, 1)
	for range 2 { // what is gone is no error, and neither is what could not be attached
		status, said = call(t, node, broken, "teardown", path)
		expect.That(t, status == 0 && said == "", "%d: %s", status, said)
	}
	expect.Equal(t, nstest.Run(t, pod, "ip", "-brief", "link", "show", "type", "veth"), "", "links of the container")
	for _, wrong := range [][]string{{"setup", "/nonexistent"}, {"setup"}} {
		status, said = call(t, node, stdin, wrong...)
		expect.That(t, status == 1 && strings.HasPrefix(said, `{"error":"`) && strings.HasSuffix(said, "\"}\n"), "%d: %s", status, said)
	}
	status, said = call(t, node, `{`, "setup", path)
	expect.That(t, status == 1 && strings.Contains(said, "setup reads a container's attachment as JSON"), "%d: %s", status, said)
}

func TestOtherArgumentsAreNoCall(t *testing.T) {
	for _, args := range [][]string{nil, {"ls"}, {"Create"}} {
		_, called := Run(args, nil, nil)
		expect.That(t, !called, "%q is a call", args)
	}
}

func TestPodmanWithoutRootIsRefused(t *testing.T) {
	t.Setenv("_CONTAINERS_USERNS_CONFIGURED", "done")
	status, said := call(t, nstest.New(t), networks()[0][1], "create")
	expect.That(t, status == 1 && strings.Contains(said, "run podman as root"), "%d: %s", status, said)
}

// FuzzNetwork holds that what create completes is complete, and stays as it is when it is completed again.
func FuzzNetwork(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		n := new(network)
		if json.Unmarshal(data, n) != nil || n.complete() != nil {
			return
		}
		expect.That(t, n.IPAM["driver"] != "host-local" || len(n.Subnets) != 0,
			"podman has no subnet to give addresses from: %+v", n)
		if mode := n.Options["mode"]; mode == "" || mode == "gateway" {
			bare := slices.ContainsFunc(n.Subnets, func(s runtimes.Subnet) bool {
				return s.Prefix.IsValid() && !s.Gateway.IsValid() && s.Prefix.Bits() < s.Prefix.Addr().BitLen()
			})
			expect.That(t, n.Bridge != "" && !bare, "%+v lacks a bridge or a gateway", n)
		}
		before := fmt.Sprint(*n)
		expect.Success(t, n.complete())
		expect.Equal(t, fmt.Sprint(*n), before)
	})
}

func FuzzAttachment(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		a := new(attachment)
		if json.Unmarshal(data, a) != nil || len(a.Ports) > 10 {
			return
		}
		c, err := a.container("/ns")
		expect.That(t, len(c.Ports) >= len(a.Ports), "%d of %d ports", len(c.Ports), len(a.Ports))
		given := len(a.Network.Subnets) > 0
		expect.That(t, err != nil || !given || len(c.Addresses) == len(a.Options.IPs), "addresses %v of %v", c.Addresses, a.Options.IPs)
		for _, p := range c.Addresses {
			expect.That(t, p.IsValid(), "%s", p)
		}
	})
}

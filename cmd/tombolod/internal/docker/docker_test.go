package docker

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

func TestMain(m *testing.M) { nstest.Main(m) }

const (
	networkID  = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	endpointID = "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210"
)

var id = key{networkID, endpointID}

// node is a Driver in a network namespace of its own.
type node struct {
	testing.TB
	*Driver
	ns  *netns.NS
	log *nstest.Output
	end func() // of the Driver
}

func newNode(t testing.TB) *node {
	t.Helper()
	n := &node{TB: t, ns: nstest.New(t), log: &nstest.Output{}}
	dir := t.TempDir()
	cfg := &Config{StateDir: dir + "/state", LeaseDir: dir + "/leases", Log: slog.New(slog.NewTextHandler(n.log, nil))}
	cfg.Node = must.Of(network.Open(t.Context(), &network.Config{StateDir: cfg.StateDir, LeaseDir: cfg.LeaseDir})).Get(t)
	n.Driver = &Driver{Config: cfg}
	n.restart()
	return n
}

// restart has an earlier Driver end, as with tombolod.
func (n *node) restart() {
	ctx, cancel := context.WithCancel(n.Context())
	d := New(ctx, n.Config)
	n.end = func() { cancel(); d.Wait() }
	n.Cleanup(n.end)
	n.Driver = d
}

// ask is what Docker does.
func (n *node) ask(method, body string) (a answer) {
	n.Helper()
	w := httptest.NewRecorder()
	must.Succeed(n, n.ns.Do(func() error {
		n.ServeHTTP(w, httptest.NewRequest("POST", "/"+method, strings.NewReader(body)))
		return nil
	}))
	must.Succeed(n, json.Unmarshal(w.Body.Bytes(), &a))
	return a
}

func (n *node) asks(method, body string) answer {
	n.Helper()
	a := n.ask("NetworkDriver."+method, body)
	must.That(n, a.Err == "", "%s: %s", method, a.Err)
	return a
}

func createNetwork(id, more string) string {
	return fmt.Sprintf(`{"NetworkID":%q,"IPv4Data":[{"Pool":"10.9.0.0/24","Gateway":"10.9.0.1/24"}]%s}`, id, more)
}

func createEndpoint(more string) string {
	return fmt.Sprintf(`{"NetworkID":%q,"EndpointID":%q,"Interface":{"Address":"10.9.0.2/24"}%s}`, networkID, endpointID, more)
}

func TestAnEndpointsLife(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	expect.Equal(t, strings.Join(n.ask("Plugin.Activate", "").Implements, " "), "NetworkDriver")
	expect.Equal(t, n.asks("GetCapabilities", "").Scope, "local")
	n.asks("CreateNetwork", createNetwork(networkID, ""))
	n.asks("DeleteNetwork", about("")) // as long as it has not been made
	n.isEmpty()
	n.asks("CreateNetwork", createNetwork(networkID, ""))
	n.asks("CreateNetwork", createNetwork(networkID, ""))

	n.asks("CreateEndpoint", createEndpoint(""))
	a := n.asks("CreateEndpoint", createEndpoint("")) // Docker asks again where it has lost the connection
	expect.That(t, !a.Interface.Address.IsValid() && a.Interface.MacAddress != "", "it has %+v, want no address but a MAC", a.Interface)
	links := nstest.Run(t, n.ns, "ip", "link", "show", "dev", id.srcName())
	expect.That(t, strings.Contains(links, "altname "+id.ifName()), "the link is\n%s", links)

	box := nstest.New(t)
	path := nstest.Path(t, box)
	a = n.asks("Join", fmt.Sprintf(`{"NetworkID":%q,"EndpointID":%q,"SandboxKey":%q}`, networkID, endpointID, path))
	expect.Equal(t, *a.InterfaceName, interfaceName{id.srcName(), "eth"})
	expect.Equal(t, a.Gateway, "10.9.0.1")
	n.follows(path, false)
	nstest.Run(t, n.ns, "ip", "link", "set", id.srcName(), "name", "eth0", "netns", path)
	nstest.Run(t, box, "ip", "address", "add", "10.9.0.2/24", "dev", "eth0")
	nstest.Run(t, box, "ip", "link", "set", "eth0", "up")
	n.follows(path, false) // as long as Docker has not added the default route
	nstest.Run(t, box, "ip", "route", "add", "default", "via", "10.9.0.1")
	n.follows(path, true)
	reports := n.check()
	expect.That(t, len(reports) == 1 && reports[0].Path == path && len(reports[0].Differences) == 0, "found %+v", reports)

	n.asks("ProgramExternalConnectivity", about(`,"Options":{"com.docker.network.portmap":[{"Proto":6,"Port":80,"HostIP":"0.0.0.0","HostPort":8080,"HostPortEnd":8080},{"Proto":6,"Port":80,"HostIP":"::","HostPort":8080,"HostPortEnd":8080}]}`))
	expect.Equal(t, len(n.check()[0].Ports), 1)
	n.asks("RevokeExternalConnectivity", about(""))
	expect.Equal(t, len(n.check()[0].Ports), 0)
	for _, method := range []string{"EndpointOperInfo", "Leave", "DiscoverNew", "DeleteEndpoint", "DeleteEndpoint", "RevokeExternalConnectivity", "DeleteNetwork", "DeleteNetwork"} {
		n.asks(method, about(""))
	}
	n.isEmpty()
}

// about is a request about the network and the endpoint.
func about(more string) string {
	return fmt.Sprintf(`{"NetworkID":%q,"EndpointID":%q%s}`, networkID, endpointID, more)
}

// follows looks for the endpoint in its container, once.
func (n *node) follows(path string, want bool) {
	n.Helper()
	var err error
	must.Succeed(n, n.ns.Do(func() error { err = n.look(new(endpoint), n.attached()[id].Key, path); return nil }))
	must.That(n, (err == nil) == want, "%v; log: %s", err, n.log)
}

func (n *node) check() (reports []network.Report) {
	n.Helper()
	must.Succeed(n, n.ns.Do(func() error {
		list, err := n.Node.Inspect(n.Context())
		reports = list.Attachments
		return err
	}))
	return reports
}

func (n *node) isEmpty() {
	n.Helper()
	links := nstest.Run(n, n.ns, "ip", "-brief", "link")
	expect.Equal(n, strings.Count(strings.TrimSpace(links), "\n"), 0, links)
	expect.Equal(n, len(n.networkIDs()), 0)
}

// TestAnEndpointThatIsInNoContainerGoes has dockerd killed after an endpoint was created, or left its container.
func TestAnEndpointThatIsInNoContainerGoes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.asks("CreateNetwork", createNetwork(networkID, ""))
	sweep := func(want int, why string) {
		t.Helper()
		must.Succeed(t, n.ns.Do(func() error { n.sweep(); return nil }))
		expect.Equal(t, len(n.check()), want, why)
	}
	n.asks("CreateEndpoint", createEndpoint(""))
	sweep(1, "it may be that it joins")
	e := n.lock(endpointID)
	e.created = e.created.Add(-joinsWithin)
	e.Unlock()
	sweep(0, "it has not joined")

	n.asks("CreateEndpoint", createEndpoint(""))
	box := nstest.New(t)
	n.asks("Join", about(fmt.Sprintf(`,"SandboxKey":%q`, nstest.Path(t, box))))
	into := func() { nstest.Run(t, n.ns, "ip", "link", "set", id.srcName(), "netns", nstest.Path(t, box)) }
	back := func() { nstest.Run(t, box, "ip", "link", "set", id.srcName(), "netns", nstest.Path(t, n.ns)) }
	into()
	n.ask("Plugin.Activate", "")
	expect.Equal(t, len(n.check()), 1, "it is in a container")
	back()
	n.ask("Plugin.Activate", "")
	expect.Equal(t, len(n.check()), 0)

	// Later versions ask for that before they bring the interfaces of an earlier dockerd back.
	n.asks("CreateEndpoint", createEndpoint(""))
	into()
	n.ask("Plugin.Activate", "")
	back()
	n.asks("CreateEndpoint", another(""))
	expect.Equal(t, len(n.check()), 1)
	n.asks("DeleteNetwork", about(""))
	n.isEmpty()
}

// another is a second endpoint.
func another(more string) string {
	return strings.NewReplacer(endpointID, strings.Repeat("e", 64), "10.9.0.2", "10.9.0.3").Replace(createEndpoint(more))
}

func TestTwoContainersHaveNotOneName(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.asks("CreateNetwork", createNetwork(networkID, ""))
	const web = `,"Options":{"tombolo.name":"web"}`
	n.asks("CreateEndpoint", createEndpoint(web))
	expect.Contains(t, n.ask("NetworkDriver.CreateEndpoint", another(web)).Err, "endpoint fedcba987654")
	expect.Equal(t, len(n.check()), 1)
	n.asks("DeleteEndpoint", about(""))
	n.asks("CreateEndpoint", another(web))
	n.ask("Plugin.Activate", "") // of a dockerd that does not know of it
	n.asks("CreateEndpoint", createEndpoint(web))
	nstest.Run(t, n.ns, "ip", "link", "del", id.srcName()) // with its container
	n.asks("CreateEndpoint", another(web))
	n.asks("DeleteNetwork", about(""))
	n.isEmpty()
}

func TestARestartFollowsWhatAnEarlierDriverHadJoin(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.asks("CreateNetwork", createNetwork(networkID, ""))
	n.asks("CreateEndpoint", createEndpoint(""))
	expect.Equal(t, n.check()[0].Path, "", "the path of a namespace while there is none")
	box := nstest.New(t)
	n.asks("Join", about(fmt.Sprintf(`,"SandboxKey":%q`, nstest.Path(t, box))))
	n.end()
	n.restart()
	nstest.Run(t, n.ns, "ip", "link", "set", id.srcName(), "netns", nstest.Path(t, box))
	nstest.Run(t, box, "sh", "-ec", "ip addr add 10.9.0.2/24 dev "+id.srcName()+"; ip link set "+id.srcName()+" up; ip route add default via 10.9.0.1")
	must.Until(t, "the record is of the container's namespace", func() bool {
		return bytes.Contains(must.Of(json.Marshal(n.check()[0])).Get(t), []byte("netnsCookie"))
	})
}

func TestDockerIsToldWhatCannotBe(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.asks("CreateNetwork", createNetwork(networkID, `,"Options":{"com.docker.network.generic":{"name":"pods"}}`))
	n.asks("CreateEndpoint", createEndpoint(""))
	other := strings.Repeat("a", 64)
	generic := func(options string) string {
		return createNetwork(other, `,"Options":{"com.docker.network.generic":`+options+`}`)
	}
	for _, tt := range []struct{ method, body, want string }{
		{"CreateNetwork", `{`, "read the request"},
		{"CreateNetwork", ``, "an empty one"},
		{"CreateNetwork", `{"NetworkID":"../../../etc/x"}`, "no identifier"},
		{"CreateNetwork", generic(`{"colour":"red"}`), `option "colour" is not known`},
		{"CreateNetwork", generic(`{"mtu":"big"}`), "write a number"},
		{"CreateNetwork", generic(`7`), "option com.docker.network.generic"},
		{"CreateNetwork", generic(`{"name":"pods"}`), "has that name"},
		{"CreateNetwork", generic(`{"stateDir":"/x"}`), "tombolod's own"},
		{"CreateNetwork", generic(`{"mode":"lan","uplink":"eth0","ipv6":"slaac"}`), "--ipam-driver null"},
		{"CreateNetwork", strings.ReplaceAll(generic(`{"mode":"lan","uplink":"eth0"}`), "10.9", "172.18"), "name --ipam-driver null"},
		{"CreateNetwork", createNetwork(other, `,"Options":{"com.docker.network.internal":true,"com.docker.network.generic":{"mode":"l2","bridge":"br9"}}`), `internal is not for mode "l2"`},
		{"CreateNetwork", createNetwork(other, `,"Options":{"com.docker.network.enable_ipv6":true}`), "--ipv6 needs a --subnet"},
		{"CreateNetwork", fmt.Sprintf(`{"NetworkID":%q,"IPv4Data":[{"Pool":"0.0.0.0/0"}]}`, other), "has no subnet"},
		{"CreateNetwork", fmt.Sprintf(`{"NetworkID":%q,"IPv4Data":[{"Pool":"x"}]}`, other), "no '/'"},
		{"CreateEndpoint", fmt.Sprintf(`{"NetworkID":%q,"EndpointID":%q}`, other, other), "docker network rm"},
		{"CreateEndpoint", fmt.Sprintf(`{"NetworkID":%q}`, networkID), "is no identifier"},
		{"CreateEndpoint", fmt.Sprintf(`{"NetworkID":%q,"EndpointID":%q,"Interface":{"Address":"x"}}`, networkID, other), "no '/'"},
		{"CreateEndpoint", another(`,"Options":{"tombolo.nam":"web"}`), "tombolo.nam is not known: tombolo.name is"},
		{"CreateEndpoint", another(`,"Options":{"name":"web"}`), "name is not known: tombolo.name is"},
		{"CreateEndpoint", another(`,"Options":{"tombolo.mtu":"1400"}`), "tombolo.mtu is not known: tombolo.name is, and with tombolo. before it: ingressRate, "},
		{"CreateEndpoint", another(`,"Options":{"tombolo.guard":"yes"}`), `option guard="yes": write a number, true or false`},
		{"CreateEndpoint", another(`,"Options":{"tombolo.guard":true}`), "option tombolo.guard"},
		{"CreateEndpoint", another(`,"Options":{"tombolo.name":"../x"}`), `"../x": it takes up to 63 letters`},
		{"CreateEndpoint", another(`,"Options":{"tombolo.name":""}`), "it takes up to 63 letters"},
		{"Join", fmt.Sprintf(`{"NetworkID":%q,"EndpointID":%q}`, networkID, other), "restart the container"},
		{"ProgramExternalConnectivity", about(`,"Options":{"com.docker.network.portmap":[{"Proto":6,"Port":80}]}`), "name the one port"},
		{"ProgramExternalConnectivity", about(`,"Options":{"com.docker.network.portmap":[{"Proto":6,"Port":80,"HostPort":80,"HostIP":"x"}]}`), "x"},
		{"ProgramExternalConnectivity", about(`,"Options":{"com.docker.network.portmap":[{"Proto":6,"Port":80,"HostPort":80,"HostIP":"::"}]}`), "no address of that family"},
	} {
		a := n.ask("NetworkDriver."+tt.method, tt.body)
		expect.That(t, strings.Contains(a.Err, tt.want), "%s of %s: %q, want %q", tt.method, tt.body, a.Err, tt.want)
	}
	w := httptest.NewRecorder()
	n.ServeHTTP(w, httptest.NewRequest("POST", "/IpamDriver.RequestPool", nil))
	expect.Equal(t, w.Code, 404)
}

// FuzzRequests has Docker say anything: it is answered, and no file is written but below the driver's directories.
func FuzzRequests(f *testing.F) {
	for _, method := range []string{"CreateNetwork", "DeleteNetwork", "CreateEndpoint", "Join", "ProgramExternalConnectivity", "DeleteEndpoint"} {
		f.Add(method, createNetwork(networkID, `,"Options":{"com.docker.network.generic":{"name":"pods","mtu":"1400"},"com.docker.network.internal":true}`))
		f.Add(method, createEndpoint(`,"SandboxKey":"/run/x","Options":{"tombolo.name":"web","com.docker.network.portmap":[{"Proto":6,"Port":80,"HostPort":80}]}`))
	}
	f.Fuzz(func(t *testing.T, method, body string) {
		n := newNode(t)
		n.asks("CreateNetwork", createNetwork(networkID, ""))
		w := httptest.NewRecorder()
		r := httptest.NewRequest("POST", "/x", bytes.NewReader([]byte(body)))
		r.URL.Path = "/NetworkDriver." + method
		must.Succeed(t, n.ns.Do(func() error {
			n.ServeHTTP(w, r)
			return nil
		}))
		must.That(t, json.Valid(w.Body.Bytes()), "answered %q", w.Body)
		entries := must.Of(os.ReadDir(filepath.Dir(n.StateDir))).Get(t)
		for _, e := range entries {
			must.That(t, e.Name() == "state" || e.Name() == "leases" || e.Name() == "docker", "wrote %s", e.Name())
		}
	})
}

// Docker adds a default route only if the container has a way to its gateway.
func TestAContainerHasAWayToAGatewayOutsideOfItsSubnets(t *testing.T) {
	t.Parallel()
	made := &current.Result{IPs: []*current.IPConfig{{Address: net.IPNet{IP: net.IPv4(10, 9, 0, 2), Mask: net.CIDRMask(24, 32)}}}, Routes: []*types.Route{
		{Dst: net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, GW: net.IPv4(169, 254, 1, 1)},
		{Dst: net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}, GW: net.ParseIP("fe80::746f:6d62:6f6c:6f")},
	}}
	a := joinOf(made, "veth0", false)
	want := []staticRoute{{"169.254.1.1/32", 1, ""}, {"fe80::746f:6d62:6f6c:6f/128", 1, ""}}
	expect.That(t, a.Gateway == "169.254.1.1" && slices.Equal(a.StaticRoutes, want), "it has %+v", a)
	a = joinOf(made, "veth0", true)
	expect.That(t, a.GatewayIPv6 == "" && slices.Equal(a.StaticRoutes, want[:1]), "one that hears routers has %+v", a)
}

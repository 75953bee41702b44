package runtimes

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

var (
	lan    = map[string]string{"mode": "lan", "uplink": "eth0"}
	subnet = Subnet{Prefix: nstest.Prefix("10.22.0.0/24"), Gateway: nstest.Addr("10.22.0.1")}
	port   = cni.PortMapping{HostPort: 8080, ContainerPort: 80, Protocol: "tcp"}
)

func with(options map[string]string, more ...string) map[string]string {
	all := maps.Clone(options)
	for i := 0; i < len(more); i += 2 {
		all[more[i]] = more[i+1]
	}
	return all
}

// cases are what runtimes tell. A container is c1 with eth0, and has the name web.
func cases() []struct {
	name string
	of   Network
	c    Container
} {
	own := cni.MACOf("c1/home/eth0").String()
	address := nstest.Prefixes("10.22.0.7/24")
	return []struct {
		name string
		of   Network
		c    Container
	}{
		{"gateway", Network{Bridge: "br7", Subnets: []Subnet{subnet}}, Container{Addresses: address, Ports: []cni.PortMapping{port}}},
		{"gateway by name, on another bridge", Network{Bridge: "br7", Options: map[string]string{"mode": "gateway", "bridge": "br8", "mtu": "1400"}, Subnets: []Subnet{subnet}}, Container{Addresses: address}},
		{"internal", Network{Bridge: "br7", Internal: true, Subnets: []Subnet{subnet}}, Container{Addresses: address}},
		{"internal on the LAN", Network{Options: lan, Internal: true}, Container{}},
		{"a subnet without a gateway", Network{Bridge: "br7", Subnets: []Subnet{{Prefix: subnet.Prefix}}}, Container{Addresses: address}},
		{"two families", Network{Bridge: "br7", Subnets: []Subnet{subnet, {Prefix: nstest.Prefix("fd22::/64"), Gateway: nstest.Addr("fd22::1")}}}, Container{Addresses: nstest.Prefixes("fd22::7/64", "10.22.0.7/24")}},
		{"gateway without a subnet", Network{Bridge: "br7"}, Container{}},
		{"lan", Network{Options: lan}, Container{}},
		{"lan, a name that lasts", Network{Options: lan}, Container{Lasting: true}},
		{"lan, a name that lasts and a MAC", Network{Options: lan}, Container{Lasting: true, MAC: "02:00:00:00:00:77"}},
		{"lan, a MAC", Network{Options: lan}, Container{MAC: "02:00:00:00:00:77"}},
		{"lan, the MAC that the plugin made", Network{Options: lan}, Container{MAC: strings.ToUpper(own)}},
		{"lan, by the pod", Network{Options: with(lan, "ipam.clientID", "pod", "ipam.timeout", "5s")}, Container{MAC: "02:00:00:00:00:77"}},
		{"lan with a subnet", Network{Options: lan, Subnets: []Subnet{subnet}}, Container{Addresses: address}},
		{"lan with a subnet and options of leases", Network{Options: with(lan, "ipam.timeout", "5s"), Subnets: []Subnet{subnet}}, Container{Addresses: address}},
		{"l2", Network{Options: map[string]string{"mode": "l2", "bridge": "br9", "vlan": "7"}}, Container{}},
		{"l2 with options of leases", Network{Options: map[string]string{"mode": "l2", "ipam.timeout": "5s"}}, Container{}},
		{"options of other drivers", Network{Bridge: "br7", Subnets: []Subnet{subnet}, Options: map[string]string{
			"com.docker.network.bridge.name": "br8", "com.docker.network.driver.mtu": "1400", "com.docker.network.bridge.enable_icc": "0",
			"com.docker.network.bridge.enable_ip_masquerade": "False", "no_default_route": "1", "isolate": "true"}}, Container{Addresses: address}},
		{"options of other drivers that change nothing", Network{Bridge: "br7", Subnets: []Subnet{subnet}, Options: map[string]string{
			"com.docker.network.bridge.enable_icc": "true", "com.docker.network.bridge.enable_ip_masquerade": "true", "isolate": "false"}}, Container{Addresses: address}},
		{"options of other drivers without a match", Network{Options: with(lan, "com.docker.network.bridge.host_binding_ipv4", "127.0.0.1",
			"com.docker.network.container_iface_prefix", "net", "isolate", "strict", "metric", "7", "parent", "eth0")}, Container{}},
		{"a container's own options", Network{Options: with(lan, "guard", "true", "ingressRate", "9000")}, Container{Options: map[string]string{"ingressRate": "8000", "lanGuard": "false"}}},
		{"a container's option without any of the network", Network{Bridge: "br7", Subnets: []Subnet{subnet}}, Container{Addresses: address, Options: map[string]string{"guard": "true"}}},
		{"options that are none", Network{Options: with(lan, "ipMasq", "on", "parent", "eth0", "type", "bridge")}, Container{}},
	}
}

func TestConfigurations(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	for _, c := range cases() {
		c.of.Name, c.c.ID, c.c.IfName, c.c.Name = "home", "c1", "eth0", "web"
		conf, err := c.of.configuration(&c.c)
		said := must.Of(json.Marshal(conf)).Get(t)
		fmt.Fprintf(&text, "%s:\n%s\n", c.name, said)
		if err != nil {
			fmt.Fprintf(&text, "error: %v\n", err)
		}
	}
	golden.Compare(t, "configurations.txt", text.String())
}

// Each option is a field of the plugin, which takes it as it is translated.
func TestThePluginTakesEachOption(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	text := map[string]string{
		"mode": "lan", "bridge": "br7", "ingressPolicy": "same-bridge", "forwardMark": "0x2000", "uplink": "eth0", "egressPolicy": "all", "publishFrom": "10.0.0.0/8, eth0 tcp 80",
		"defaultRoute": "router", "ipv6": "slaac", "stateDir": t.TempDir(), "leaseDir": t.TempDir(), "deadline": "5s", "logLevel": "warn",
		"logFile": t.TempDir() + "/log", "ipam.clientID": "pod", "ipam.hostName": "x", "ipam.timeout": "5s", "ipam.keeper": "optional",
		"ipam.servers": "192.0.2.1,192.0.2.2",
	}
	noOptions := strings.Fields(`cniVersion name type capabilities ipam dns cni.dev/valid-attachments runtimeConfig args prevResult internal
		isGateway forceAddress ipMasqBackend promiscMode macspoofchk disableContainerInterface vlanTrunk preserveDefaultVlan
		annotations nonMasqueradeCIDRs ipam.type ipam.request ipam.provide ipam.routes`)
	for prefix, conf := range map[string]reflect.Type{"": reflect.TypeFor[cni.NetConf](), inIPAM: reflect.TypeFor[cni.DHCP]()} {
		for _, f := range reflect.VisibleFields(conf) {
			name := prefix + f.Tag.Get("json")
			_, known := options()[name]
			expect.That(t, name == prefix || known != slices.Contains(noOptions, name),
				"field %s is to be in options (conf.go), or here if networks of Docker and podman do not need it", name)
		}
	}
	for name, isText := range options() {
		value, listed := text[name]
		expect.Equal(t, listed, isText, "%s is listed here", name)
		if !isText {
			value = "false"
			if slices.Contains([]string{"mtu", "vlan", "ipam.priority", "ingressRate", "ingressBurst", "egressRate", "egressBurst"}, name) {
				value = "1000"
			}
		}
		of := Network{Name: "home", Options: with(lan, "stateDir", text["stateDir"], "ingressRate", "9000", "egressRate", "9000", name, value)}
		var err error
		must.Succeed(t, ns.Do(func() error { _, err = of.Call("STATUS", nil); return nil }))
		failure := new(types.Error)
		const unknown, decoding, invalid = 2, 6, 7
		if errors.As(err, &failure) && slices.Contains([]uint{unknown, decoding, invalid}, failure.Code) {
			t.Errorf("%s=%s: %v", name, value, err)
		}
	}
}

package view

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// hostile is what a name of a pod may be, as far as a configuration and a runtime go.
const hostile = "evil/\x1b[31m\u202e\x9b2J<script>&\"'\u00e9\u6f22\xff"

// forge makes a state directory with one network of each kind.
func forge(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	d := must.Of(state.Open(dir)).Get(t)
	prefixes := nstest.Prefixes
	pool, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir + "/ipam", Ranges: []ipam.RangeSet{
		{Ranges: []ipam.Range{
			{Subnet: nstest.Prefix("10.61.0.0/24"), RangeStart: nstest.Addr("10.61.0.10"), RangeEnd: nstest.Addr("10.61.0.19")},
			{Subnet: nstest.Prefix("10.62.0.0/24")}}},
		{Ranges: []ipam.Range{{Subnet: nstest.Prefix("fd61::/64")}}},
	}})
	must.Succeed(t, err)
	for _, n := range []*state.Network{
		{Name: "pods", Bridge: "cbr0", MTU: 1500, Gateways: prefixes("10.61.0.1/24", "fd61::1/64"), Subnets: prefixes("10.61.0.0/24", "fd61::/64"),
			Pools: pool.RangeSets(), Masquerade: true, NonMasquerade: prefixes("10.0.0.0/8"), Policy: nft.Isolated, Guard: true},
		{Name: "earlier", Bridge: "cbr1", MTU: 1450, Gateways: prefixes("10.63.0.1/29"), Subnets: prefixes("10.63.0.0/29")},
		{Name: "fresh", Bridge: "cbr2", MTU: 1500},
		{Name: "delegated", Bridge: "cbr3", MTU: 1500, Subnets: prefixes("10.64.0.0/24")},
		{Name: "home", Bridge: "lan0", MTU: 1500, Uplink: "eth0", DefaultRoute: "router", SLAAC: true, Subnets: prefixes("192.168.1.0/24")},
		{Name: "fixed", Bridge: "cbr0", MTU: 1500, Subnets: prefixes("10.65.0.0/24"), Guard: true, VLAN: vlan.Membership{ID: 100, Trunk: vlan.Ranges{{First: 2, Last: 4}, {First: 101, Last: 101}}}},
	} {
		must.Succeed(t, d.SaveNetwork(n))
	}
	for i, a := range []*state.Attachment{
		{Network: "pods", Pod: "default/web-0", IPAMType: "host-local", Published: []state.Published{
			{Port: nft.Port{Protocol: nft.TCP, HostPort: 8080, PodPort: 80}}, {Port: nft.Port{Protocol: nft.UDP, HostAddr: nstest.Addr("192.0.2.1"), HostPort: 53, PodPort: 5353}}}},
		{Network: "pods", Pod: "default/web-1", IPAMType: "host-local", Published: []state.Published{{Port: nft.Port{Protocol: nft.TCP, HostAddr: nstest.Addr("fd00::1"), HostPort: 443, PodPort: 8443}, Withheld: true}}},
		{Network: "pods", Pod: hostile, IPAMType: "host-local", Published: []state.Published{{Port: nft.Port{Protocol: nft.SCTP, HostPort: 9, PodPort: 9}}}},
		{Network: "earlier", IPAMType: "host-local", DataDir: dir + "/disk"},
		{Network: "delegated", IPAMType: "whereabouts\x1b[m", Pod: "default/db"},
		{Network: "home", IPAMType: "dhcp", Pod: "default/cam"},
		{Network: "fixed", IPAMType: "static", Pod: "default/fix", Guard: nft.GuardMAC},
		{Network: "lost", IPAMType: "host-local", Bridge: "cbr9", Pod: "default/lost"},
	} {
		a.ContainerID, a.IfName = fmt.Sprintf("%016x", i+1), "eth0"
		a.Created = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
		switch a.Network {
		case "pods":
			given := must.Of(pool.Add(t.Context(), ipam.Owner{ContainerID: a.ContainerID, IfName: "eth0"})).Get(t)
			a.Addresses = given.Addresses
		default:
			a.Addresses = []ipam.Address{{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 63, 0, byte(i)}), 29)}}
		}
		pending := must.Of(d.Create(a)).Get(t)
		must.Succeed(t, pending.Commit(a))
	}
	for path, text := range map[string]string{
		"ipam/pods/10.99.0.1": "old\r\neth0", "disk/earlier/10.63.0.3": "c\r\neth0", "ipam/lost/10.63.0.7": "c\r\neth0",
		"attachments/pods/00000000000.json": "", "attachments/pods/00000000001.json": `{"version":9}` + "\n",
		"networks/damaged.json": "{",
	} {
		path = filepath.Join(dir, path)
		must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must.Succeed(t, os.WriteFile(path, []byte(text), 0o600))
	}
	return dir
}

// open gives a node whose records are in a directory.
func open(t *testing.T, dir string) *network.Node {
	t.Helper()
	return must.Of(network.Open(t.Context(), &network.Config{StateDir: dir})).Get(t)
}

func TestNetworksAreAsTheirRecordsHaveThem(t *testing.T) {
	t.Parallel()
	dir := forge(t)
	list, problems, err := Load(t.Context(), open(t, dir), dir, "")
	must.Succeed(t, err)
	text := Networks(list)
	for _, problem := range problems {
		text += "problem: " + strings.ReplaceAll(problem.Error(), dir, "DIR") + "\n"
	}
	golden.Compare(t, "networks.txt", text)
	data := must.Of(json.MarshalIndent(list, "", " ")).Get(t)
	golden.Compare(t, "networks.json", string(data)+"\n")
}

func TestOneNetworkIsAskedForByItsName(t *testing.T) {
	t.Parallel()
	dir := forge(t)
	list, _, err := Load(t.Context(), open(t, dir), dir, "home")
	expect.That(t, err == nil && len(list) == 1 && list[0].Mode == "lan", "%+v, %v", list, err)
	_, _, err = Load(t.Context(), open(t, dir), dir, "hom")
	want := `there is no network "hom": those on record are damaged, delegated, earlier, fixed, fresh, home, lost, pods`
	expect.That(t, err != nil && err.Error() == want, "%v", err)
	empty := t.TempDir()
	if list, problems, err := Load(t.Context(), open(t, empty), empty, ""); err != nil || len(problems) > 0 || Networks(list) != "no network is on record\n" {
		t.Errorf("where there is nothing: %+v, %v, %v", list, problems, err)
	}
}

package uplink

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// detourTable is what nft(8) takes for a detour of eth0.
const detourTable = `table netdev tombolo-uplink-%d {
	chain in {
		type filter hook ingress device "eth0" priority 2147483647; policy accept;
		ether daddr 02:00:0a:00:00:05 ether type ip fwd to "tombo0"
		ether daddr 02:00:0a:00:00:05 ip6 nexthdr != ipv6-icmp ip6 daddr != fe80::/10 fwd to "tombo0"
	}
}
`

func TestNftListsADetourLikeItsOwn(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nstest.Veth(t, ns, "eth0", ns, "tombo0")
	list := func(d detour) string {
		t.Helper()
		return strings.ReplaceAll(nstest.Run(t, ns, "nft", "list", "table", "netdev", d.table()), d.table(), "…")
	}
	theirs, ours := detour{1}, detour{2}
	file := t.TempDir() + "/table"
	if err := os.WriteFile(file, fmt.Appendf(nil, detourTable, theirs.key), 0o600); err != nil {
		t.Fatal(err)
	}
	nstest.Run(t, ns, "nft", "-f", file)
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, &nl.Config{NetNS: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	mac := net.HardwareAddr{2, 0, 0x0a, 0, 0, 5}
	if err := conn.Execute(ours.addTable("eth0", mac, nstest.Index(t, ns, "tombo0"))); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(list(theirs), list(ours)); diff != "" {
		t.Errorf("nft lists (-its own +ours):\n%s", diff)
	}
	if err := conn.Execute(ours.delTable()); err != nil {
		t.Errorf("delete it: %v", err)
	}
	if err := conn.Execute(ours.delTable()); !isGone(err) || !isUnsupported(err) {
		t.Errorf("delete what is not there: %v", err)
	}
	if tables := nstest.Run(t, ns, "nft", "list", "tables"); strings.TrimSpace(tables) != "table netdev "+theirs.table() {
		t.Errorf("tables: %s", tables)
	}
}

// TestBytesOfADetour compares with recorded messages, so that a change of them does not
// go unnoticed where there is no kernel to ask.
func TestBytesOfADetour(t *testing.T) {
	t.Parallel()
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the messages were recorded on a little-endian machine")
	}
	var b strings.Builder
	d := detour{2}
	for _, batch := range []*nl.Batch{d.addTable("eth0", net.HardwareAddr{2, 0, 0x0a, 0, 0, 5}, 7), d.delTable()} {
		for bytes := batch.Bytes(); len(bytes) > 0; {
			n := binary.NativeEndian.Uint32(bytes)
			fmt.Fprintln(&b, hex.EncodeToString(bytes[:n]))
			bytes = bytes[n:]
		}
	}
	want, err := os.ReadFile("testdata/detour.hex")
	if err != nil && os.Getenv("TOMBOLO_RECORD_SEEDS") == "" {
		t.Fatal(err)
	}
	if os.Getenv("TOMBOLO_RECORD_SEEDS") != "" {
		if err := os.WriteFile("testdata/detour.hex", []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("messages (-want +got):\n%s", diff)
	}
}

func TestNamesOfADetour(t *testing.T) {
	t.Parallel()
	for _, key := range []int{1, 2, 1<<31 - 1} {
		d := detour{key}
		for _, name := range []string{d.port(), d.peer()} {
			if !isLinkName(name) {
				t.Errorf("%s is no name for a link", name)
			}
		}
		for _, l := range []Link{
			{Name: d.port(), Kind: "veth", MAC: d.portMAC().String(), Alias: standInAlias}, {Name: d.port(), Kind: "veth", MAC: d.portMAC().String()},
			{Name: d.peer(), Kind: "veth", MAC: d.peerMAC().String(), Alias: standInAlias},
		} {
			if !isStandIn(&l) {
				t.Errorf("%v is not taken for an end of a pair", l)
			}
		}
		for _, l := range []Link{
			{Name: d.port(), Kind: "veth", MAC: d.peerMAC().String()}, {Name: d.port(), Kind: "dummy", MAC: d.portMAC().String()},
			{Name: d.port(), Kind: "veth", MAC: d.portMAC().String(), Alias: "another's"}, {Name: d.port() + "x", Kind: "veth", MAC: d.portMAC().String()},
			{Name: "eth0", Kind: "veth", MAC: d.portMAC().String()}, {Name: portPrefix, Kind: "veth", MAC: d.portMAC().String()},
		} {
			if isStandIn(&l) {
				t.Errorf("%v is taken for an end of a pair", l)
			}
		}
	}
}

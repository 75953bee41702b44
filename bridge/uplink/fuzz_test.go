package uplink

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

func FuzzLink(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		l, err := decodeLink(data)
		if err != nil && !errors.Is(err, nl.ErrMalformed) {
			t.Fatalf("%v is not %v", err, nl.ErrMalformed)
		}
		if err == nil && l.Up() != (l.Flags&unix.IFF_UP != 0) {
			t.Fatal("up or not")
		}
	})
}

// TestRecordSeeds writes what a kernel sends of links.
func TestRecordSeeds(t *testing.T) {
	if os.Getenv("TOMBOLO_RECORD_SEEDS") == "" {
		t.Skip("records only with TOMBOLO_RECORD_SEEDS=1")
	}
	ns := nstest.New(t)
	nstest.Veth(t, ns, "eth0", ns, "peer0")
	for _, args := range [][]string{{"link", "add", "br0", "type", "bridge"}, {"link", "set", "peer0", "master", "br0"},
		{"link", "add", "vx0", "type", "vxlan", "id", "7", "dev", "eth0", "dstport", "4789"}, {"link", "add", "mv0", "link", "eth0", "type", "macvlan"}} {
		nstest.Run(t, ns, "ip", args...)
	}
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	err = conn.Dump("list links", unix.RTM_GETLINK, func(e *nl.Encoder) {
		linkHeader(e, 0)
		e.Uint32(unix.IFLA_EXT_MASK, skipStats)
	}, func(m nl.Message) error {
		l, err := decodeLink(m.Data)
		nstest.SaveCorpus(t, "FuzzLink", l.Name, m.Data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

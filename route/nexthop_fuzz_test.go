package route

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"
)

func FuzzNexthopObject(f *testing.F) {
	seed(f, unix.RTM_NEWNEXTHOP)
	f.Fuzz(func(t *testing.T, data []byte) {
		n, err := decodeNexthop(data)
		if err != nil {
			mustBeMalformed(t, err)
			return
		}
		_ = n.String()
		sent := asked(func(c *Conn) error { return c.AddNexthopObject(n) })
		if sent == nil {
			if !n.Resilient && n.family() != 0 && len(data) < 1<<15 {
				t.Fatalf("%+v cannot be asked for", n)
			}
			return
		}
		mustKeepUnknown(t, data, sent, nhMsgLen)
		again, err := decodeNexthop(sent)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(askableNexthop(n), askableNexthop(again), cmpopts.EquateComparable(n.Gateway), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("read and asked for (-first +again):\n%s", diff)
		}
	})
}

// askableNexthop leaves out what is not sent.
func askableNexthop(n NexthopObject) NexthopObject {
	n.Flags, n.Protocol = 0, n.protocol()
	if len(n.Group) > 0 {
		return NexthopObject{ID: n.ID, Group: n.Group, Protocol: n.Protocol, FDB: n.FDB, OnLink: n.OnLink}
	}
	n.Resilient = false
	if n.Blackhole {
		return NexthopObject{ID: n.ID, Family: n.Family, Blackhole: true, Protocol: n.Protocol, FDB: n.FDB, OnLink: n.OnLink}
	}
	if n.Family != unix.AF_INET && n.Family != unix.AF_INET6 && n.Gateway.IsValid() {
		n.Family = n.family()
	}
	return n
}

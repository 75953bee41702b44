package bridge_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A caller that is killed, or fails, between the request that makes a bridge and the one
// that says whose it is, leaves a bridge that would else pass for somebody else's.
func TestBridgeThatWasMadeByHalvesIsFinishedByTheNext(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	br := bridge.Bridge{Name: "br7", Alias: "mine", MTU: 1400, NoIPv6: true}
	fault := nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 2, Errno: unix.ENOBUFS}
	_, err := faultyConn(t, n, []*nltest.Fault{&fault}, nil).Ensure(t.Context(), br)
	expect.That(t, err != nil, "the fault went unnoticed")
	nltest.MustHaveFired(t, &fault)
	half := must.Of(n.conn.Link(t.Context(), br.Name)).Get(t)
	must.That(t, half.Alias == "" && half.Group != 0, "made by halves: %+v", half)
	l, changed, err := ensure(t, n.conn, br)
	expect.That(t, err == nil && changed && l.Alias == "mine" && l.Group == 0 && l.MTU == 1400 && l.Up,
		"the next Ensure: %+v, changed %t, %v", l, changed, err)
	l, changed, err = ensure(t, n.conn, br)
	expect.That(t, err == nil && !changed, "and once more: %+v, changed %t, %v", l, changed, err)
	// A bridge that somebody else made is left without an alias, in a group too.
	nstest.Run(t, n.ns, "ip", "link", "add", "name", "br8", "type", "bridge")
	nstest.Run(t, n.ns, "ip", "link", "set", "br8", "group", "5")
	theirs := bridge.Bridge{Name: "br8", Alias: "mine"}
	l, _, err = ensure(t, n.conn, theirs)
	expect.That(t, err == nil && l.Alias == "" && l.Group == 5, "somebody else's: %+v, %v", l, err)
}

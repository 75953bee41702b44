package uplink_test

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/network/internal/uplink"
)

func TestSnapshotFindsWhatDependsOnTheNIC(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	run(t, l.host, "link add mv0 link eth0 type macvlan")

	s := must.Of(l.conn.Snapshot(t.Context(), "eth0", "br0")).Get(t)
	if _, err := uplink.PlanOf(s, toBridge()); !errors.Is(err, uplink.ErrRefused) || !strings.Contains(err.Error(), "mv0, of kind macvlan, rests on eth0") {
		t.Errorf("plan: %v", err)
	}
	// It is right to refuse: the kernel does.
	run(t, l.host, "link add br0 type bridge")
	expect.Failure(t, expect.Err(nstest.Try(l.host, "ip", "link", "set", "eth0", "master", "br0")),
		"the kernel makes a NIC with a macvlan a port")
	var j memory
	if _, err := l.conn.Take(t.Context(), toBridge(), &j); !errors.Is(err, uplink.ErrRefused) || j.saves > 0 {
		t.Errorf("take: %v, after %d saves; want %v after none", err, j.saves, uplink.ErrRefused)
	}
}

func TestThereIsNoSnapshotWithoutANIC(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	expect.Is(t, expect.Err(l.conn.Snapshot(t.Context(), "eth7", "br0")), fs.ErrNotExist, "snapshot")
	_, err := l.conn.Take(t.Context(), uplink.Uplink{NIC: "eth7", Bridge: "br0"}, &memory{})
	expect.That(t, errors.Is(err, fs.ErrNotExist), "take: %v, want %v", err, fs.ErrNotExist)
}

// The MTU of a bridge is the lowest of its ports' unless it is pinned. The host's own
// must not follow that of a pod.
func TestAPortWithASmallerMTUDoesNotLowerTheBridges(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	mtus := map[string]string{}
	note := func(when string) {
		shown := strings.Fields(nstest.Run(t, l.host, "ip", "-o", "link", "show", "br0"))
		mtus[when] = shown[slices.Index(shown, "mtu")+1]
	}
	take(t, l, toBridge())
	note("taken")
	run(t, l.host, "link add pod0 mtu 1400 type veth peer name pod1 mtu 1400", "link set pod0 master br0")
	note("with a pod's port")
	expect.NoDiff(t, cmp.Diff(map[string]string{"taken": "1500", "with a pod's port": "1500"}, mtus),
		"the bridge's MTU")
}

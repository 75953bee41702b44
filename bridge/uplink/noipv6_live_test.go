package uplink_test

import (
	"testing"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
)

// test/vm/run.sh noipv6 has a kernel that is like this in truth.
func TestKernelWithoutIPv6TakesANICOver(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	refusal := nltest.NoIPv6()
	nltest.MustHaveFired(t, refusal)
	conn, err := uplink.DialThrough(&uplink.Config{NetNS: l.host}, func(tr nl.Transport) nl.Transport { return nltest.NewFaulty(tr, refusal) })
	must.Succeed(t, err)
	defer conn.Close()
	must.Succeed(t, expect.Err(conn.Take(t.Context(), toBridge(), new(memory))))
	l.mustReach(t, "taken over")
}

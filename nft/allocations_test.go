package nft

import (
	"context"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestAddAndReadyAllocateLittle(t *testing.T) {
	if testing.Short() {
		t.Skip("the race detector, which runs with -short, allocates as well")
	}
	c, _ := dialNew(t)
	n := podnet()
	n.Bridge = "cbr0"
	mustEnsure(t, c, n)
	c.verified.Use("")
	ctx := context.Background()
	ep := pod("fffffffffff", "10.22.255.254")
	got := testing.AllocsPerRun(100, func() {
		ready, err := c.Ready(ctx, n)
		must.That(t, err == nil && ready, "%v %v", ready, err)
		must.Succeed(t, c.Add(ctx, ep))
		must.Succeed(t, c.Remove(ctx, ep))
	})
	limit := 160.0
	expect.That(t, got <= limit, "Ready, Add and Remove allocate %v times, want at most %v", got, limit)
}

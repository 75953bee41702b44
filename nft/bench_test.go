package nft

import (
	"context"
	"fmt"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// benchmarked is a Conn to a namespace where podnet has so many pods.
func benchmarked(b *testing.B, pods int) *Conn {
	b.Helper()
	c, _ := dialNew(b)
	mustEnsure(b, c, podnet())
	must.Succeed(b, c.Replace(context.Background(), bulk(pods)...))
	return c
}

func bulk(n int) []Endpoint {
	eps := make([]Endpoint, n)
	for i := range eps {
		eps[i] = pod(Owner(fmt.Sprintf("%011x", i)), fmt.Sprintf("10.22.%d.%d", i>>8, i&255))
	}
	return eps
}

// pair benchmarks one of two operations, of which the other one undoes the first.
func pair(b *testing.B, timed, untimed func(*Conn, Endpoint) error, timedFirst bool) {
	for _, pods := range []int{0, 1000, 10000} {
		b.Run(fmt.Sprintf("pods=%d", pods), func(b *testing.B) {
			c := benchmarked(b, pods)
			ep := pod("fffffffffff", "10.22.255.254")
			do := func(op func(*Conn, Endpoint) error) {
				must.Succeed(b, op(c, ep))
			}
			b.ReportAllocs()
			for b.Loop() {
				if timedFirst {
					do(timed)
				}
				b.StopTimer()
				do(untimed)
				b.StartTimer()
				if !timedFirst {
					do(timed)
				}
			}
		})
	}
}

func add(c *Conn, ep Endpoint) error    { return c.Add(context.Background(), ep) }
func remove(c *Conn, ep Endpoint) error { return c.Remove(context.Background(), ep) }

func BenchmarkAdd(b *testing.B)    { pair(b, add, remove, true) }
func BenchmarkRemove(b *testing.B) { pair(b, remove, add, false) }

// Where nobody has changed anything since, where others have, and without Trust.
func BenchmarkReady(b *testing.B) {
	for _, tc := range []struct {
		name  string
		cache bool
		stale bool
	}{{"cached", true, false}, {"stale", true, true}, {"uncached", false, false}} {
		for _, pods := range []int{0, 10000} {
			b.Run(fmt.Sprintf("%s/pods=%d", tc.name, pods), func(b *testing.B) {
				c := benchmarked(b, pods)
				n := podnet()
				n.Bridge = "cbr0"
				mustEnsure(b, c, n)
				if tc.cache {
					c.UseCache(Cache{})
				}
				b.ReportAllocs()
				for b.Loop() {
					if tc.stale {
						c.UseCache(Cache{})
					}
					if ready, err := c.Ready(context.Background(), n); err != nil || !ready {
						b.Fatal(ready, err)
					}
				}
			})
		}
	}
}

func TestAddAndReadyAllocateLittle(t *testing.T) {
	if testing.Short() {
		t.Skip("the race detector, which runs with -short, allocates as well")
	}
	c, _ := dialNew(t)
	n := podnet()
	n.Bridge = "cbr0"
	mustEnsure(t, c, n)
	c.UseCache(Cache{})
	ctx := context.Background()
	ep := pod("fffffffffff", "10.22.255.254")
	got := testing.AllocsPerRun(100, func() {
		if ready, err := c.Ready(ctx, n); err != nil || !ready {
			t.Fatal(ready, err)
		}
		must.Succeed(t, c.Add(ctx, ep))
		must.Succeed(t, c.Remove(ctx, ep))
	})
	if limit := 160.0; got > limit {
		t.Errorf("Ready, Add and Remove allocate %v times, want at most %v", got, limit)
	}
}

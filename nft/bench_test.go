package nft

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// benchmarked is a Conn to a namespace where podnet has so many pods.
func benchmarked(b *testing.B, pods int) *Conn {
	b.Helper()
	c, _ := dialNew(b)
	mustEnsure(b, c, podnet())
	if err := c.Replace(context.Background(), bulk(pods)...); err != nil {
		b.Fatal(err)
	}
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
			must := func(op func(*Conn, Endpoint) error) {
				if err := op(c, ep); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				if timedFirst {
					must(timed)
				}
				b.StopTimer()
				must(untimed)
				b.StartTimer()
				if !timedFirst {
					must(timed)
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

func BenchmarkEnsureOfWhatIsThere(b *testing.B) {
	c := benchmarked(b, 0)
	b.ReportAllocs()
	for b.Loop() {
		mustEnsure(b, c, podnet())
	}
}

func BenchmarkEnsureAnew(b *testing.B) {
	c := benchmarked(b, 0)
	for b.Loop() {
		b.StopTimer()
		if err := c.RemoveNetwork(context.Background(), "podnet"); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		mustEnsure(b, c, podnet())
	}
}

func BenchmarkReplaceOfThousand(b *testing.B) {
	eps := bulk(1000)
	for b.Loop() {
		b.StopTimer()
		c := benchmarked(b, 0)
		b.StartTimer()
		if err := c.Replace(context.Background(), eps...); err != nil {
			b.Fatal(err)
		}
	}
}

// Closing waits for what was deleted.
func BenchmarkClose(b *testing.B) {
	for _, after := range []string{"Add", "Remove"} {
		b.Run("after="+after, func(b *testing.B) {
			keeper, ns := dialNew(b)
			mustEnsure(b, keeper, podnet())
			for i := 0; b.Loop(); i++ {
				b.StopTimer()
				c, err := Dial(&Config{NetNS: ns})
				if err != nil {
					b.Fatal(err)
				}
				ep := pod(Owner(fmt.Sprintf("%011x", i)), fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255))
				mustAdd(b, c, ep)
				if after == "Remove" {
					if err := c.Remove(context.Background(), ep); err != nil {
						b.Fatal(err)
					}
				}
				b.StartTimer()
				c.Close()
			}
		})
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
		if err := c.Add(ctx, ep); err != nil {
			t.Fatal(err)
		}
		if err := c.Remove(ctx, ep); err != nil {
			t.Fatal(err)
		}
	})
	if limit := 160.0; got > limit {
		t.Errorf("Ready, Add and Remove allocate %v times, want at most %v", got, limit)
	}
}

// What opens a connection to a published port, and comes back, by how many ports
// there are.
func BenchmarkCallOfPublishedPort(b *testing.B) {
	for _, ports := range []int{1, 1000, 10000} {
		b.Run(fmt.Sprintf("ports=%d", ports), func(b *testing.B) {
			p := newPublished(b, true, tcpAndUDP(Port{HostPort: hostPort, PodPort: podPort})...)
			p.serve(b)
			for i := range ports - 1 {
				ep := publisher(1000+i, tcpPort("", uint16(10000+i)))
				if err := p.c.Add(context.Background(), ep); err != nil {
					b.Fatal(err)
				}
			}
			to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(nstest.Addr(host4), hostPort))
			answer := make([]byte, 64)
			err := p.outside.Do(func() error {
				for b.Loop() {
					// Each from another port: only the first packet of a connection is looked up.
					conn, err := net.DialUDP("udp4", nil, to)
					if err != nil {
						return err
					}
					if _, err := conn.Write([]byte("?")); err != nil {
						return err
					}
					if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
						return err
					}
					if _, err := conn.Read(answer); err != nil {
						return err
					}
					conn.Close()
				}
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
		})
	}
}

func BenchmarkAddWithPorts(b *testing.B) {
	for _, there := range []int{0, 10000} {
		b.Run(fmt.Sprintf("ports=%d", there), func(b *testing.B) {
			c := benchmarked(b, 0)
			for i := range there {
				mustAdd(b, c, publisher(i+1, tcpPort("", uint16(10000+i))))
			}
			ep := publisher(60000, tcpPort("", 8080), tcpPort("192.0.2.1", 8081))
			b.ReportAllocs()
			for b.Loop() {
				mustAdd(b, c, ep)
				b.StopTimer()
				if err := c.Remove(context.Background(), ep); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}

package ipam

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// BenchmarkAdd is New and Add of one attachment, with this many reservations of others there. The cost must not depend on
// their number. It is also the cost of a file system: run it with TMPDIR on a tmpfs for what the default directory costs.
func BenchmarkAdd(b *testing.B) {
	for _, families := range []struct{ name, sets string }{
		{"ipv4", `[{"subnet":"10.0.0.0/8"}]`},
		{"dual", `[{"subnet":"10.0.0.0/8"}],[{"subnet":"fd00::/64"}]`},
	} {
		for _, reserved := range []int{0, 1000, 50000} {
			b.Run(fmt.Sprintf("%s/%d", families.name, reserved), func(b *testing.B) {
				r := benchRequest(b, families.sets, reserved)
				b.ReportAllocs()
				for b.Loop() {
					a, err := r.open()
					must.Succeed(b, err)
					result, err := a.Add(context.Background())
					must.Succeed(b, err)
					b.StopTimer()
					must.Succeed(b, a.Del(context.Background(), resultAddrs(result)))
					b.StartTimer()
				}
			})
		}
	}
}

// BenchmarkDelByHint is the release of one attachment whose addresses are known, likewise.
func BenchmarkDelByHint(b *testing.B) {
	for _, reserved := range []int{0, 1000, 50000} {
		b.Run(fmt.Sprint(reserved), func(b *testing.B) {
			r := benchRequest(b, `[{"subnet":"10.0.0.0/8"}]`, reserved)
			for b.Loop() {
				b.StopTimer()
				a, err := r.open()
				must.Succeed(b, err)
				result, err := a.Add(context.Background())
				must.Succeed(b, err)
				b.StartTimer()
				must.Succeed(b, a.Del(context.Background(), resultAddrs(result)))
			}
		})
	}
}

// benchRequest is a request for a network in which this many addresses are reserved, none of which is the next in turn.
func benchRequest(b *testing.B, sets string, reserved int) *request {
	b.Helper()
	dataDir := b.TempDir()
	dir := filepath.Join(dataDir, "lan")
	must.Succeed(b, os.Mkdir(dir, 0o755))
	for i := range reserved {
		name := filepath.Join(dir, fmt.Sprintf("10.200.%d.%d", i/250, i%250))
		must.Succeed(b, os.WriteFile(name, []byte("0123456789abcdef0123456789abcdef\r\neth0"), 0o600))
	}
	return &request{
		Config: Config{Network: "lan", Dir: dataDir, Ranges: rangesOf(b, sets)},
		Owner:  Owner{ContainerID: "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", IfName: "eth0"},
		Node:   Node{Epoch: Epoch{Token: "bench"}, Hash: hashOf},
	}
}

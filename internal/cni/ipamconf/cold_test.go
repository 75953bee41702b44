package ipamconf

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/ipam"
)

// coldEnv makes the test binary reserve once in the data directory that it names, print the nanoseconds, and exit.
const coldEnv = "IPAM_COLD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(coldEnv); dir != "" {
		os.Exit(coldAdd(dir))
	}
	os.Exit(m.Run())
}

// BenchmarkColdAdd is what a plugin pays: the first New and Add in a fresh process, without the process itself. Run it with
// TMPDIR on a tmpfs.
func BenchmarkColdAdd(b *testing.B) {
	self, err := os.Executable()
	must.Succeed(b, err)
	dir := b.TempDir()
	var total time.Duration
	for b.Loop() {
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), coldEnv+"="+dir)
		out, err := cmd.Output()
		must.Succeed(b, err)
		ns, err := strconv.Atoi(strings.TrimSpace(string(out)))
		must.Succeed(b, err)
		total += time.Duration(ns)
	}
	b.ReportMetric(float64(total.Microseconds())/float64(b.N), "cold-µs/op")
	b.ReportMetric(0, "ns/op")
}

// coldAdd is the child of BenchmarkColdAdd.
func coldAdd(dir string) int {
	r := &Request{
		Type:    "host-local",
		Network: "lan", ContainerID: fmt.Sprintf("pod%d", os.Getpid()), IfName: "eth0", DefaultDataDir: dir, Strict: true,
		Stdin: []byte(ranged(`[{"subnet":"10.0.0.0/8"}]`)),
	}
	start := time.Now()
	a, err := New(r)
	if err == nil {
		_, err = a.Bind(ipam.Node{Epoch: ipam.Epoch{Token: "bench"}}).Add(context.Background(), ipam.Owner{ContainerID: r.ContainerID, IfName: r.IfName})
	}
	took := time.Since(start)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println(took.Nanoseconds())
	return 0
}

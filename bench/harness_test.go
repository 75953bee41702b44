package bench

import (
	"os"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// mostAllocations is how often an ADD and a DEL of one IPv4 pod may allocate, in process:
// what the garbage collector of a program that embeds them has to do. It is 3 % above what
// they do.
const mostAllocations = 1500

func TestAnAddAndItsDelAllocateLittle(t *testing.T) {
	if testing.Short() {
		t.Skip("the race detector, which runs with -short, allocates as well")
	}
	n := newNode(t, inProcess(), ipv4()).warm(t)
	p := n.pod(t)
	got := testing.AllocsPerRun(10, func() {
		p = n.again(p)
		for _, verb := range []string{"ADD", "DEL"} {
			must.Succeed(t, expect.Err(n.call(verb, p)))
		}
	})
	t.Logf("an ADD and its DEL allocate %v times", got)
	expect.That(t, got <= mostAllocations,
		"an ADD and its DEL allocate %v times, want at most %v", got, mostAllocations)
}

// mostMiB is the resident memory that an ADD may have, as the median of so many: the budget of one process, of which
// a node that starts many pods runs as many. A busy machine has a process begin a thread more now and then.
const (
	mostMiB  = 8
	ofSoMany = 5
)

func TestAnAddTakesLittleMemory(t *testing.T) {
	if path, there := peer("peak"); !there {
		must.That(t, os.Getenv("TOMBOLO_PEERS") == "", "%s is missing, which make peers builds", path)
		t.Logf("not measured: %s is missing, which make peers builds", path)
		return
	}
	n := newNode(t, tombolo(), everything()).warm(t)
	n.gauge = true
	var peaks []float64
	for range ofSoMany {
		p := n.pod(t)
		c, err := n.call("ADD", p)
		if err == nil {
			err = n.prove(p)
		}
		must.Succeed(t, err)
		peaks = append(peaks, float64(c.peak)/1024)
		must.Succeed(t, expect.Err(n.call("DEL", p)))
	}
	got := median(peaks)
	expect.That(t, got <= mostMiB && got >= 1, "ADDs of everything have %.1f MiB at their peak, want a median of at most %d", peaks, mostMiB)
}

// TestPodsThatDoNotWorkFailTheirBenchmark has plugins that do less than they say.
func TestPodsThatDoNotWorkFailTheirBenchmark(t *testing.T) {
	t.Parallel()
	n := newNode(t, inProcess(), ipv4())
	p := n.pod(t)
	for result, says := range map[string]string{
		`{}`: "result", `{"cniVersion":"1.1.0"}`: "0 addresses",
		`{"cniVersion":"1.1.0","ips":[{"address":"10.99.0.2/16","gateway":"10.88.0.1"}]}`: "want one of 10.88.0.0/16",
		`{"cniVersion":"1.1.0","ips":[{"address":"10.88.0.2/16","gateway":"10.88.0.9"}]}`: "10.88.0.9, want one of",
	} {
		p.result = []byte(result)
		expect.Says(t, n.prove(p), says, "%s", result)
	}
	nstest.Veth(t, p.ns, podIfname, n.host, "port0")
	got := links(t, p.ns)
	expect.That(t, strings.Join(got, " ") == "eth0 lo", "the pod's links are %v", got)
	n.feature = everything()
	expect.Failure(t, proveLimits(n, p), "a pod without limits was taken for one with them")
}

package containerd

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestAddressesComeFromThePodCIDRs(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cidrs    string
		gateways []string
		ips      []string // of the first pod and the second, one by one
	}{
		"ipv4": {"10.181.7.0/24", []string{"10.181.7.1/24"}, []string{"10.181.7.2", "10.181.7.3"}},
		"ipv6": {"fd18:7::/64", []string{"fd18:7::1/64"}, []string{"fd18:7::2", "fd18:7::3"}},
		"dual": {"10.181.7.0/24,fd18:7::/64", []string{"10.181.7.1/24", "fd18:7::1/64"},
			[]string{"10.181.7.2", "fd18:7::2", "10.181.7.3", "fd18:7::3"}},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			n.setPodCIDRs(c.cidrs)
			a, b := n.runPod("a"), n.runPod("b")
			n.wantGateways(c.gateways...)
			var got []string
			for _, ip := range append(a.ips, b.ips...) {
				got = append(got, ip.String())
			}
			expect.NoDiff(t, cmp.Diff(c.ips, got), "addresses of the pods")
			for i, ip := range a.ips {
				expect.Equal(t, wantAnswer(t, a.ns, "udp", b.at(i)), ip, "a pod sees the other as")
				wantAnswer(t, a.ns, "tcp", a.at(i)) // by its loopback interface
			}
			a.remove()
			for i := range b.ips {
				wantAnswer(t, n.ns, "tcp", b.at(i))
			}
			b.remove()
			n.wantNothing()
		})
	}
}

func TestAnnotationsAndNamesChooseAddresses(t *testing.T) {
	t.Parallel()
	template := string(must.Of(os.ReadFile(templatePath)).Get(t))
	for from, to := range map[string]string{
		`"capabilities": {`:     `"annotations": ["ips"], "capabilities": { "io.kubernetes.cri.pod-annotations": true,`,
		`"type": "host-local",`: `"type": "host-local", "keep": true,`,
	} {
		must.That(t, strings.Contains(template, from), "the template has no %s", from)
		template = strings.Replace(template, from, to, 1)
	}
	path := filepath.Join(t.TempDir(), "template")
	must.Succeed(t, os.WriteFile(path, []byte(template), 0o644))
	n := newNodeOf(t, path)
	n.setPodCIDRs("10.186.7.0/24,fd18:7::/64")
	db := n.runPod("db-0")
	named := n.runPod("named", annotate("tombolo-cni.github.io/ips", "10.186.7.77, fd18:7::77"), annotate("example.com/x", "\x00"))
	expect.Equal(t, fmt.Sprint(named.ips), "[10.186.7.77 fd18:7::77]")
	for key, value := range map[string]string{"ips": "10.186.7.77", "mac": "02:00:5e:00:00:07"} {
		_, err := n.tryPod("thief", annotate("tombolo-cni.github.io/"+key, value))
		expect.That(t, err != nil && strings.Contains(err.Error(), "tombolo-cni.github.io/"+key), "%s: %v", key, err)
	}
	db.remove()
	job, again := n.runPod("job"), n.runPod("db-0")
	expect.Equal(t, fmt.Sprint(again.ips), fmt.Sprint(db.ips), "the pod's addresses after its restart")
	for _, p := range []*pod{named, job, again} {
		p.remove()
	}
	n.wantNothing()
}

func TestPodsComeAndGoAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.setPodCIDRs("10.182.7.0/24,fd18:7::/64")
	const count = 8
	pods := make([]*pod, count)
	inParallel(count, func(i int) error {
		var err error
		pods[i], err = n.tryPod(fmt.Sprintf("pod-%d", i))
		return err
	}).wantNone(t)
	taken := map[netip.Addr]bool{}
	for _, p := range pods {
		p.look()
		for i, ip := range p.ips {
			expect.That(t, !taken[ip], "two pods have %s", ip)
			taken[ip] = true
			wantAnswer(t, n.ns, "tcp", p.at(i))
		}
	}
	inParallel(count, func(i int) error { return pods[i].tryRemove() }).wantNone(t)
	n.wantNothing()
}

// failures are those of calls that ran side by side; nil is a success.
type failures []error

func inParallel(count int, call func(i int) error) failures {
	all := make(failures, count)
	var calls sync.WaitGroup
	for i := range count {
		calls.Go(func() { all[i] = call(i) })
	}
	calls.Wait()
	return all
}

func (f failures) wantNone(t *testing.T) {
	t.Helper()
	must.Succeed(t, errors.Join(f...))
}

// The template's nonMasqueradeCIDRs are kubenet's: 10.0.0.0/8.
func TestPodsAreSeenByTheirOwnAddressInTheClusterAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	n.setPodCIDRs("10.183.7.0/24,fd18:7::/64")
	p := n.runPod("a")
	for _, c := range []struct {
		to, seen string
	}{
		{outside4, uplink4},
		{outside6, uplink6},
		{cluster4, p.ips[0].String()},
	} {
		server := nstest.Serve(t, out, "tcp", hostPort(c.to, 0))
		seen := wantAnswer(t, p.ns, "tcp", server)
		expect.That(t, seen == nstest.Addr(c.seen), "%s sees the pod as %s, want %s", c.to, seen, c.seen)
	}
	p.remove()
	n.wantNothing()
}

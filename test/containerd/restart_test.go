package containerd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestPodsOutliveContainerd(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	n.setPodCIDRs("10.189.7.0/24,fd18:7::/64")
	a := n.runPod("a", publish("tcp", anyPort, ""))
	before, ips := n.traces(), a.ips

	n.tell(killContainerd)
	for i := range a.ips {
		wantAnswer(t, n.ns, "tcp", a.at(i))
	}
	wantAnswer(t, out, "tcp", hostPort(uplink4, anyPort))
	n.tell(startContainerd)
	n.awaitReady()
	await(t, "a network", n.networkReady)

	a.look()
	expect.That(t, slices.Equal(a.ips, ips), "containerd says that the pod has %v, it was given %v", a.ips, ips)
	n.wantTraces(before)
	b := n.runPod("b")
	for i := range b.ips {
		if b.ips[i] == a.ips[i] {
			t.Errorf("two pods have %s", b.ips[i])
		}
		wantAnswer(t, a.ns, "tcp", b.at(i))
	}
	a.remove()
	b.remove()
	n.wantNothing()
}

func TestPodIsRemovedAfterItsNamespaceVanished(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.setPodCIDRs("10.190.7.0/24,fd18:7::/64")
	b := n.runPod("b")
	before := n.traces()
	a := n.runPod("a", publish("tcp", anyPort, ""), annotate("kubernetes.io/egress-bandwidth", "4M"))
	a.vanish()
	a.remove()
	n.wantTraces(before)
	for i := range b.ips {
		wantAnswer(t, n.ns, "tcp", b.at(i))
	}
	b.remove()
	n.wantNothing()
}

func TestHostPortOfAPodThatVanishedIsFree(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	n.setPodCIDRs("10.193.7.0/24,fd18:7::/64")
	gone := n.runPod("gone", publish("tcp", anyPort, ""))
	gone.vanish()
	a := n.runPod("a", publish("tcp", anyPort, ""))
	wantAnswer(t, out, "tcp", hostPort(uplink4, anyPort))
	gone.remove()
	wantAnswer(t, out, "tcp", hostPort(uplink4, anyPort))
	a.remove()
	n.wantNothing()
}

// Kubelets do so: they stop what is left of a pod, as often as they like, start it
// again, and remove the remains long afterwards.
func TestPodIsRestartedAfterItDied(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	n.setPodCIDRs("10.191.7.0/24,fd18:7::/64")
	dead := n.runPod("a", publish("tcp", anyPort, ""))
	dead.kill()
	dead.awaitEnd()
	dead.stop()
	dead.stop()
	n.wantNothing()
	a := n.runPod("a", publish("tcp", anyPort, ""), func(c *runtime.PodSandboxConfig) { c.Metadata.Attempt = 1 })
	before := n.traces()
	dead.remove()
	n.wantTraces(before)
	wantAnswer(t, out, "tcp", hostPort(uplink4, anyPort))
	a.remove()
	n.wantNothing()
}

// containerd adds a pod to the loopback network and to ours side by side. Here the
// former takes until containerd is killed.
func TestPodThatContainerdDiedOverIsRemoved(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.setPodCIDRs("10.192.7.0/24,fd18:7::/64")
	release := n.holdLoopback()
	failed := make(chan error, 1)
	go func() {
		_, err := n.tryPod("a", publish("tcp", anyPort, ""))
		failed <- err
	}()
	await(t, "attachment", func() error {
		if len(failed) > 0 {
			t.Fatalf("containerd was done before it could be killed: %v", <-failed)
		}
		traces := strings.Join(n.traces(), "\n")
		if !strings.Contains(traces, "element of") || !strings.Contains(traces, "link veth") {
			return fmt.Errorf("there is %s", traces)
		}
		return nil
	})
	n.tell(killContainerd)
	must.That(t, <-failed != nil, "containerd was done before it was killed")
	release()
	n.tell(startContainerd)
	n.awaitReady()
	await(t, "a network", n.networkReady)

	ids := n.listPods()
	must.That(t, len(ids) == 1, "containerd knows the pods %v, want one", ids)
	(&pod{node: n, id: ids[0]}).remove()
	n.wantNothing()
	a := n.runPod("a", publish("tcp", anyPort, ""))
	expect.NoDiff(t, cmp.Diff([]string{a.id}, n.listPods()), "pods")
	a.remove()
	n.wantNothing()
}

// holdLoopback makes the node's loopback plugin wait until it is released.
func (n *node) holdLoopback() (release func()) {
	n.Helper()
	plugin := filepath.Join(n.dir, binDirName, "loopback")
	held := filepath.Join(n.dir, "held")
	script := fmt.Sprintf("#!/bin/sh\nwhile [ -e %s ]; do sleep 0.01; done\nexec %s.held\n", held, plugin)
	err := errors.Join(os.Rename(plugin, plugin+".held"), os.WriteFile(plugin, []byte(script), 0o755), os.WriteFile(held, nil, 0o644))
	must.Succeed(n, err)
	return func() {
		n.Helper()
		must.Succeed(n, os.Remove(held))
	}
}

// kill ends the pod's process, as a crash does.
func (p *pod) kill() {
	p.node.Helper()
	p.node.inside("kill", "-KILL", strconv.Itoa(p.pid))
}

// awaitEnd waits until containerd has noticed that the pod has ended.
func (p *pod) awaitEnd() {
	p.node.Helper()
	await(p.node, "end of the pod", func() error {
		if status, _ := p.status(); status.State == runtime.PodSandboxState_SANDBOX_READY {
			return errors.New("containerd says that it runs")
		}
		return nil
	})
}

// vanish ends the pod's process, and its namespace with all that is in it, without a
// word to containerd. The pod cannot be looked into any more.
func (p *pod) vanish() {
	n := p.node
	n.Helper()
	links := n.links()
	must.Succeed(n, p.ns.Close())
	n.inside("umount", "-l", p.netns)
	p.kill()
	// To stop a pod while containerd puts away what has ended fails with "ttrpc: closed", and
	// kubelets try again.
	p.awaitEnd()
	// The kernel takes namespaces down in its own time.
	await(n, "end of the namespace", func() error {
		if now := n.links(); len(now) >= len(links) {
			return fmt.Errorf("the links are still %v", now)
		}
		return nil
	})
}

func (p *pod) stop() {
	p.node.Helper()
	must.Succeed(p.node, p.tryStop())
}

func (n *node) listPods() []string {
	n.Helper()
	ctx, cancel := limited()
	defer cancel()
	r := must.Of(n.runtime.ListPodSandbox(ctx, &runtime.ListPodSandboxRequest{})).Get(n)
	var ids []string
	for _, item := range r.Items {
		ids = append(ids, item.Id)
	}
	return ids
}

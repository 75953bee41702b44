package containerd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// cri is what a kubelet says to containerd.
type cri struct {
	tb      testing.TB
	runtime runtime.RuntimeServiceClient
	images  runtime.ImageServiceClient
}

// dial connects to a containerd, and again after it was restarted.
func dial(t testing.TB, socket string) *cri {
	t.Helper()
	soon := backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.2, MaxDelay: 100 * time.Millisecond}
	conn, err := grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: soon, MinConnectTimeout: time.Minute}))
	must.Succeed(t, err)
	t.Cleanup(func() { conn.Close() })
	return &cri{t, runtime.NewRuntimeServiceClient(conn), runtime.NewImageServiceClient(conn)}
}

// limited bounds one call, so that a test that fails does not hang.
func limited() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), patience)
}

func (c *cri) awaitReady() {
	c.tb.Helper()
	await(c.tb, "containerd", func() error {
		ctx, cancel := limited()
		defer cancel()
		_, err := c.runtime.Status(ctx, &runtime.StatusRequest{})
		return err
	})
}

func (c *cri) hasImage(name string) error {
	ctx, cancel := limited()
	defer cancel()
	r, err := c.images.ImageStatus(ctx, &runtime.ImageStatusRequest{Image: &runtime.ImageSpec{Image: name}})
	if err == nil && r.Image == nil {
		err = errors.New("not there")
	}
	return err
}

func (c *cri) updatePodCIDRs(cidrs string) {
	c.tb.Helper()
	ctx, cancel := limited()
	defer cancel()
	_, err := c.runtime.UpdateRuntimeConfig(ctx, &runtime.UpdateRuntimeConfigRequest{
		RuntimeConfig: &runtime.RuntimeConfig{NetworkConfig: &runtime.NetworkConfig{PodCidr: cidrs}},
	})
	must.Succeed(c.tb, err, "set the pod CIDRs %s", cidrs)
}

// networkReady says whether containerd has read a CNI configuration.
func (c *cri) networkReady() error {
	ctx, cancel := limited()
	defer cancel()
	r, err := c.runtime.Status(ctx, &runtime.StatusRequest{})
	if err != nil {
		return err
	}
	for _, condition := range r.Status.Conditions {
		if condition.Type == runtime.NetworkReady && !condition.Status {
			return fmt.Errorf("%s: %s", condition.Reason, condition.Message)
		}
	}
	return nil
}

// loadedConflist is the configuration that containerd uses for pods.
func (c *cri) loadedConflist() string {
	c.tb.Helper()
	ctx, cancel := limited()
	defer cancel()
	r := must.Of(c.runtime.Status(ctx, &runtime.StatusRequest{Verbose: true})).Get(c.tb)
	var loaded struct {
		Networks []struct{ Config struct{ Source string } }
	}
	if err := json.Unmarshal([]byte(r.Info["cniconfig"]), &loaded); err != nil {
		c.tb.Fatalf("%v: %q", err, r.Info["cniconfig"])
	}
	const loopbackAndOurs = 2
	if len(loaded.Networks) != loopbackAndOurs {
		return ""
	}
	return loaded.Networks[1].Config.Source
}

// pod is a pod sandbox: one process that answers at port 8080.
type pod struct {
	node  *node
	id    string
	ips   []netip.Addr
	ns    *netns.NS
	netns string // the path of its namespace inside the node
	pid   int    // of its process there
}

// podPort is where pods answer.
const podPort = 8080

// option changes what a pod is to be.
type option func(*runtime.PodSandboxConfig)

// publish maps a port of the host, by "tcp" or "udp", to that of the pod.
func publish(network string, hostPort int32, hostIP string) option {
	protocol := runtime.Protocol_TCP
	if network == "udp" {
		protocol = runtime.Protocol_UDP
	}
	return func(c *runtime.PodSandboxConfig) {
		c.PortMappings = append(c.PortMappings, &runtime.PortMapping{
			Protocol: protocol, ContainerPort: podPort, HostPort: hostPort, HostIp: hostIP,
		})
	}
}

func annotate(key, value string) option {
	return func(c *runtime.PodSandboxConfig) { c.Annotations[key] = value }
}

// runPod runs a pod, and waits until it answers the node at all of its addresses.
func (n *node) runPod(name string, options ...option) *pod {
	n.Helper()
	p := must.Of(n.tryPod(name, options...)).Get(n, "run pod %s", name)
	p.look()
	for i := range p.ips {
		wantAnswer(n, n.ns, "tcp", p.at(i))
	}
	return p
}

// tryPod runs a pod, of which only the ID is known then.
func (n *node) tryPod(name string, options ...option) (*pod, error) {
	ctx, cancel := limited()
	defer cancel()
	config := &runtime.PodSandboxConfig{
		Metadata:    &runtime.PodSandboxMetadata{Name: name, Namespace: "tests", Uid: "uid-of-" + name},
		Annotations: map[string]string{},
		Linux:       &runtime.LinuxPodSandboxConfig{CgroupParent: n.cgroup},
	}
	for _, o := range options {
		o(config)
	}
	r, err := n.runtime.RunPodSandbox(ctx, &runtime.RunPodSandboxRequest{Config: config})
	if err != nil {
		return nil, err
	}
	return &pod{node: n, id: r.PodSandboxId}, nil
}

func (p *pod) look() {
	n := p.node
	n.Helper()
	status, info := p.status()
	must.That(n, status.State == runtime.PodSandboxState_SANDBOX_READY,
		"pod %s: %v", status.Metadata.Name, status.State)
	p.ips = nil
	for _, ip := range append([]*runtime.PodIP{{Ip: status.Network.Ip}}, status.Network.AdditionalIps...) {
		p.ips = append(p.ips, nstest.Addr(ip.Ip))
	}
	p.pid = info.PID
	for _, ns := range info.RuntimeSpec.Linux.Namespaces {
		if ns.Type == "network" {
			p.netns = ns.Path
		}
	}
	ns := must.Of(netns.Open(n.path(filepath.Join(netnsDir, p.netnsName())))).Get(n)
	n.Cleanup(func() { ns.Close() })
	p.ns = ns
}

// sandboxInfo is what containerd tells of a sandbox beyond what CRI asks for.
type sandboxInfo struct {
	PID         int
	RuntimeSpec struct {
		Linux struct {
			Namespaces []struct{ Type, Path string }
		}
	}
}

func (p *pod) status() (*runtime.PodSandboxStatus, sandboxInfo) {
	n := p.node
	n.Helper()
	ctx, cancel := limited()
	defer cancel()
	r, err := n.runtime.PodSandboxStatus(ctx, &runtime.PodSandboxStatusRequest{PodSandboxId: p.id, Verbose: true})
	must.Succeed(n, err)
	var info sandboxInfo
	if err := json.Unmarshal([]byte(r.Info["info"]), &info); err != nil {
		n.Fatalf("%v: %s", err, r.Info["info"])
	}
	return r.Status, info
}

func (p *pod) remove() {
	p.node.Helper()
	must.Succeed(p.node, p.tryRemove())
}

func (p *pod) tryStop() error {
	ctx, cancel := limited()
	defer cancel()
	if _, err := p.node.runtime.StopPodSandbox(ctx, &runtime.StopPodSandboxRequest{PodSandboxId: p.id}); err != nil {
		return fmt.Errorf("stop pod: %w", err)
	}
	return nil
}

func (p *pod) tryRemove() error {
	if err := p.tryStop(); err != nil {
		return err
	}
	ctx, cancel := limited()
	defer cancel()
	if _, err := p.node.runtime.RemovePodSandbox(ctx, &runtime.RemovePodSandboxRequest{PodSandboxId: p.id}); err != nil {
		return fmt.Errorf("remove pod: %w", err)
	}
	return nil
}

// at is where the pod answers: by its first address, or its second.
func (p *pod) at(i int) netip.AddrPort { return netip.AddrPortFrom(p.ips[i], podPort) }

// netnsDir is where containerd gives the pods' namespaces their names. It says
// /var/run, a link that leads out of the node when it is followed from outside.
const netnsDir = "/run/netns"

// wantAnswer calls a pod from a namespace until it answers, and gives the address that
// it saw as the caller's: it may still be starting.
func wantAnswer(t testing.TB, from *netns.NS, network string, to netip.AddrPort) netip.Addr {
	t.Helper()
	var seen netip.AddrPort
	await(t, fmt.Sprintf("answer of %s over %s", to, network), func() error {
		var err error
		seen, err = nstest.Ask(t, from, network, to)
		return err
	})
	return seen.Addr()
}

// netnsName is the last part of the name of a pod's namespace.
func (p *pod) netnsName() string { return filepath.Base(p.netns) }

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// attachLoop is the first argument of the process that runs our half of the attach
// scenario. It is a process like floor's, with nothing in it but the loop.
const attachLoop = "attach-loop"

// floorBridge is the bridge that floor -setup makes.
const floorBridge = "floor0"

// loopTimes is what a loop prints, in nanoseconds, one of each a pod.
type loopTimes struct {
	AddNs []int64 `json:"addNs"`
	DelNs []int64 `json:"delNs"`
}

const (
	loopChunk  = 22 // pods of one loop process
	loopWarmUp = 2  // of them not counted
)

// measureAttach compares bridge.Attach and Detach with floor's work in process, on
// bridges that floor made. The loops take turns, a short process each.
func (r *runner) measureAttach(s scenario) error {
	nodes, err := r.nodes(s)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own executable: %w", err)
	}
	for chunk := 0; chunk*(loopChunk-loopWarmUp) < r.rounds; chunk++ {
		for turn := range nodes {
			n := nodes[(chunk+turn)%len(nodes)]
			argv := []string{self, attachLoop}
			if n.contender == floor {
				argv = append([]string{r.binaries.floor(), "-loop"}, floorArgs(s.dual, 0)...)
			}
			times, err := n.loop(argv, chunk)
			if err != nil {
				return fmt.Errorf("%s: %w", n.contender, err)
			}
			for i := range times.AddNs {
				r.report.add(s.name, "attach", n.contender, "ms", milliseconds(time.Duration(times.AddNs[i])))
				r.report.add(s.name, "detach", n.contender, "ms", milliseconds(time.Duration(times.DelNs[i])))
			}
		}
	}
	return nil
}

// loop runs one loop process over fresh namespaces and gives its times without the
// first ones.
func (n *node) loop(argv []string, chunk int) (loopTimes, error) {
	var times loopTimes
	links, err := n.ns.links()
	if err != nil {
		return times, err
	}
	pods, err := n.makePods("chunk-"+strconv.Itoa(chunk), loopChunk)
	if err != nil {
		return times, err
	}
	o, err := n.exec(command{argv: append(argv, pods...)}, run)
	if err != nil {
		return times, err
	}
	if err := json.Unmarshal(o.stdout, &times); err != nil {
		return times, fmt.Errorf("decode the loop's times: %w", err)
	}
	if len(times.AddNs) != loopChunk || len(times.DelNs) != loopChunk {
		return times, fmt.Errorf("the loop gave %d and %d times, want %d", len(times.AddNs), len(times.DelNs), loopChunk)
	}
	times.AddNs, times.DelNs = times.AddNs[loopWarmUp:], times.DelNs[loopWarmUp:]
	return times, proveGone(n, links, pods[loopChunk-1])
}

// attacher is a program that embeds our packages: it holds a connection, and is
// handed open namespaces.
type attacher struct {
	conn *bridge.Conn
	port bridge.Port // less Name
}

// newAttacher is for a bridge in the host's namespace, nil being the caller's.
func newAttacher(host *netns.NS, bridgeName string, subnet netip.Prefix) (*attacher, error) {
	conn, err := bridge.Dial(&bridge.Config{NetNS: host})
	if err != nil {
		return nil, err
	}
	// Who attaches many pods knows the bridge.
	br, _, err := conn.Ensure(context.Background(), bridge.Bridge{Name: bridgeName})
	if err != nil {
		conn.Close()
		return nil, err
	}
	return &attacher{conn: conn, port: bridge.Port{
		Bridge:      bridgeName,
		BridgeIndex: br.Index,
		Peer:        podIfname,
		MTU:         podMTU,
		Addresses:   []netip.Prefix{podAddress(subnet, 0)},
		Routes:      []route.Route{{Gateway: gatewayOf(subnet)}},
	}}, nil
}

// live attaches a pod, calls proof and detaches the pod again. It appends the times
// of both.
func (a *attacher) live(pod *netns.NS, number int, times *loopTimes, proof func() error) error {
	port := a.port
	port.Name = bridge.HostName(networkName, "loop-"+strconv.Itoa(number), podIfname)
	start := time.Now()
	_, err := a.conn.Attach(context.Background(), pod, port)
	times.AddNs = append(times.AddNs, time.Since(start).Nanoseconds())
	if err != nil {
		return err
	}
	if err := proof(); err != nil {
		return err
	}
	start = time.Now()
	err = a.conn.Detach(context.Background(), port.Name, "")
	times.DelNs = append(times.DelNs, time.Since(start).Nanoseconds())
	return err
}

// runAttachLoop is our counterpart of floor -loop: it attaches and detaches one pod
// in each namespace and writes the times. The first, which does not count, has to
// ping its gateway.
func runAttachLoop(paths []string, w io.Writer) error {
	subnet := subnets(false)[0]
	a, err := newAttacher(nil, floorBridge, subnet)
	if err != nil {
		return err
	}
	defer a.conn.Close()
	var times loopTimes
	for i, path := range paths {
		pod, err := netns.Open(path)
		if err != nil {
			return err
		}
		defer pod.Close()
		proof := func() error { return nil }
		if i == 0 {
			proof = func() error { return provePod(path, []netip.Prefix{subnet}) }
		}
		if err := a.live(pod, i, &times, proof); err != nil {
			return err
		}
	}
	return json.NewEncoder(w).Encode(times)
}

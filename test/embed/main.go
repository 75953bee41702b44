// Command embed is a network for pods in some 200 lines: a program that knows
// nothing of CNI and has Tombolo's packages do the work. It plays with namespaces of
// its own, and leaves nothing behind.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "embed:", err)
		os.Exit(1)
	}
}

// run builds a network, attaches two pods, has them ping, and takes them off.
func run(ctx context.Context, out io.Writer) error {
	w, err := newWorld(4)
	if err != nil {
		return err
	}
	defer w.close()
	dir, err := os.MkdirTemp("", "embed")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	node, outside, a, b := w.spaces[0], w.spaces[1], w.spaces[2], w.spaces[3]

	n, err := open(node, dir, "embedded", "pods0", prefix("10.20.0.1/24"), prefix("fd20::1/64"))
	if err != nil {
		return err
	}
	defer n.Close()
	if err := n.build(ctx, node); err != nil {
		return err
	}
	if err := connect(ctx, n.links, node, outside, dir); err != nil {
		return err
	}
	ofA, err := n.attach(ctx, a, "a")
	if err != nil {
		return err
	}
	ofB, err := n.attach(ctx, b, "b")
	if err != nil {
		return err
	}
	for _, to := range []string{"10.20.0.3", "fd20::3", "10.20.0.1", "fd20::1", outside4, outside6} {
		if err := ping(a, netip.MustParseAddr(to)); err != nil {
			return err
		}
		fmt.Fprintf(out, "pod a reaches %s\n", to)
	}
	differences, err := n.check(ctx, "a", ofA)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "pod a is as it was made: %t\n", len(differences) == 0)
	for range 2 { // the second time, they are gone
		if err := errors.Join(n.detach(ctx, "a", ofA), n.detach(ctx, "b", ofB)); err != nil {
			return err
		}
	}
	left, err := n.firewall.Endpoints(ctx, n.name)
	if err != nil {
		return err
	}
	ports, err := n.links.Veths(ctx)
	if err != nil {
		return err
	}
	// The outside has one, on the other bridge.
	fmt.Fprintf(out, "left of the pods: %d elements, %d ports\n", len(left), len(ports)-1)
	return nil
}

// Where the world outside is. It has no way back to pods: it answers the node.
const outside4, outside6 = "192.0.2.2", "2001:db8::2"

// connect gives the node a neighbour, on another bridge.
func connect(ctx context.Context, links *bridge.Conn, node, outside *netns.NS, dir string) error {
	lan, err := open(node, dir, "lan", "lan0", prefix("192.0.2.1/24"), prefix("2001:db8::1/64"))
	if err != nil {
		return err
	}
	defer lan.Close()
	if err := lan.build(ctx, node); err != nil {
		return err
	}
	port := bridge.Port{
		Bridge: "lan0", Name: "outside", Peer: "eth0",
		Addresses: []netip.Prefix{prefix(outside4 + "/24"), prefix(outside6 + "/64")},
	}
	if _, err := links.Attach(ctx, outside, port); err != nil {
		return err
	}
	return noWayBack(ctx, outside)
}

// noWayBack makes sure that only masquerade brings answers to pods.
func noWayBack(ctx context.Context, outside *netns.NS) error {
	routes, err := route.Dial(outside)
	if err != nil {
		return err
	}
	defer routes.Close()
	for _, pod := range []string{"10.20.0.2", "fd20::2"} {
		if r, err := routes.Get(ctx, netip.MustParseAddr(pod)); err == nil {
			return fmt.Errorf("the outside has a route to pods: %s", r)
		}
	}
	return nil
}

// world is a few namespaces of this program's own.
type world struct{ spaces []*netns.NS }

func newWorld(count int) (*world, error) {
	w := &world{}
	for range count {
		ns, err := netns.New()
		if err != nil {
			w.close()
			return nil, err
		}
		w.spaces = append(w.spaces, ns)
	}
	return w, nil
}

func (w *world) close() {
	for _, ns := range w.spaces {
		ns.Close()
	}
}

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/netns"
)

// The network between a node and the machine outside.
var (
	nodeAddresses    = [...]netip.Prefix{netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("2001:db8::1/64")}
	outsideAddresses = [...]netip.Prefix{netip.MustParsePrefix("192.0.2.2/24"), netip.MustParsePrefix("2001:db8::2/64")}
)

// addOutside connects the node with a machine that knows nothing of its pods. In the
// full scenario the node's policy is then to forward nothing, as Docker leaves it: a
// pod's packets get out only if a firewall rule lets them and masquerade brings the
// answers back.
func (n *node) addOutside(path string) error {
	out, err := newNS(path)
	if err != nil {
		return err
	}
	n.outside = &out
	return n.connect(path)
}

// connect puts a veth pair between the node and the outside, which has a path.
func (n *node) connect(path string) error {
	lines := []string{"ip link add up0 type veth peer name up0 netns " + path}
	if n.scenario.full {
		lines = append(lines, "iptables -P FORWARD DROP", "ip6tables -P FORWARD DROP")
	}
	if err := n.tools(n.ns, append(lines, setUp(nodeAddresses)...)...); err != nil {
		return err
	}
	return n.tools(*n.outside, setUp(outsideAddresses)...)
}

func setUp(addresses [2]netip.Prefix) []string {
	return []string{
		"ip link set lo up", "ip link set up0 up",
		"ip address add " + addresses[0].String() + " dev up0",
		"ip address add " + addresses[1].String() + " dev up0 nodad",
	}
}

// tools runs commands, without quotes or spaces in their arguments, in a namespace.
func (n *node) tools(ns namedNS, lines ...string) error {
	for _, line := range lines {
		if _, err := tool(ns, line); err != nil {
			return err
		}
	}
	return nil
}

func tool(ns namedNS, line string) ([]byte, error) {
	argv := strings.Fields(line)
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return nil, err
	}
	var o outcome
	err = ns.Do(func() error {
		var err error
		o, err = run(command{argv: append([]string{path}, argv[1:]...), env: os.Environ()})
		return err
	})
	return o.stdout, err
}

// proveFull shows that a pod of the full scenario has what it asked for, of which
// shapers is how many limits there were before. Floor gives none of that.
func (n *node) proveFull(p *pod, shapers int) error {
	if n.contender == floor {
		return nil
	}
	inside, err := netns.Open(p.path)
	if err != nil {
		return err
	}
	defer inside.Close()
	for _, a := range outsideAddresses {
		if err := ping(inside, a.Addr(), pingLimit); err != nil {
			return fmt.Errorf("through a policy of DROP: %w", err)
		}
	}
	if err := proveHostPort(inside, n.ns.NS, firstPort+p.number); err != nil {
		return err
	}
	now, err := n.shapers()
	if err == nil && now != shapers+2 {
		err = fmt.Errorf("%d limits of %d bit/s before the ADD and %d after, want one each way", shapers, limitRate, now)
	}
	return err
}

// proveHostPort calls the pod by the node's own addresses and the host port. From
// the outside it could not: the reference's firewall plugin lets no calls in.
func proveHostPort(pod, node *netns.NS, port int) error {
	for i, network := range []string{"tcp4", "tcp6"} {
		to := netip.AddrPortFrom(nodeAddresses[i].Addr(), uint16(port))
		if err := callPod(pod, node, network, to); err != nil {
			return fmt.Errorf("host port %s: %w", to, err)
		}
	}
	return nil
}

// callPod listens in the pod, calls from the node, and compares what comes.
func callPod(pod, node *netns.NS, network string, to netip.AddrPort) error {
	const greeting = "from the pod"
	var listener net.Listener
	err := pod.Do(func() error {
		var err error
		listener, err = net.Listen(network, ":"+strconv.Itoa(podPort))
		return err
	})
	if err != nil {
		return err
	}
	greeted := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			_, err = io.WriteString(conn, greeting)
			err = errors.Join(err, conn.Close())
		}
		greeted <- err
	}()
	got, err := readAll(node, network, to)
	if err == nil && got != greeting {
		err = fmt.Errorf("got %q, want %q", got, greeting)
	}
	// Nobody may have called.
	closed := listener.Close()
	if answered := <-greeted; err == nil {
		err = errors.Join(answered, closed)
	}
	return err
}

func readAll(from *netns.NS, network string, to netip.AddrPort) (string, error) {
	var conn net.Conn
	err := from.Do(func() error {
		var err error
		conn, err = net.DialTimeout(network, to.String(), pingLimit)
		return err
	})
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(pingLimit)); err != nil {
		return "", err
	}
	got, err := io.ReadAll(conn)
	return string(got), err
}

// shapers counts the queues of the node that limit to the rate that pods ask for.
func (n *node) shapers() (int, error) {
	out, err := tool(n.ns, "tc -j qdisc show")
	if err != nil {
		return 0, err
	}
	var queues []struct {
		Kind    string `json:"kind"`
		Options struct {
			Rate json.Number `json:"rate"` // in bytes a second
		} `json:"options"`
	}
	if err := json.Unmarshal(out, &queues); err != nil {
		return 0, fmt.Errorf("decode tc's output: %w", err)
	}
	count := 0
	for _, q := range queues {
		if q.Kind == "tbf" && q.Options.Rate.String() == strconv.Itoa(limitRate/8) {
			count++
		}
	}
	return count, nil
}

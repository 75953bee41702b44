package main

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/netns"
)

// What a packet to a host port costs has two parts. Every packet passes the rules
// that forward; only the first of a flow looks for the port. So a round sends, from
// the machine outside, one datagram of a new flow and then more of them.
const (
	flowPackets = 50
	podPorts    = 100 // of the thousand, so many are one pod's: a pipe holds no more
	udpPort     = 9000
)

// patience is how long either end waits for a datagram.
const patience = time.Minute

// portsOf are the host ports of a pod of a number, the last pod having the rest.
func (n *node) portsOf(pod int) []portMapping {
	var list []portMapping
	for i := pod * podPorts; i < min((pod+1)*podPorts, n.scenario.ports); i++ {
		list = append(list, portMapping{HostPort: firstPort + i, ContainerPort: udpPort, Protocol: "udp"})
	}
	return list
}

// measurePorts compares, for each contender, a node that has one host port with a
// node that has many, in turns.
func (r *runner) measurePorts(s scenario) error {
	one := s
	one.ports, one.name = 1, s.name+"/one"
	few, err := r.nodes(one)
	if err != nil {
		return err
	}
	many, err := r.nodes(s)
	if err != nil {
		return err
	}
	var probes []*probe
	for i := range few {
		for _, at := range []struct {
			node   *node
			suffix string
		}{{few[i], " at 1"}, {many[i], ""}} {
			p, err := newProbe(at.node, at.suffix)
			if err != nil {
				return fmt.Errorf("%s: %w", at.node.contender, err)
			}
			defer p.close()
			probes = append(probes, p)
		}
	}
	for round := range s.warmUp() + r.rounds {
		for turn := range probes {
			p := probes[(round+turn)%len(probes)]
			first, next, err := p.flow()
			if err != nil {
				return fmt.Errorf("%s: %w", p.node.contender, err)
			}
			if round >= s.warmUp() {
				r.report.add(s.name, "first"+p.suffix, p.node.contender, "us", first)
				r.report.add(s.name, "packet"+p.suffix, p.node.contender, "us", next)
			}
		}
	}
	for _, n := range many {
		for _, metric := range []string{"first", "packet"} {
			before := r.report.find(s.name, metric+" at 1", n.contender)
			after := r.report.find(s.name, metric, n.contender)
			r.report.add(s.name, metric+" growth", n.contender, times, ratioOf(after.values, before.values).Value)
		}
		r.report.prove("%s of %s: each of %d datagrams came back from the pod", s.name, n.contender,
			2*(s.warmUp()+r.rounds)*(1+flowPackets))
	}
	return nil
}

// probe sends datagrams to a node's last host port, whose pod sends them back.
type probe struct {
	node   *node
	suffix string // of the figures' names
	port   int    // the host port
	pod    *netns.NS
	echo   *echo
}

// newProbe adds the pods of a node and has the last one answer.
func newProbe(n *node, suffix string) (*probe, error) {
	paths, err := n.makePods("ports", (n.scenario.ports+podPorts-1)/podPorts)
	if err != nil {
		return nil, err
	}
	var last *pod
	for _, path := range paths {
		last = n.newPod(path)
		if _, err := n.execute("ADD", last, run); err != nil {
			return nil, err
		}
	}
	p := &probe{node: n, suffix: suffix, port: firstPort + n.scenario.ports - 1}
	if p.pod, err = netns.Open(last.path); err != nil {
		return nil, err
	}
	if p.echo, err = startEcho(p.pod); err != nil {
		return nil, errors.Join(err, p.pod.Close())
	}
	return p, nil
}

func (p *probe) close() {
	p.echo.stop()
	p.pod.Close()
}

// flow times the round trips of a new flow from outside the node, in microseconds:
// that of its first datagram, and the median of the rest.
func (p *probe) flow() (first, next float64, err error) {
	to := netip.AddrPortFrom(nodeAddresses[0].Addr(), uint16(p.port))
	fd, err := udpSocket(p.node.outside.NS)
	if err != nil {
		return 0, 0, err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != nil {
		return 0, 0, fmt.Errorf("connect to %s: %w", to, err)
	}
	var trips []float64
	for i := range 1 + flowPackets {
		took, err := roundTrip(fd, byte(i))
		if err != nil {
			return 0, 0, fmt.Errorf("datagram %d to %s: %w", i, to, err)
		}
		trips = append(trips, float64(took)/float64(time.Microsecond))
	}
	return trips[0], median(trips[1:]), nil
}

// roundTrip sends a datagram over a connected socket and waits for it. The socket
// blocks: the runtime's poller would cost more than the packet does.
func roundTrip(fd int, content byte) (time.Duration, error) {
	var got [2]byte
	start := time.Now()
	if err := retry(func() error { _, err := unix.Write(fd, []byte{content}); return err }); err != nil {
		return 0, err
	}
	var n int
	err := retry(func() error { var err error; n, err = unix.Read(fd, got[:]); return err })
	took := time.Since(start)
	if err == nil && (n != 1 || got[0] != content) {
		err = fmt.Errorf("%v came back for %d", got[:n], content)
	}
	return took, err
}

// retry calls again what a signal interrupted: the Go runtime sends itself some.
func retry(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// echo sends back what comes to the pod's port.
type echo struct {
	fd      int
	stopped atomic.Bool
	done    chan struct{}
}

func startEcho(ns *netns.NS) (*echo, error) {
	fd, err := udpSocket(ns)
	if err != nil {
		return nil, err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: udpPort}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("bind to port %d in the pod: %w", udpPort, err)
	}
	e := &echo{fd: fd, done: make(chan struct{})}
	go e.serve()
	return e, nil
}

func (e *echo) serve() {
	defer close(e.done)
	var content [2]byte
	for !e.stopped.Load() {
		// An error is the end of the patience, or what the sender will complain of.
		n, from, err := unix.Recvfrom(e.fd, content[:], 0)
		if err == nil && from != nil {
			_ = unix.Sendto(e.fd, content[:n], 0, from)
		}
	}
}

// stop ends the server. The kernel refuses to shut down a socket without a peer, and
// wakes its readers all the same.
func (e *echo) stop() {
	e.stopped.Store(true)
	_ = unix.Shutdown(e.fd, unix.SHUT_RDWR)
	<-e.done
	unix.Close(e.fd)
}

// udpSocket is an IPv4 socket in a namespace, which blocks, though not for ever.
func udpSocket(ns *netns.NS) (int, error) {
	fd := -1
	err := ns.Do(func() error {
		var err error
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("set patience of socket: %w", err)
	}
	return fd, nil
}

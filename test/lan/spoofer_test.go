package lan

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/netns"
)

// spoofer is a process of a pod that waits for the pod's interface, brings it up before
// anybody else does, and sends what no pod may, until it is stopped.
type spoofer struct {
	testing.TB
	sent atomic.Int64
	once sync.Once
	came chan struct{} // closed once it has sent something
	stop chan struct{}
	done sync.WaitGroup
}

// spoof has a pod say, as fast as it can, that it is the router: by its own MAC, and by
// nobody's.
func (l *lan) spoof(p *pod) *spoofer {
	s := &spoofer{TB: l, came: make(chan struct{}), stop: make(chan struct{})}
	s.done.Go(func() { expect.Success(l, p.ns.Do(s.run)) })
	return s
}

func (s *spoofer) run() error {
	raw, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(raw)
	control, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(control)
	for {
		select {
		case <-s.stop:
			return nil
		default:
		}
		if own, err := net.InterfaceByName(nic); err == nil && bringUp(control, own) {
			s.flood(raw, own)
		}
		runtime.Gosched() // others have work to do on this processor
	}
}

// bringUp has the interface up, whatever the plugin is at.
func bringUp(control int, own *net.Interface) bool {
	if own.Flags&net.FlagUp != 0 {
		return true
	}
	ifr, err := unix.NewIfreq(own.Name)
	if err != nil || unix.IoctlIfreq(control, unix.SIOCGIFFLAGS, ifr) != nil {
		return false
	}
	ifr.SetUint16(ifr.Uint16() | unix.IFF_UP)
	return unix.IoctlIfreq(control, unix.SIOCSIFFLAGS, ifr) == nil
}

// flood sends a few frames.
func (s *spoofer) flood(raw int, own *net.Interface) {
	for range 10 {
		for _, source := range []net.HardwareAddr{own.HardwareAddr, {2, 0x66, 0x66, 0x66, 0x66, 0x66}} {
			if unix.Sendto(raw, claimOf(source, netip.MustParseAddr(routerIP4)), 0, &unix.SockaddrLinklayer{Ifindex: own.Index}) == nil {
				s.sent.Add(1)
				s.once.Do(func() { close(s.came) })
			}
		}
	}
}

// began waits until it has sent something: a busy machine may not have let it.
func (s *spoofer) began() {
	s.Helper()
	select {
	case <-s.came:
	case <-time.After(patience):
		s.Fatal("the pod has sent nothing")
	}
}

// end stops it, and gives how many frames it has sent.
func (s *spoofer) end() int64 {
	close(s.stop)
	s.done.Wait()
	return s.sent.Load()
}

// spoofed ends each frame of a spoofer's.
const spoofed = "spoofed"

// claimOf is an ARP reply to all by which an address is at a MAC.
func claimOf(mac net.HardwareAddr, address netip.Addr) []byte {
	return bytes.Join([][]byte{
		{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, mac, {0x08, 0x06},
		{0, 1, 8, 0, 6, 4, 0, 2}, mac, address.AsSlice(), make([]byte, 6), address.AsSlice(), []byte(spoofed),
	}, nil)
}

// ear hears what comes in by a link of a machine's, ARP alone unless told otherwise.
type ear struct {
	testing.TB
	fd int
}

func (l *lan) listen(ns *netns.NS, link string) *ear {
	l.Helper()
	return l.listenTo(ns, link, unix.ETH_P_ARP)
}

func (l *lan) listenTo(ns *netns.NS, link string, ethernet uint16) *ear {
	l.Helper()
	e := &ear{TB: l, fd: -1}
	protocol := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, ethernet))
	must.Succeed(l, ns.Do(func() error {
		i, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		if e.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return err
		}
		return unix.Bind(e.fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: i.Index})
	}))
	l.Cleanup(func() { unix.Close(e.fd) })
	return e
}

// spoofs is how many frames of a spoofer's were heard since the last call.
func (e *ear) spoofs() (n int) {
	e.Helper()
	buf := make([]byte, 256)
	for {
		length, _, err := unix.Recvfrom(e.fd, buf, 0)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return n
		case errors.Is(err, unix.EINTR):
		case err != nil:
			e.Fatal(err)
		case bytes.HasSuffix(buf[:length], []byte(spoofed)):
			n++
		}
	}
}

// next waits for a frame.
func (e *ear) next() []byte {
	e.Helper()
	buf := make([]byte, 2048)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(e.fd), Events: unix.POLLIN}}, 1000)
		must.That(e, err == nil || errors.Is(err, unix.EINTR), "%v", err)
		if length, _, err := unix.Recvfrom(e.fd, buf, 0); err == nil {
			return buf[:length]
		}
	}
	e.Fatal("no frame came")
	return nil
}

package nstest

import (
	"encoding/binary"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/netns"
)

// PacketSocket opens a socket that sends and hears frames by a link, with their headers unless kind is
// unix.SOCK_DGRAM: those of a protocol, or all with unix.ETH_P_ALL. A read ends after a wait; 0 means at once.
func PacketSocket(tb testing.TB, ns *netns.NS, link string, kind, protocol int, wait time.Duration) (fd, index int) {
	tb.Helper()
	if wait == 0 {
		kind |= unix.SOCK_NONBLOCK
	}
	must.Succeed(tb, ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, kind|unix.SOCK_CLOEXEC, 0)
		return err
	}))
	tb.Cleanup(func() { unix.Close(fd) })
	index = Index(tb, ns, link)
	number := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, uint16(protocol)))
	must.Succeed(tb, unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: number, Ifindex: index}))
	limit := unix.NsecToTimeval(wait.Nanoseconds())
	must.Succeed(tb, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit))
	return fd, index
}

// SendFrame sends a frame by eth0.
func SendFrame(tb testing.TB, ns *netns.NS, frame []byte) {
	tb.Helper()
	index := Index(tb, ns, "eth0")
	must.Succeed(tb, ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: index})
	}))
}

package lan

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/netns"
)

const (
	// pace is how often a flow sends: often enough that what takes a few milliseconds
	// is seen, and no load for a machine that does other things as well.
	pace = 2 * time.Millisecond
	// room is the size of a receiving socket's buffer: more than a flow sends while a
	// busy machine forgets about its receiver.
	room = 8 << 20
	// messageLen is the length of a datagram's payload, or of a message in a stream,
	// which begin with their number.
	messageLen = 64
)

// flow sends numbered messages from one place to another, until it is stopped.
type flow struct {
	name    string
	tcp     bool
	out, in *os.File // sockets: of the sender, of the receiver

	mu       sync.Mutex
	messages []message // by number
	refused  error     // the last error of sending
	broken   error     // why the receiver ended
}

// message is what became of one.
type message struct {
	sent, came time.Time // zero: it did not
	again      int       // how often it came after that
}

// connect opens the sockets of a flow, over "tcp" or "udp". Each is made on a thread
// that is in its namespace, by system calls: what package net thinks of IPv6 it has
// from the first namespace that it was in.
func connect(t testing.TB, network string, family int, from, to place) *flow {
	t.Helper()
	f := &flow{name: fmt.Sprintf("%s over IPv%d, %s to %s", network, family, from.name, to.name), tcp: network == "tcp"}
	var err error
	if f.tcp {
		f.out, f.in, err = stream(from, to, family)
	} else {
		f.out, f.in, err = datagrams(from, to, family)
	}
	must.Succeed(t, err, "%s", f.name)
	return f
}

func datagrams(from, to place, family int) (out, in *os.File, _ error) {
	outFD, err := socket(from.ns, family, unix.SOCK_DGRAM, from.at(family))
	if err != nil {
		return nil, nil, err
	}
	inFD, err := socket(to.ns, family, unix.SOCK_DGRAM, to.at(family))
	if err != nil {
		return nil, nil, errors.Join(err, unix.Close(outFD))
	}
	outAt, err1 := boundTo(outFD)
	inAt, err2 := boundTo(inFD)
	err = errors.Join(err1, err2, unix.Connect(outFD, sockaddr(inAt)))
	// Where the source is translated on the way, its port is unknown.
	if from.name != masqueraded {
		err = errors.Join(err, unix.Connect(inFD, sockaddr(outAt)))
	}
	// The kernel's own word for when a datagram came, however late it is read.
	err = errors.Join(err, unix.SetsockoptInt(inFD, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1))
	return files(outFD, inFD, err)
}

// masqueraded is the name of a place whose address others do not see.
const masqueraded = "masqueraded pod"

func stream(from, to place, family int) (out, in *os.File, _ error) {
	listener, err := socket(to.ns, family, unix.SOCK_STREAM, to.at(family))
	if err != nil {
		return nil, nil, err
	}
	defer unix.Close(listener)
	at, err := boundTo(listener)
	if err = errors.Join(err, unix.Listen(listener, 1)); err != nil {
		return nil, nil, err
	}
	outFD, err := socket(from.ns, family, unix.SOCK_STREAM, from.at(family))
	if err != nil {
		return nil, nil, err
	}
	// They are blocking as yet, and wait for one another no longer than this.
	patience := unix.Timeval{Sec: 60}
	err = errors.Join(
		unix.SetsockoptTimeval(outFD, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &patience),
		unix.SetsockoptTimeval(listener, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience),
		unix.SetsockoptInt(outFD, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
	)
	if err == nil {
		err = unix.Connect(outFD, sockaddr(at))
	}
	if err != nil {
		return nil, nil, errors.Join(err, unix.Close(outFD))
	}
	inFD, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	if err != nil {
		return nil, nil, errors.Join(err, unix.Close(outFD))
	}
	return files(outFD, inFD, nil)
}

// socket opens a blocking socket with room, bound to an address and any port.
func socket(ns *netns.NS, family, kind int, at netip.Addr) (int, error) {
	domain := unix.AF_INET
	if family == 6 {
		domain = unix.AF_INET6
	}
	fd := -1
	err := ns.Do(func() error {
		var err error
		fd, err = unix.Socket(domain, kind|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	err = unix.Bind(fd, sockaddr(netip.AddrPortFrom(at, 0)))
	if kind == unix.SOCK_DGRAM {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, room))
	}
	if err != nil {
		return -1, errors.Join(fmt.Errorf("bind to %s: %w", at, err), unix.Close(fd))
	}
	return fd, nil
}

// files hands sockets to the runtime's poller, or closes them where something failed.
func files(out, in int, err error) (*os.File, *os.File, error) {
	err = errors.Join(err, unix.SetNonblock(out, true), unix.SetNonblock(in, true))
	if err != nil {
		return nil, nil, errors.Join(err, unix.Close(out), unix.Close(in))
	}
	return os.NewFile(uintptr(out), "sender"), os.NewFile(uintptr(in), "receiver"), nil
}

func sockaddr(at netip.AddrPort) unix.Sockaddr {
	if at.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: at.Addr().As4(), Port: int(at.Port())}
	}
	return &unix.SockaddrInet6{Addr: at.Addr().As16(), Port: int(at.Port())}
}

func boundTo(fd int) (netip.AddrPort, error) {
	name, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}, err
	}
	switch name := name.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(name.Addr), uint16(name.Port)), nil
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(name.Addr), uint16(name.Port)), nil
	}
	return netip.AddrPort{}, fmt.Errorf("a socket is bound to %T", name)
}

// send sends a message now and then until it is told to stop.
func (f *flow) send(stop <-chan struct{}) {
	ticker := time.NewTicker(pace)
	defer ticker.Stop()
	buf := make([]byte, messageLen)
	for number := uint32(0); ; number++ {
		select {
		case <-stop:
			return
		case <-ticker.C:
		}
		binary.BigEndian.PutUint32(buf, number)
		f.mu.Lock()
		f.messages = append(f.messages, message{sent: time.Now()})
		f.mu.Unlock()
		if _, err := f.out.Write(buf); err != nil {
			f.mu.Lock()
			f.refused = err
			f.mu.Unlock()
		}
	}
}

// receive notes what comes, until the socket is closed.
func (f *flow) receive() {
	read := f.readDatagram
	if f.tcp {
		read = f.readStream
	}
	buf := make([]byte, messageLen)
	for {
		when, err := read(buf)
		if err != nil {
			f.mu.Lock()
			f.broken = err
			f.mu.Unlock()
			return
		}
		f.came(binary.BigEndian.Uint32(buf), when)
	}
}

func (f *flow) came(number uint32, when time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if int(number) >= len(f.messages) {
		f.broken = fmt.Errorf("message %d came, and was never sent", number)
		return
	}
	m := &f.messages[number]
	if !m.came.IsZero() {
		m.again++
		return
	}
	m.came = when
}

func (f *flow) readStream(buf []byte) (time.Time, error) {
	_, err := io.ReadFull(f.in, buf)
	return time.Now(), err
}

func (f *flow) readDatagram(buf []byte) (time.Time, error) {
	var control [64]byte
	var n, controlLen int
	raw, err := f.in.SyscallConn()
	if err != nil {
		return time.Time{}, err
	}
	waitErr := raw.Read(func(fd uintptr) bool {
		n, controlLen, _, _, err = unix.Recvmsg(int(fd), buf, control[:], unix.MSG_DONTWAIT)
		return err != unix.EAGAIN
	})
	if err = errors.Join(waitErr, err); err != nil {
		return time.Time{}, err
	}
	if n != len(buf) {
		return time.Time{}, fmt.Errorf("a datagram of %d bytes", n)
	}
	return stamp(control[:controlLen]), nil
}

// stamp reads the time out of a control message; now, where there is none.
func stamp(control []byte) time.Time {
	list, err := unix.ParseSocketControlMessage(control)
	if err != nil || len(list) != 1 || list[0].Header.Type != unix.SCM_TIMESTAMPNS || len(list[0].Data) < 16 {
		return time.Now()
	}
	data := list[0].Data
	return time.Unix(int64(binary.NativeEndian.Uint64(data)), int64(binary.NativeEndian.Uint64(data[8:])))
}

// retransmissions are those of a stream, by both of its ends, that were due. A sender
// guesses that a segment was lost, and on a busy machine, where its answer was late, it
// guesses wrong. The receiver, which has it twice then, says so at once (RFC 2883, a
// duplicate SACK), and that is taken off. It counts until the answer is here.
func (f *flow) retransmissions() (int, error) {
	all, inVain, err := f.sentAgain()
	return max(all-inVain, 0), err
}

// sentAgain counts segments of a stream that either end sent again, and those that the
// other end had already.
func (f *flow) sentAgain() (all, inVain int, _ error) {
	if !f.tcp {
		return 0, 0, nil
	}
	for _, end := range []*os.File{f.out, f.in} {
		raw, err := end.SyscallConn()
		if err != nil {
			return 0, 0, err
		}
		var info *unix.TCPInfo
		controlErr := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
		if err := errors.Join(controlErr, err); err != nil {
			return 0, 0, err
		}
		all, inVain = all+int(info.Total_retrans), inVain+int(info.Dsack_dups)
	}
	return all, inVain, nil
}

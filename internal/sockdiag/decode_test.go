package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/golden"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// message writes struct inet_diag_msg as a kernel would.
func message(family, st uint8, port uint16, local string, attrs []byte) []byte {
	b := make([]byte, msgLen)
	b[0], b[1] = family, st
	binary.BigEndian.PutUint16(b[portOffset:], port)
	copy(b[addrOffset:], nstest.Addr(local).AsSlice())
	binary.NativeEndian.PutUint32(b[inodeOffset:], 4711)
	return append(b, attrs...)
}

// storage writes struct sockaddr_storage.
func storage(addr string) []byte {
	b := make([]byte, storageLen)
	a := nstest.Addr(addr)
	binary.NativeEndian.PutUint16(b, unix.AF_INET)
	at := 4
	if a.Is6() {
		binary.NativeEndian.PutUint16(b, unix.AF_INET6)
		at = 8
	}
	copy(b[at:], a.AsSlice())
	return b
}

// saveSeeds writes some sockets of each state and family as seeds of FuzzSocket.
func saveSeeds(t *testing.T, received [][]byte) {
	saved := map[string]int{}
	for _, datagram := range received {
		for _, m := range nltest.Split(datagram) {
			if m.Header.Type != unix.SOCK_DIAG_BY_FAMILY {
				continue
			}
			name := fmt.Sprintf("kernel-%d-%d", m.Data[0], m.Data[1])
			if saved[name]++; saved[name] <= 2 {
				nstest.SaveCorpus(t, "FuzzSocket", fmt.Sprintf("%s-%d", name, saved[name]), m.Data)
			}
		}
	}
}

func FuzzSocket(f *testing.F) {
	f.Add(message(unix.AF_INET6, stateListen, 80, "::", nltest.Body(nil, func(ae *netlink.AttributeEncoder) {
		ae.Bytes(attrLocals, append(storage("10.0.0.1"), storage("fd00::1")...))
	})))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, proto := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
			list, err := decode(proto, data)
			if err != nil {
				if !errors.Is(err, nl.ErrMalformed) {
					t.Fatalf("%v is not %v", err, nl.ErrMalformed)
				}
				continue
			}
			for _, s := range list {
				checkSocket(t, s)
			}
		}
	})
}

// checkSocket holds a socket to what must be true of any.
func checkSocket(t *testing.T, s Socket) {
	t.Helper()
	if !s.Local.IsValid() || s.Local.Addr().Is4In6() {
		t.Fatalf("a socket at %s", s.Local)
	}
	itself := Want{Proto: s.Proto, Addr: s.Local.Addr(), Port: s.Local.Port()}
	if toAny := (Want{Proto: s.Proto, Port: s.Local.Port()}); s.Takes(itself) != s.Takes(toAny) || s.Takes(toAny) == isForMany(s.Local.Addr()) {
		t.Errorf("%s takes %s: %v, and %s: %v", s, itself, s.Takes(itself), toAny, s.Takes(toAny))
	}
}

func TestMalformedSocketsAreErrors(t *testing.T) {
	t.Parallel()
	good := message(unix.AF_INET, stateListen, 80, "10.0.0.1", nil)
	for name, b := range map[string][]byte{
		"short":                      good[:msgLen-1],
		"of an unknown family":       message(unix.AF_UNIX, stateListen, 80, "10.0.0.1", nil),
		"with half an attribute":     append(good[:msgLen:msgLen], 8, 0),
		"with addresses that do not": append(good[:msgLen:msgLen], nltest.Body(nil, func(ae *netlink.AttributeEncoder) { ae.Bytes(attrLocals, make([]byte, 100)) })...),
		"with an address of nothing": append(good[:msgLen:msgLen], nltest.Body(nil, func(ae *netlink.AttributeEncoder) { ae.Bytes(attrLocals, make([]byte, 128)) })...),
		"with an address of no byte": append(good[:msgLen:msgLen], nltest.Body(nil, func(ae *netlink.AttributeEncoder) {
			ae.Bytes(attrLocals, append([]byte{0xff, 0xff}, make([]byte, 126)...))
		})...),
		"with a flag of two bytes": append(good[:msgLen:msgLen], nltest.Body(nil, func(ae *netlink.AttributeEncoder) { ae.Uint16(attrV6Only, 1) })...),
	} {
		if list, err := decodeReceiver(unix.IPPROTO_TCP, b); !errors.Is(err, nl.ErrMalformed) {
			t.Errorf("%s: %v, %v, want %v", name, list, err, nl.ErrMalformed)
		}
	}
	if list, err := decodeReceiver(unix.IPPROTO_TCP, good); err != nil || len(list) != 1 {
		t.Errorf("%v, %v, want one socket: the cases above have more than one fault", list, err)
	}
}

// TestRequests compares what goes to the kernel with testdata.
func TestRequests(t *testing.T) {
	t.Parallel()
	text := ""
	for _, names := range [][]string{
		{"tcp *:80"}, {"udp 10.0.0.1:80"}, {"tcp [::]:80"}, {"tcp [::ffff:10.0.0.1]:80"}, {"sctp *:80"},
		{"tcp *:81", "tcp 10.0.0.1:80", "tcp 10.0.0.1:81", "udp [fd00::1]:82"}, {"udp *:1", "udp *:2", "udp *:3"}, {},
	} {
		var wants []Want
		for _, name := range names {
			wants = append(wants, wanted(name))
		}
		rec := nltest.Record(nltest.NewFake(nltest.AckAll))
		mustList(t, &Conn{nl: nl.New(rec)}, wants...)
		text += fmt.Sprintf("# %v\n%s", wants, nltest.Text(reqLen, rec.Sent()...))
	}
	golden.Compare(t, "requests.golden", text)
}

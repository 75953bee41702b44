package transport

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// frame6 is a server's message to a client, as it comes from a wire.
func frame6(message string) []byte {
	be := binary.BigEndian
	f := []byte{2, 0, 0, 0, 0, 7, 2, 0, 0, 0, 0, 1, 0x86, 0xdd, 0x60, 0, 0, 0}
	f = be.AppendUint16(f, uint16(udpHeaderLen+len(message)))
	f = append(f, unix.IPPROTO_UDP, 255)
	f = append(f, netip.MustParseAddr("fe80::1").AsSlice()...)
	f = append(f, netip.MustParseAddr("fe80::7").AsSlice()...)
	udp := len(f)
	f = append(f, 2, 35, 2, 34) // ports 547 and 546
	f = be.AppendUint16(f, uint16(udpHeaderLen+len(message)))
	f = append(f, 0, 0)
	f = append(f, message...)
	be.PutUint16(f[udp+6:], ^sum(uint32(sum(unix.IPPROTO_UDP+uint32(len(f)-udp), f[etherLen+8:etherLen+40])), f[udp:]))
	return f
}

func TestAFrameOfIPv6IsReadIfAllOfItIsRight(t *testing.T) {
	t.Parallel()
	const message = "\x07\x01\x02\x03"
	good := frame6(message)
	padded := append(slices.Clone(good), 0, 0, 0)
	for _, f := range [][]byte{good, padded} {
		if got, err := decode6(f); err != nil || string(got) != message {
			t.Errorf("%x: %q, %v", f, got, err)
		}
	}
	for name, c := range map[string]struct {
		at    int
		value byte
	}{
		"IPv4":                  {13, 0},
		"version 4 in it":       {14, 0x45},
		"a length of less":      {19, 11},
		"a length of more":      {19, 13},
		"no length":             {19, 0},
		"a hop-by-hop header":   {20, 0},
		"TCP":                   {20, unix.IPPROTO_TCP},
		"another port":          {57, 35},
		"another length of UDP": {59, 9},
	} {
		f := slices.Clone(good)
		f[c.at] = c.value
		if got, err := decode6(f); err == nil {
			t.Errorf("%s: read %x", name, got)
		}
	}
	for n := range good {
		if got, err := decode6(good[:n]); err == nil {
			t.Errorf("read %x of %d bytes", got, n)
		}
	}
}

// FuzzFrame6 reads what may have come from a wire.
func FuzzFrame6(f *testing.F) {
	f.Fuzz(func(t *testing.T, frame []byte) {
		given := slices.Clone(frame)
		message, err := decode6(frame)
		must.That(t, bytes.Equal(given, frame), "changed what it was given")
		must.That(t, err != nil || bytes.Contains(frame[min(len(frame), etherLen+ip6Len+udpHeaderLen):], message),
			"read %x, which is not in it", message)
	})
}

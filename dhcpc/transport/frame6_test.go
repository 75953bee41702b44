package transport

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
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
	be.PutUint16(f[udp+6:], ^sum(pseudo(f[etherLen+8:etherLen+40], len(f)-udp), f[udp:]))
	return f
}

func TestAFrameOfIPv6IsReadIfAllOfItIsRight(t *testing.T) {
	t.Parallel()
	const message = "\x07\x01\x02\x03"
	good := frame6(message)
	padded := append(slices.Clone(good), 0, 0, 0)
	for _, f := range [][]byte{good, padded} {
		got, err := decode6(f, true)
		expect.That(t, err == nil && string(got) == message, "%x: %q, %v", f, got, err)
	}
	for name, c := range map[string]struct {
		at    int
		value byte
		also  bool // where the checksum is not looked at, too
	}{
		"IPv4":                       {13, 0, true},
		"version 4 in it":            {14, 0x45, true},
		"a length of less":           {19, 11, true},
		"a length of more":           {19, 13, true},
		"no length":                  {19, 0, true},
		"a hop-by-hop header":        {20, 0, true},
		"TCP":                        {20, unix.IPPROTO_TCP, true},
		"another port":               {57, 35, true},
		"another length of UDP":      {59, 9, true},
		"another source":             {37, 9, false},
		"another message":            {63, 9, false},
		"another checksum":           {61, good[61] ^ 1, false},
		"another port of the sender": {55, 9, false},
	} {
		f := slices.Clone(good)
		f[c.at] = c.value
		got, err := decode6(f, true)
		expect.That(t, err != nil, "%s: read %x", name, got)
		_, err = decode6(f, false)
		expect.That(t, (err != nil) == c.also, "%s, checksum still to be computed: %v", name, err)
	}
	for n := range good {
		got, err := decode6(good[:n], false)
		expect.That(t, err != nil, "read %x of %d bytes", got, n)
	}
	none := slices.Clone(good)
	none[60], none[61] = 0, 0
	got, err := decode6(none, true)
	expect.That(t, err != nil, "read %x without a checksum", got)
}

// FuzzFrame6 reads what may have come from a wire.
func FuzzFrame6(f *testing.F) {
	f.Fuzz(func(t *testing.T, frame []byte, complete bool) {
		given := slices.Clone(frame)
		message, err := decode6(frame, complete)
		must.That(t, bytes.Equal(given, frame), "changed what it was given")
		must.That(t, err != nil || bytes.Contains(frame[min(len(frame), etherLen+ip6Len+udpHeaderLen):], message),
			"read %x, which is not in it", message)
	})
}

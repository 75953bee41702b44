package dhcpc

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"
)

// Packet is a DHCP message in UDP over IPv4, or an ARP packet.
type Packet struct {
	// Src and Dst are the ends of the UDP packet. A transport may omit Dst from received packets.
	Src, Dst netip.AddrPort
	// SrcMAC and DstMAC are the ends of the Ethernet frame. In a packet to send, nil leaves them to the transport. In
	// a received one, they are nil if the transport does not know them.
	SrcMAC, DstMAC Hex
	// Payload is the DHCP message.
	Payload []byte
	// ARP is set instead of Src, Dst and Payload.
	ARP *ARP
}

// ARP is an ARP packet (RFC 826) for IPv4 over Ethernet.
type ARP struct {
	Reply                bool
	SenderMAC, TargetMAC Hex // the latter is empty in a request
	SenderIP, TargetIP   netip.Addr
}

// Transport carries messages on one interface, for one goroutine: a *Packet each for a Client, and the bytes of a
// message for DHCPv6. It knows nothing about DHCP's states.
type Transport[M any] interface {
	// Send sends a message. It waits only for room.
	Send(ctx context.Context, message M) error
	// Receive waits for a message for the client's port, or an ARP packet if it can receive them. It may return
	// packets for others. It ends with os.ErrDeadlineExceeded at a time, and with ctx's error as soon as ctx is done.
	Receive(ctx context.Context, until time.Time) (M, error)
	// Close releases the transport's resources.
	Close() error
}

// Hex is a string of bytes. Its text form, in JSON too, is common for hardware addresses and in DHCP servers' lease
// files: 02:00:0a:09:00:02.
type Hex []byte

// String returns the text form, which is empty without any bytes.
func (h Hex) String() string { return net.HardwareAddr(h).String() }

// MarshalText returns the text form.
func (h Hex) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// UnmarshalText parses the text form.
func (h *Hex) UnmarshalText(text []byte) error {
	// Two digits a byte with colons between, so that a text has one meaning.
	b, err := hex.DecodeString(strings.ReplaceAll(string(text), ":", ""))
	if err != nil || !strings.EqualFold(Hex(b).String(), string(text)) {
		return fmt.Errorf("read %q: not bytes in hexadecimal with colons between them", text)
	}
	*h = b
	return nil
}

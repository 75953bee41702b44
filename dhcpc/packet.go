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

// Packet is either a DHCP message in UDP over IPv4, or an ARP packet.
type Packet struct {
	// Src and Dst are the UDP packet's source and destination. A transport may omit Dst in received packets.
	Src, Dst netip.AddrPort
	// SrcMAC and DstMAC are the Ethernet frame's source and destination. In a packet to send, nil lets the transport
	// choose. In a received packet, nil means that the transport does not know the MAC.
	SrcMAC, DstMAC Hex
	// Payload is the DHCP message.
	Payload []byte
	// ARP is the ARP packet, or nil. If it is set, Src, Dst and Payload are not.
	ARP *ARP
}

// ARP is an ARP packet (RFC 826) for IPv4 over Ethernet.
type ARP struct {
	Reply                bool
	SenderMAC, TargetMAC Hex // the latter is empty in a request
	SenderIP, TargetIP   netip.Addr
}

// Transport carries messages on one interface, for one goroutine. A Client uses messages of type *Packet. DHCPv6 uses
// the message's bytes. A Transport knows nothing about DHCP's states.
type Transport[M any] interface {
	// Send sends a message. It blocks only while the socket's buffer is full.
	Send(ctx context.Context, message M) error
	// Receive waits for a message to the client's port, or for an ARP packet if the transport supports ARP. It may
	// return packets for other clients. When the given time has come, it returns os.ErrDeadlineExceeded. As soon as
	// ctx is done, it returns ctx's error.
	Receive(ctx context.Context, until time.Time) (M, error)
	// Close releases the transport's resources.
	Close() error
}

// Hex is a string of bytes. Its text form, also in JSON, is common for hardware addresses and in the lease files of
// DHCP servers: 02:00:0a:09:00:02.
type Hex []byte

// String returns the text form. It is empty if h has no bytes.
func (h Hex) String() string { return net.HardwareAddr(h).String() }

// MarshalText returns the text form.
func (h Hex) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// UnmarshalText parses the text form, and returns an error for any other form.
func (h *Hex) UnmarshalText(text []byte) error {
	// Accept only two digits a byte with colons between them, so that equal bytes have equal texts.
	b, err := hex.DecodeString(strings.ReplaceAll(string(text), ":", ""))
	if err != nil || !strings.EqualFold(Hex(b).String(), string(text)) {
		return fmt.Errorf("read %q: not bytes in hexadecimal with colons between them", text)
	}
	*h = b
	return nil
}

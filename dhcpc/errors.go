package dhcpc

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/dhcpc/internal/trace"
)

// Causes to branch on with errors.Is.
var (
	// ErrTimeout: no lease came in time. The error around it says what was sent and
	// heard, and matches ErrNAK, ErrDeclined or ErrRefused too if that is what happened on the way.
	ErrTimeout = trace.ErrTimeout
	// ErrNAK: a server refused the address that was asked for.
	ErrNAK = errors.New("server refused the address")
	// ErrDeclined: the address was in use by another host and was declined.
	ErrDeclined = errors.New("address is in use by another host")
	// ErrRefused: a server granted an address that Config.Refuse does not take, and that
	// was declined.
	ErrRefused = errors.New("address not taken")
	// ErrExpired: a lease ran out before any server renewed it.
	ErrExpired = errors.New("lease expired")
)

// describe names a message as a trace does: "OFFER of 192.0.2.9 from 192.0.2.1".
func describe(m *message) string {
	s := m.MessageType().String()
	if m.MessageType() == dhcpv4.MessageTypeNone {
		s = "message of no type"
	}
	if m.address.IsValid() && !m.address.IsUnspecified() {
		s += " of " + m.address.String()
	}
	if from := m.sender(); from.IsValid() {
		s += " from " + from.String()
	}
	return s
}

// refusal is the error of a NAK.
func refusal(m *message, asked netip.Addr) error {
	err := fmt.Errorf("%w %s: NAK from %s", ErrNAK, asked, m.sender())
	if text := trace.Printable(m.Message()); text != "" {
		err = fmt.Errorf("%w: %q", err, text)
	}
	return err
}

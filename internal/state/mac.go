package state

import (
	"fmt"
	"net"
)

// MAC is a net.HardwareAddr of Ethernet's, as text "02:00:00:00:00:01".
type MAC net.HardwareAddr

// String is that of net.HardwareAddr.
func (m MAC) String() string { return net.HardwareAddr(m).String() }

// MarshalText gives what String does.
func (m MAC) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText reads what String gives.
func (m *MAC) UnmarshalText(text []byte) error {
	mac, err := net.ParseMAC(string(text))
	if err == nil && len(mac) != 6 {
		err = fmt.Errorf("a MAC of %d bytes", len(mac))
	}
	*m = MAC(mac)
	return err
}

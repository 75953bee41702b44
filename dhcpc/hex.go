package dhcpc

import (
	"encoding/hex"
	"fmt"
	"net"
	"strings"

	"github.com/tombolo-cni/tombolo/dhcpc/internal/trace"
)

// Hex is a string of bytes whose text form, in JSON too, is that of hardware
// addresses and of DHCP servers' lease files: 02:00:0a:09:00:02.
type Hex []byte

// String gives the text form; it is empty where there are no bytes.
func (h Hex) String() string { return net.HardwareAddr(h).String() }

// MarshalText gives the text form.
func (h Hex) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// UnmarshalText reads the text form.
func (h *Hex) UnmarshalText(text []byte) error {
	if h == nil {
		return trace.Argument("nothing to read it into")
	}
	// Two digits a byte with colons between, so that a text has one reading.
	b, err := hex.DecodeString(strings.ReplaceAll(string(text), ":", ""))
	if err != nil || !strings.EqualFold(Hex(b).String(), string(text)) {
		return fmt.Errorf("read %q: not bytes in hexadecimal with colons between them", text)
	}
	*h = b
	return nil
}

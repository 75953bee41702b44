package lease

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/file"
)

// ClientID reads how an operator names the identity of a DHCP client: "mac" is the MAC
// address as a client identifier (RFC 2132, section 9.14), "none" that the client sends
// none, and anything else is the identifier in hexadecimal, with colons or without.
func ClientID(text string, mac net.HardwareAddr) (dhcpc.Hex, error) {
	const ethernet = 1
	switch text {
	case "mac":
		return append(dhcpc.Hex{ethernet}, mac...), nil
	case "none":
		return nil, nil
	}
	id, err := hex.DecodeString(strings.ReplaceAll(text, ":", ""))
	if err != nil || len(id) < 2 || len(id) > 255 {
		return nil, fmt.Errorf("client identifier %q: want mac, none, or 2 to 255 bytes in hexadecimal", text)
	}
	return id, nil
}

// Networkd gives the address that systemd-networkd leased for a link, by its index, and the
// client identifier that it did so with. It is false where networkd says nothing of them.
// root is the directory that /run is in; empty is /.
func Networkd(root string, index int) (netip.Addr, dhcpc.Hex, bool) {
	data, err := file.Read(filepath.Join("/", root, "run/systemd/netif/leases", strconv.Itoa(index)), file.MaxRecord)
	if err != nil {
		return netip.Addr{}, nil, false
	}
	return readNetworkd(bytes.TrimSpace(data))
}

func readNetworkd(data []byte) (netip.Addr, dhcpc.Hex, bool) {
	read := readKeys
	if bytes.HasPrefix(data, []byte("{")) {
		read = readObject
	}
	address, id := read(data)
	return address, id, address.Is4() && len(id) >= 2 && len(id) <= 255
}

// readKeys reads lines KEY=value.
func readKeys(data []byte) (address netip.Addr, id []byte) {
	for line := range strings.Lines(string(data)) {
		switch key, value, _ := strings.Cut(strings.TrimSpace(line), "="); key {
		case "ADDRESS":
			address, _ = netip.ParseAddr(value)
		case "CLIENTID":
			id, _ = hex.DecodeString(value)
		}
	}
	return address, id
}

// readObject reads the JSON object of the newest versions, in which bytes are numbers.
func readObject(data []byte) (netip.Addr, []byte) {
	var doc struct {
		Address []uint16
		ID      []uint16 `json:"Client_Id"`
	}
	if json.Unmarshal(data, &doc) != nil {
		return netip.Addr{}, nil
	}
	address, _ := netip.AddrFromSlice(octets(doc.Address))
	return address, octets(doc.ID)
}

// octets is nil where a number is none of a byte.
func octets(list []uint16) []byte {
	var b []byte
	for _, n := range list {
		if n > 255 {
			return nil
		}
		b = append(b, byte(n))
	}
	return b
}

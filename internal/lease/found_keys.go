package lease

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
)

// parseKeys reads a lease file of systemd-networkd (/run/systemd/netif/leases/<index>):
// lines KEY=value, with times in seconds up to version 253 and in words ("1h 30min") from
// then on, or the JSON object of the newest versions. It is nil where no address is told.
//
//	ADDRESS=10.9.0.32
//	NETMASK=255.255.255.0
//	ROUTER=10.9.0.1
//	SERVER_ADDRESS=10.9.0.1
//	T1=1800
//	CLASSLESS_ROUTES=10.5.0.0/16,10.9.0.2 0.0.0.0/0,10.9.0.1
//	CLIENTID=ff731a04cb00020000ab110033bdebf95e192c
//
// The client identifier is whole: ff, the IAID in 4 bytes and the DUID (RFC 4361), unless
// ClientIdentifier=mac is set.
func parseKeys(data []byte) *found {
	if trimmed := bytes.TrimSpace(data); len(trimmed) > 0 && trimmed[0] == '{' {
		return parseJSON(trimmed)
	}
	f := &found{}
	routes := map[string][]dhcpc.Route{}
	for line := range strings.Lines(string(data)) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if !ok || strings.HasPrefix(key, "#") {
			continue
		}
		value = strings.Trim(value, `"'`)
		switch key {
		case "ADDRESS":
			f.address = parseAddr(value)
		case "SERVER_ADDRESS":
			f.server = parseAddr(value)
		case "ROUTER":
			f.routers = parseAddrs(value)
		case "DNS":
			f.dns = parseAddrs(value)
		case "T1":
			f.renew = parseSpan(value)
		case "T2":
			f.rebind = parseSpan(value)
		case "LIFETIME":
			f.lifetime = parseSpan(value)
		case "DOMAINNAME":
			f.domain = value
		case "HOSTNAME":
			f.hostName = value
		case "MTU":
			f.setMTU(value)
		case "CLIENTID":
			id, err := hex.DecodeString(value)
			f.identify(id, err == nil)
		case "CLASSLESS_ROUTES", "ROUTES", "STATIC_ROUTES":
			routes[key] = parseRoutes(value)
		}
	}
	// Option 121 stands in for 3 and 33 (RFC 3442); ROUTES, before version 250, are those
	// of either.
	f.routes = routes["CLASSLESS_ROUTES"]
	if f.routes == nil {
		f.routes = append(routes["ROUTES"], routes["STATIC_ROUTES"]...)
		f.router()
	}
	return f.usable()
}

// parseNetworkManager reads one of NetworkManager's own client, which has the form of
// parseKeys and, from version 1.20 on, nothing in it but the address. The identifier is
// the MAC address there, unless the connection says otherwise.
func parseNetworkManager(data []byte) *found {
	f := parseKeys(data)
	if f != nil {
		f.usesMAC = true
	}
	return f
}

// identify takes a client identifier, if it can be one.
func (f *found) identify(id []byte, ok bool) {
	if ok && len(id) >= 2 && len(id) <= 255 {
		f.clientID, f.identified = id, true
	}
}

func (f *found) setMTU(value string) {
	if n, err := strconv.ParseUint(value, 10, 16); err == nil {
		f.mtu = int(n)
	}
}

// usable is nil where a host cannot have the address, and drops what a record cannot
// hold.
func (f *found) usable() *found {
	if !f.address.Is4() || f.address.IsLoopback() || f.address.As4()[0] == 0 || f.address.As4()[0] >= 224 {
		return nil
	}
	if !f.server.Is4() || !f.server.IsGlobalUnicast() {
		f.server = netip.Addr{}
	}
	if !isText(f.hostName) {
		f.hostName = ""
	}
	if !isText(f.domain) {
		f.domain = ""
	}
	f.routes, f.routers, f.dns = f.routes[:min(len(f.routes), maxListed)], f.routers[:min(len(f.routers), maxListed)], f.dns[:min(len(f.dns), maxListed)]
	return f
}

// maxListed is more than an option's 255 bytes hold of routes or addresses.
const maxListed = 64

// isText accepts what a name may be.
func isText(s string) bool {
	return len(s) <= 255 && !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}

// parseAddr is invalid for what is no IPv4 address.
func parseAddr(s string) netip.Addr {
	a, err := netip.ParseAddr(strings.TrimSpace(s))
	if err != nil || !a.Is4() {
		return netip.Addr{}
	}
	return a
}

// parseAddrs reads addresses with spaces or commas between them, and leaves out what is
// none.
func parseAddrs(s string) []netip.Addr {
	var list []netip.Addr
	for _, word := range strings.FieldsFunc(s, func(r rune) bool { return r == ' ' || r == ',' || r == '\t' }) {
		if a := parseAddr(word); a.IsValid() {
			list = append(list, a)
		}
	}
	return list
}

// parseRoutes reads "10.5.0.0/16,10.9.0.2 0.0.0.0/0,10.9.0.1". Wrong items are left out.
func parseRoutes(s string) []dhcpc.Route {
	var list []dhcpc.Route
	for _, word := range strings.Fields(s) {
		dst, via, _ := strings.Cut(word, ",")
		prefix, err := netip.ParsePrefix(dst)
		if err != nil {
			continue
		}
		if r, ok := routeOf(prefix, parseAddr(via)); ok {
			list = append(list, r)
		}
	}
	return list
}

// routeOf makes a route of what a file says; via 0.0.0.0 is on link.
func routeOf(dst netip.Prefix, via netip.Addr) (dhcpc.Route, bool) {
	if !dst.IsValid() || !dst.Addr().Is4() {
		return dhcpc.Route{}, false
	}
	r := dhcpc.Route{Dst: dst.Masked()}
	if via.Is4() && !via.IsUnspecified() {
		r.Via = via
	}
	return r, true
}

// parseSpan reads a time as systemd writes it: seconds, or numbers with units. It is 0 for
// what it cannot read.
func parseSpan(s string) time.Duration {
	s = strings.TrimSpace(s)
	if s == "infinity" {
		return forever
	}
	const second, day = uint64(1), uint64(24 * 3600)
	units := map[string]uint64{
		"": second, "s": second, "sec": second, "min": 60, "m": 60, "h": 3600, "hr": 3600, "d": day, "w": 7 * day,
		// Those of systemd.time(7): 30.44 and 365.25 days.
		"month": 2629800, "M": 2629800, "y": 31557600,
	}
	var total uint64
	for _, word := range strings.Fields(s) {
		digits := strings.TrimRight(word, "abcdefghijklmnopqrstuvwxyzM")
		n, err := strconv.ParseUint(digits, 10, 32)
		unit, known := units[word[len(digits):]]
		if err != nil || !known {
			return 0
		}
		total += n * unit
	}
	return seconds(total)
}

// seconds is a lifetime of DHCP: 32 bits, of which the largest number is for ever.
func seconds(n uint64) time.Duration {
	if n >= 1<<32-1 {
		return forever
	}
	return time.Duration(n) * time.Second
}

// parseJSON reads the object that the newest versions of systemd-networkd write. An
// address in it is an array of bytes.
func parseJSON(data []byte) *found {
	var doc struct {
		Address          jsonAddr
		Server           jsonAddr `json:"Server_Address"`
		Router           []jsonAddr
		T1, T2, Lifetime string
		Hostname         string
		Domain           string `json:"Domain_Name"`
		MTU              int
		ID               []int       `json:"Client_Id"` // a []byte would be base64
		Classless        []jsonRoute `json:"Classless_Routes"`
		Static           []jsonRoute `json:"Static_Routes"`
		Servers          struct{ DNS []jsonAddr }
	}
	if err := json.Unmarshal(data, &doc); err != nil {
		return nil
	}
	f := &found{
		address: doc.Address.Addr, server: doc.Server.Addr, renew: parseSpan(doc.T1), rebind: parseSpan(doc.T2), lifetime: parseSpan(doc.Lifetime),
		domain: doc.Domain, hostName: doc.Hostname, routers: addrs(doc.Router), dns: addrs(doc.Servers.DNS),
	}
	if doc.MTU > 0 && doc.MTU < 1<<16 {
		f.mtu = doc.MTU
	}
	id := make([]byte, len(doc.ID))
	fits := true
	for i, n := range doc.ID {
		id[i], fits = byte(n), fits && n >= 0 && n < 256
	}
	f.identify(id, fits)
	f.routes = jsonRoutes(doc.Classless)
	if f.routes == nil {
		f.routes = jsonRoutes(doc.Static)
		f.router()
	}
	return f.usable()
}

// jsonAddr is an address as an array of four bytes, or as text. Anything else is
// invalid, and no error.
type jsonAddr struct{ netip.Addr }

// UnmarshalJSON reads either form.
func (a *jsonAddr) UnmarshalJSON(data []byte) error {
	var text string
	var list []uint16
	switch {
	case json.Unmarshal(data, &text) == nil:
		a.Addr = parseAddr(text)
	case json.Unmarshal(data, &list) == nil && len(list) == 4:
		var b [4]byte
		for i, n := range list {
			if n > 255 {
				return nil
			}
			b[i] = byte(n)
		}
		a.Addr = netip.AddrFrom4(b)
	}
	return nil
}

func addrs(list []jsonAddr) []netip.Addr {
	var out []netip.Addr
	for _, a := range list {
		if a.IsValid() {
			out = append(out, a.Addr)
		}
	}
	return out
}

type jsonRoute struct {
	Destination, Gateway jsonAddr
	Length               int `json:"DestinationPrefixLength"`
}

func jsonRoutes(list []jsonRoute) []dhcpc.Route {
	var out []dhcpc.Route
	for _, one := range list {
		if !one.Destination.IsValid() {
			continue
		}
		if r, ok := routeOf(netip.PrefixFrom(one.Destination.Addr, one.Length), one.Gateway.Addr); ok {
			out = append(out, r)
		}
	}
	return out
}

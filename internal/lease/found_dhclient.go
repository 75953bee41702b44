package lease

import (
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
)

// parseDhclient reads dhclient's leases for a NIC (dhclient.leases(5)), in the order of the
// file: the last one is in force.
//
//	lease {
//	  interface "eth0";
//	  fixed-address 10.9.0.32;
//	  option subnet-mask 255.255.255.0;
//	  option routers 10.9.0.1;
//	  option dhcp-lease-time 3600;
//	  option dhcp-server-identifier 10.9.0.1;
//	  option dhcp-client-identifier 1:2:0:0:0:0:9;
//	  renew 0 2026/03/01 12:30:00;
//	  rebind 0 2026/03/01 12:52:30;
//	  expire 0 2026/03/01 13:00:00;
//	}
//
// A client identifier is told only where the server sent it back (RFC 6842): that none is
// told does not mean that none was sent.
func parseDhclient(data []byte, nic string) []*found {
	var all []*found
	var block *dhclientLease
	for _, words := range statements(string(data)) {
		switch {
		case len(words) == 2 && words[0] == "lease" && words[1] == "{":
			block = &dhclientLease{}
		case words[0] == "}":
			if block != nil && block.nic == nic {
				if f := block.found(); f != nil {
					all = append(all, f)
				}
			}
			block = nil
		case block != nil:
			block.take(words)
		}
	}
	return all
}

// dhclientLease is a block of the file.
type dhclientLease struct {
	f             found
	nic           string
	renew, rebind time.Time
	classless     []dhcpc.Route
}

// take takes a statement's words.
func (b *dhclientLease) take(words []string) {
	value := strings.Join(words[1:], " ")
	switch words[0] {
	case "interface":
		b.nic = value
	case "fixed-address":
		b.f.address = parseAddr(value)
	case "renew":
		b.renew = dhclientTime(words[1:])
	case "rebind":
		b.rebind = dhclientTime(words[1:])
	case "expire":
		b.f.expire = dhclientTime(words[1:])
		if value == "never" {
			b.f.lifetime = forever
		}
	case "option":
		if len(words) > 2 {
			b.option(words[1], strings.Join(words[2:], " "))
		}
	}
}

func (b *dhclientLease) option(name, value string) {
	switch name {
	case "routers":
		b.f.routers = parseAddrs(value)
	case "domain-name-servers":
		b.f.dns = parseAddrs(value)
	case "domain-name":
		b.f.domain = value
	case "host-name":
		b.f.hostName = value
	case "interface-mtu":
		b.f.setMTU(value)
	case "dhcp-server-identifier":
		b.f.server = parseAddr(value)
	case "dhcp-lease-time":
		if n, err := strconv.ParseUint(value, 10, 32); err == nil {
			b.f.lifetime = seconds(n)
		}
	case "dhcp-client-identifier":
		id, ok := dhclientBytes(value)
		b.f.identify(id, ok)
	case "rfc3442-classless-static-routes", "classless-static-routes":
		b.classless = dhclientRoutes(value)
	}
}

// found is nil where the block is of no use.
func (b *dhclientLease) found() *found {
	f := b.f
	if f.routes = b.classless; f.routes == nil {
		f.router()
	}
	if f.lifetime > 0 && f.lifetime != forever && !f.expire.IsZero() {
		granted := f.expire.Add(-f.lifetime)
		f.renew, f.rebind = max(b.renew.Sub(granted), 0), max(b.rebind.Sub(granted), 0)
	}
	return f.usable()
}

// dhclientTime reads "4 2026/03/01 12:30:00", in UTC and with the day of the week in
// front, or "epoch 1772368200". It is zero for everything else, "never" among it.
func dhclientTime(words []string) time.Time {
	switch {
	case len(words) >= 2 && words[0] == "epoch":
		if n, err := strconv.ParseUint(words[1], 10, 40); err == nil {
			return time.Unix(int64(n), 0).UTC()
		}
	case len(words) == 3:
		if t, err := time.Parse("2006/01/02 15:04:05", words[1]+" "+words[2]); err == nil {
			return t
		}
	}
	return time.Time{}
}

// dhclientBytes reads "1:2:0:a:ff", or what stood in quotes, of which the scanner has
// left the bytes.
func dhclientBytes(value string) ([]byte, bool) {
	if text, ok := strings.CutPrefix(value, quoted); ok {
		return []byte(text), true
	}
	var out []byte
	for part := range strings.SplitSeq(value, ":") {
		n, err := strconv.ParseUint(part, 16, 8)
		if err != nil {
			return nil, false
		}
		out = append(out, byte(n))
	}
	return out, true
}

// dhclientRoutes reads option 121 as numbers: "16,10,5,10,9,0,2,0,10,9,0,1", or with
// spaces. It is nil where one of them makes no sense.
func dhclientRoutes(value string) []dhcpc.Route {
	var b []byte
	for _, word := range strings.FieldsFunc(value, func(r rune) bool { return r == ' ' || r == ',' || r == '.' }) {
		n, err := strconv.ParseUint(word, 10, 8)
		if err != nil {
			return nil
		}
		b = append(b, byte(n))
	}
	var list []dhcpc.Route
	for len(b) > 0 {
		bits := int(b[0])
		octets := (bits + 7) / 8
		if bits > 32 || len(b) < 1+octets+4 {
			return nil
		}
		var dst [4]byte
		copy(dst[:], b[1:1+octets])
		via := netip.AddrFrom4([4]byte(b[1+octets:]))
		if r, ok := routeOf(netip.PrefixFrom(netip.AddrFrom4(dst), bits), via); ok {
			list = append(list, r)
		}
		b = b[1+octets+4:]
	}
	return list
}

// quoted marks, in front of a client identifier, that it stood in quotes: "ab" is two
// bytes, and ab is one.
const quoted = "\x00"

// statements splits the file into statements, and those into words, without their
// semicolons. A brace ends one too: it is the last word, or the only one.
func statements(s string) [][]string {
	var all [][]string
	var words []string
	end := func() {
		if len(words) > 0 {
			all = append(all, words)
		}
		words = nil
	}
	for s != "" {
		switch c := s[0]; {
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
			s = s[1:]
		case c == '#':
			_, s, _ = strings.Cut(s, "\n")
		case c == ';':
			end()
			s = s[1:]
		case c == '{':
			words = append(words, "{")
			end()
			s = s[1:]
		case c == '}':
			end()
			words = []string{"}"}
			end()
			s = s[1:]
		case c == '"':
			var word string
			word, s = unquote(s[1:])
			if len(words) == 2 && words[1] == "dhcp-client-identifier" {
				word = quoted + word
			}
			words = append(words, word)
		default:
			n := strings.IndexAny(s, " \t\r\n#;{}\"")
			if n < 0 {
				n = len(s)
			}
			words = append(words, s[:n])
			s = s[n:]
		}
	}
	return all
}

// unquote reads up to the closing quote: a backslash stands before a byte in three octal
// digits, or before one that is meant as it is.
func unquote(s string) (text, rest string) {
	var b strings.Builder
	for s != "" {
		switch {
		case s[0] == '"':
			return b.String(), s[1:]
		case s[0] == '\\' && len(s) > 1:
			if n, err := strconv.ParseUint(s[1:min(4, len(s))], 8, 8); err == nil && len(s) >= 4 {
				b.WriteByte(byte(n))
				s = s[4:]
				continue
			}
			b.WriteByte(s[1])
			s = s[2:]
		default:
			b.WriteByte(s[0])
			s = s[1:]
		}
	}
	return b.String(), ""
}

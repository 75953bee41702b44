package upstream

import (
	"encoding/binary"
	"encoding/hex"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jsimonetti/rtnetlink/v2"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// recorded gives what Linux 6.18 listed of objects of a type, by the command that made
// each of them.
func recorded(t *testing.T, path string, typ int) map[string][]byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	list, command := map[string][]byte{}, ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		data, ok := strings.CutPrefix(line, "\t"+strconv.Itoa(typ)+" ")
		if !ok {
			command = line
			continue
		}
		if list[command], err = hex.DecodeString(data); err != nil {
			t.Fatal(err)
		}
	}
	if len(list) < 10 {
		t.Fatalf("%s has %d messages of type %d", path, len(list), typ)
	}
	return list
}

const (
	routes    = "testdata/routes.txt"
	addresses = "testdata/addresses.txt"
)

type message interface {
	UnmarshalBinary([]byte) error
	MarshalBinary() ([]byte, error)
}

// types are those of the attributes behind a header; those in a nest as well.
func types(t *testing.T, b []byte, nests ...uint16) []int {
	t.Helper()
	list, err := netlink.UnmarshalAttributes(b)
	if err != nil {
		t.Fatal(err)
	}
	var found []int
	for _, a := range list {
		typ := a.Type &^ (netlink.Nested | netlink.NetByteOrder)
		found = append(found, int(typ))
		if slices.Contains(nests, typ) {
			for _, inner := range types(t, a.Data) {
				found = append(found, int(typ)<<8|inner)
			}
		}
	}
	return found
}

// mustKeep reads a message and writes it again, and fails the test where attributes of
// some types are lost.
func mustKeep(t *testing.T, list map[string][]byte, command string, header int, m message, want ...int) {
	t.Helper()
	listed := list[command]
	if listed == nil {
		t.Fatalf("there is no recording of %q", command)
	}
	if err := m.UnmarshalBinary(listed); err != nil {
		t.Errorf("%s: %v", command, err)
		return
	}
	copied, err := m.MarshalBinary()
	if err != nil {
		t.Errorf("%s: %v", command, err)
		return
	}
	var nests []uint16
	if _, ok := m.(*rtnetlink.RouteMessage); ok {
		nests = []uint16{unix.RTA_METRICS}
	}
	have, left := types(t, listed[header:], nests...), types(t, copied[header:], nests...)
	for _, typ := range want {
		if !slices.Contains(have, typ) {
			t.Fatalf("%s: the kernel lists no attribute %d", command, typ)
		}
		if !slices.Contains(left, typ) {
			t.Errorf("%s: attribute %d is lost", command, typ)
		}
	}
}

func TestRouteKeepsItsAttributes(t *testing.T) {
	const rtaNHID = 30
	list := recorded(t, routes, unix.RTM_NEWROUTE)
	for command, want := range map[string][]int{
		"ip -6 route add 2001:db8:5::/48 from fd01::/64 via fd01::1":                           {unix.RTA_SRC},
		"ip route add 198.18.18.0/24 via inet6 fd01::1 dev eth0":                               {unix.RTA_VIA},
		"ip route add 198.18.22.0/24 nhid 101":                                                 {rtaNHID},
		"ip route add 198.18.16.0/24 via 10.1.0.1 realms 3/5":                                  {unix.RTA_FLOW},
		"ip -6 route add 2001:db8:c::/48 encap ip6 id 9 dst fd01::9 hoplimit 30 tc 4 dev eth0": {unix.RTA_ENCAP, unix.RTA_ENCAP_TYPE},
	} {
		mustKeep(t, list, command, unix.SizeofRtMsg, new(rtnetlink.RouteMessage), want...)
	}
}

func TestRouteKeepsItsMetrics(t *testing.T) {
	list := recorded(t, routes, unix.RTM_NEWROUTE)
	var want []int
	for _, metric := range []int{unix.RTAX_LOCK, unix.RTAX_WINDOW, unix.RTAX_HOPLIMIT, unix.RTAX_RTO_MIN, unix.RTAX_QUICKACK} {
		want = append(want, unix.RTA_METRICS<<8|metric)
	}
	for command := range list {
		if strings.HasPrefix(command, "ip route add 198.18.13.0/24") {
			mustKeep(t, list, command, unix.SizeofRtMsg, new(rtnetlink.RouteMessage), want...)
		}
	}
	mustKeep(t, list, "ip route add 198.18.14.0/24 via 10.1.0.1 congctl reno", unix.SizeofRtMsg, new(rtnetlink.RouteMessage), unix.RTA_METRICS<<8|unix.RTAX_CC_ALGO)
}

func TestAddressKeepsItsLifetimes(t *testing.T) {
	mustKeep(t, recorded(t, addresses, unix.RTM_NEWADDR), "ip addr add 10.5.0.1/24 valid_lft 3600 preferred_lft 60 metric 9 dev eth0",
		unix.SizeofIfAddrmsg, new(rtnetlink.AddressMessage), unix.IFA_CACHEINFO)
}

func TestAddressKeepsItsProtocol(t *testing.T) {
	const ifaProto = 11
	mustKeep(t, recorded(t, addresses, unix.RTM_NEWADDR), "(10.9.0.1/24 with a protocol)", unix.SizeofIfAddrmsg, new(rtnetlink.AddressMessage), ifaProto)
}

func TestAddressRequestHasNoAttributeOfTypeZero(t *testing.T) {
	m := rtnetlink.AddressMessage{Family: unix.AF_INET6, Attributes: &rtnetlink.AddressAttributes{Address: net.ParseIP("fd00::1")}}
	b, err := m.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	if slices.Contains(types(t, b[unix.SizeofIfAddrmsg:]), unix.IFA_UNSPEC) {
		t.Error("the request has IFA_UNSPEC, which a get under strict checking is refused for")
	}
}

func TestIPv6AddressThatMapsAnIPv4OneStaysIPv6(t *testing.T) {
	mapped := net.ParseIP("::ffff:10.0.0.1")
	want := func(what string, m interface{ MarshalBinary() ([]byte, error) }, header int, typ uint16) {
		t.Helper()
		b, err := m.MarshalBinary()
		if err != nil {
			t.Errorf("%s: %v", what, err)
			return
		}
		list, err := netlink.UnmarshalAttributes(b[header:])
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range list {
			if a.Type == typ && len(a.Data) != 16 {
				t.Errorf("%s of family AF_INET6 has %d bytes", what, len(a.Data))
			}
		}
	}
	want("an address", &rtnetlink.AddressMessage{Family: unix.AF_INET6, Attributes: &rtnetlink.AddressAttributes{Address: mapped}}, unix.SizeofIfAddrmsg, unix.IFA_ADDRESS)
	want("a destination", &rtnetlink.RouteMessage{Family: unix.AF_INET6, Attributes: rtnetlink.RouteAttributes{Dst: mapped}}, unix.SizeofRtMsg, unix.RTA_DST)
	want("a rule's source", &rtnetlink.RuleMessage{Family: unix.AF_INET6, Attributes: &rtnetlink.RuleAttributes{Src: &mapped}}, 12, unix.FRA_SRC)
}

func TestListingOfRulesOutlivesAnAttributeOfALaterKernel(t *testing.T) {
	for command, b := range recorded(t, routes, unix.RTM_NEWRULE) {
		if err := new(rtnetlink.RuleMessage).UnmarshalBinary(b); err != nil {
			t.Errorf("%s: %v: with it, RuleService.List gives none of the rules", command, err)
		}
	}
}

func TestNeighbourRequestHasOnlyWhatIsSet(t *testing.T) {
	m := rtnetlink.NeighMessage{Family: unix.AF_INET, Index: 3, Attributes: &rtnetlink.NeighAttributes{Address: net.IP{10, 0, 0, 1}}}
	b, err := m.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	if got := types(t, b[unix.SizeofNdMsg:]); !slices.Equal(got, []int{unix.NDA_DST}) {
		t.Errorf("attributes of types %v, want NDA_DST alone: a get under strict checking, and a proxy's entry, are refused", got)
	}
}

func TestNeighbourKeepsItsProtocolAndFlags(t *testing.T) {
	const ndaProtocol, ndaFlagsExt = 12, 15
	list := recorded(t, routes, unix.RTM_NEWNEIGH)
	mustKeep(t, list, "ip neigh add fd01::9 lladdr 02:00:00:00:00:09 dev eth0 router protocol 116", unix.SizeofNdMsg, new(rtnetlink.NeighMessage), ndaProtocol)
	mustKeep(t, list, "ip neigh add 10.1.0.13 lladdr 02:00:00:00:00:0d dev eth0 nud reachable managed", unix.SizeofNdMsg, new(rtnetlink.NeighMessage), ndaFlagsExt)
}

func TestLinkRequestHasItsGroup(t *testing.T) {
	group := uint32(7)
	m := rtnetlink.LinkMessage{Index: 3, Attributes: &rtnetlink.LinkAttributes{NetDevGroup: &group}}
	b, err := m.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(types(t, b[unix.SizeofIfInfomsg:]), unix.IFLA_GROUP) {
		t.Error("NetDevGroup is set, and the request has no IFLA_GROUP")
	}
}

func TestLinkKeepsWhatItsFamiliesSay(t *testing.T) {
	head := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(head[4:], 3)
	b := append(head, attributes(t, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, "eth0")
		ae.Uint32(unix.IFLA_LINK_NETNSID, 5)
		ae.Nested(unix.IFLA_AF_SPEC, func(ae *netlink.AttributeEncoder) error {
			ae.Nested(unix.AF_INET6, func(ae *netlink.AttributeEncoder) error {
				ae.Uint8(unix.IFLA_INET6_ADDR_GEN_MODE, 1)
				return nil
			})
			return nil
		})
	})...)
	mustKeep(t, map[string][]byte{"link": b}, "link", unix.SizeofIfInfomsg, new(rtnetlink.LinkMessage), unix.IFLA_AF_SPEC, unix.IFLA_LINK_NETNSID)
}

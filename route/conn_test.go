package route_test

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/route"
)

func add(b *nl.Batch, op string) func(netlink.Message, error) {
	return func(m netlink.Message, err error) { b.Add(op, nil, m, err) }
}

// metrics is RTA_METRICS of numbers and their values, as an Other.
func metrics(pairs ...uint32) []netlink.Attribute {
	ae := netlink.NewAttributeEncoder()
	for pair := range slices.Chunk(pairs, 2) {
		ae.Uint32(uint16(pair[0]), pair[1])
	}
	b, _ := ae.Encode() // an error is about lengths
	return []netlink.Attribute{{Type: unix.RTA_METRICS | netlink.Nested, Data: b}}
}

// TestRequestBytes compares what is sent with a file that says for each request
// which ip(8) command it stands for.
func TestRequestBytes(t *testing.T) {
	t.Parallel()
	p, a := nstest.Prefix, nstest.Addr
	full := route.Route{Dst: p("10.0.0.0/8"), Gateway: a("10.1.0.1"), Link: 3, OnLink: true, Source: a("10.1.0.2"), Priority: 7, Table: 1000,
		Scope: ptr(uint8(unix.RT_SCOPE_SITE)), Protocol: unix.RTPROT_STATIC, TOS: 8, MTU: 1400, AdvMSS: 1360,
		Other: metrics(unix.RTAX_INITCWND, 10)}
	var text string
	record := func(command string, header int, do func(*nl.Conn) error) {
		rec := nltest.Record(nltest.NewFake(nltest.AckAll))
		expect.Success(t, do(nl.New(rec)), "%s", command)
		text += "# " + command + "\n" + nltest.Text(header, rec.Sent()...)
	}
	for _, tt := range []struct {
		command string
		header  int
		do      func(*route.Conn) error
	}{
		{"ip route add 10.0.0.0/8 via 10.1.0.1 proto 116", unix.SizeofRtMsg,
			func(c *route.Conn) error {
				return c.Add(t.Context(), route.Route{Dst: p("10.0.0.0/8"), Gateway: a("10.1.0.1")})
			}},
		{"ip route add default dev 3 proto 116", unix.SizeofRtMsg,
			func(c *route.Conn) error { return c.Add(t.Context(), route.Route{Family: unix.AF_INET, Link: 3}) }},
		{"ip -6 route replace default via fe80::1 dev 3 proto 116 expires 60 pref high", unix.SizeofRtMsg, func(c *route.Conn) error {
			return c.Replace(t.Context(), route.Route{Gateway: a("fe80::1"), Link: 3, Expires: ptr(time.Minute), Pref: 1})
		}},
		// Any fraction of a second is a second more: a route must not end before its time.
		{"ip -6 route replace default via fe80::1 dev 3 proto 116 expires 61", unix.SizeofRtMsg, func(c *route.Conn) error {
			return c.Replace(t.Context(), route.Route{Gateway: a("fe80::1"), Link: 3, Expires: ptr(time.Minute + time.Nanosecond)})
		}},
		{"ip -6 route replace default via fe80::1 dev 3 proto 116 expires 1", unix.SizeofRtMsg, func(c *route.Conn) error {
			return c.Replace(t.Context(), route.Route{Gateway: a("fe80::1"), Link: 3, Expires: ptr(time.Duration(0))})
		}},
		{"ip route add 10.0.0.0/8 tos 8 via 10.1.0.1 dev 3 onlink src 10.1.0.2 metric 7 table 1000 scope site proto static" +
			" mtu 1400 advmss 1360 initcwnd 10", unix.SizeofRtMsg, func(c *route.Conn) error { return c.Add(t.Context(), full) }},
		{"ip route add 10.0.0.0/8 via inet6 fd00::1 dev 3 proto 116", unix.SizeofRtMsg,
			func(c *route.Conn) error {
				return c.Add(t.Context(), route.Route{Dst: p("10.0.0.0/8"), Gateway: a("fd00::1"), Link: 3})
			}},
		{"ip route add 10.0.0.0/8 proto 116 nexthop via 10.1.0.1 dev 3 weight 4 nexthop via inet6 fd00::1 dev 4 onlink", unix.SizeofRtMsg,
			func(c *route.Conn) error {
				return c.Add(t.Context(), route.Route{Dst: p("10.0.0.0/8"), Nexthops: []route.Nexthop{
					{Gateway: a("10.1.0.1"), Link: 3, Weight: 4}, {Gateway: a("fd00::1"), Link: 4, OnLink: true}}})
			}},
		{"ip route add fd00::/8 from fd01::/64 nhid 9 proto 116", unix.SizeofRtMsg,
			func(c *route.Conn) error {
				return c.Add(t.Context(), route.Route{Dst: p("fd00::/8"), From: p("fd01::5/64"), NexthopID: 9})
			}},
		{"ip route del 10.0.0.0/8", unix.SizeofRtMsg, func(c *route.Conn) error { return c.Remove(t.Context(), route.Route{Dst: p("10.0.0.0/8")}) }},
		{"ip route del fd00::/8 via fd01::1 dev 3 proto static metric 5 table 1000", unix.SizeofRtMsg, func(c *route.Conn) error {
			return c.Remove(t.Context(), route.Route{Dst: p("fd00::/8"), Gateway: a("fd01::1"), Link: 3, Protocol: unix.RTPROT_STATIC, Priority: 5, Table: 1000, MTU: 1400})
		}},
		{"ip -4 route show table 1000 dev 3 proto 116 type blackhole", unix.SizeofRtMsg, func(c *route.Conn) error {
			_, err := c.List(t.Context(), route.Filter{Family: unix.AF_INET, Table: 1000, Link: 3, Protocol: route.ProtocolTombolo, Type: unix.RTN_BLACKHOLE})
			return err
		}},
		{"ip route get 10.1.0.1", unix.SizeofRtMsg, func(c *route.Conn) error { _, err := c.Get(t.Context(), a("10.1.0.1")); return notFound(err) }},
		{"ip route get fd00::1", unix.SizeofRtMsg, func(c *route.Conn) error { _, err := c.Get(t.Context(), a("fd00::1")); return notFound(err) }},
	} {
		record(tt.command, tt.header, func(c *nl.Conn) error { return tt.do(route.On(c)) })
	}
	record("ip rule show", 12, func(c *nl.Conn) error { return expect.Err(routing.Rules(c)) })
	record("ip neighbour show", unix.SizeofNdMsg, func(c *nl.Conn) error { return expect.Err(routing.Neighbours(c)) })
	record("ip neighbour get 10.1.0.9 dev 3", unix.SizeofNdMsg, func(c *nl.Conn) error { return notFound(expect.Err(routing.Find(c, 3, a("10.1.0.9")))) })
	golden.Compare(t, "requests.golden", text)
}

// notFound is what nltest.AckAll says to every get.
func notFound(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// A kernel without IPv6 answers for IPv6 as if it were asked for all families.
func TestListIsOfTheFamilyThatWasAskedFor(t *testing.T) {
	t.Parallel()
	c := route.On(reply(unix.RTM_NEWROUTE, message([]byte{unix.AF_INET, 0, 0, 0, unix.RT_TABLE_MAIN, 0, 0, unix.RTN_UNICAST}, unix.SizeofRtMsg,
		func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, unix.RTA_GATEWAY, nstest.Addr("10.1.0.1")) })))
	for family, want := range map[uint8]int{0: 1, unix.AF_INET: 1, unix.AF_INET6: 0} {
		expect.Of(c.List(t.Context(), route.Filter{Family: family})).Len(t, want, "family %d: listed", family)
	}
}

// reply is a kernel that answers a dump, or a get, with one message.
func reply(typ uint16, data []byte) *nl.Conn {
	return nl.New(nltest.NewFake(func(r []netlink.Message) [][]byte {
		if r[0].Header.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP {
			return [][]byte{nltest.Reply(r[0], typ, unix.NLM_F_MULTI, data), nltest.Done(r[0], 0)}
		}
		return [][]byte{nltest.Reply(r[0], typ, 0, data)}
	}))
}

// message is a fixed header of some length, and attributes.
func message(header []byte, length int, attrs func(*netlink.AttributeEncoder)) []byte {
	return nltest.Body(append(header, make([]byte, length-len(header))...), attrs)
}

func TestMalformedRepliesAreErrors(t *testing.T) {
	t.Parallel()
	a4, a6 := nstest.Addr("10.1.0.1"), nstest.Addr("fd01::1")
	for _, tt := range []struct {
		name string
		typ  uint16
		data []byte
	}{
		{"route, short", unix.RTM_NEWROUTE, []byte{2, 24, 0, 0}},
		{"route, destination of another family", unix.RTM_NEWROUTE, message([]byte{2, 24}, 12, func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, unix.RTA_DST, a6) })},
		{"route, prefix too long", unix.RTM_NEWROUTE, message([]byte{2, 33}, 12, func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, unix.RTA_DST, a4) })},
		{"route, gateway of five bytes", unix.RTM_NEWROUTE, message([]byte{2}, 12, func(ae *netlink.AttributeEncoder) { ae.Bytes(unix.RTA_GATEWAY, make([]byte, 5)) })},
		{"route, via of one byte", unix.RTM_NEWROUTE, message([]byte{2}, 12, func(ae *netlink.AttributeEncoder) { ae.Bytes(unix.RTA_VIA, []byte{2}) })},
		{"route, via of another family", unix.RTM_NEWROUTE, message([]byte{2}, 12, func(ae *netlink.AttributeEncoder) { ae.Bytes(unix.RTA_VIA, []byte{10, 0, 1, 2, 3, 4}) })},
		{"route, table of two bytes", unix.RTM_NEWROUTE, message([]byte{2}, 12, func(ae *netlink.AttributeEncoder) { ae.Uint16(unix.RTA_TABLE, 1) })},
		{"route, metric of one byte", unix.RTM_NEWROUTE, message([]byte{2}, 12, func(ae *netlink.AttributeEncoder) {
			ae.Nested(unix.RTA_METRICS, func(ae *netlink.AttributeEncoder) error { ae.Uint8(unix.RTAX_MTU, 1); return nil })
		})},
		{"route, next hop cut short", unix.RTM_NEWROUTE, message([]byte{2}, 12, func(ae *netlink.AttributeEncoder) { ae.Bytes(unix.RTA_MULTIPATH, make([]byte, 7)) })},
		{"route, next hop of no length", unix.RTM_NEWROUTE, message([]byte{2}, 12, func(ae *netlink.AttributeEncoder) { ae.Bytes(unix.RTA_MULTIPATH, make([]byte, 8)) })},
		{"route, next hop with a via cut short", unix.RTM_NEWROUTE, message([]byte{2}, 12, func(ae *netlink.AttributeEncoder) {
			ae.Bytes(unix.RTA_MULTIPATH, []byte{13, 0, 0, 0, 1, 0, 0, 0, 5, 0, unix.RTA_VIA, 0, 2})
		})},
		{"route, next hop with half an attribute", unix.RTM_NEWROUTE, message([]byte{2}, 12, func(ae *netlink.AttributeEncoder) {
			ae.Bytes(unix.RTA_MULTIPATH, []byte{10, 0, 0, 0, 1, 0, 0, 0, 5, 0})
		})},
		{"rule, short", unix.RTM_NEWRULE, []byte{2}},
		{"rule, source of another family", unix.RTM_NEWRULE, message([]byte{2, 0, 24}, 12, func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, unix.FRA_SRC, a6) })},
		{"neighbour, short", unix.RTM_NEWNEIGH, []byte{2}},
		{"neighbour, no address", unix.RTM_NEWNEIGH, message([]byte{2}, 12, nil)},
		{"neighbour, address of another family", unix.RTM_NEWNEIGH, message([]byte{2}, 12, func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, unix.NDA_DST, a6) })},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := reply(tt.typ, tt.data)
			var list any
			var err error
			switch {
			case strings.HasPrefix(tt.name, "route"):
				list, err = route.On(c).List(t.Context(), route.Filter{})
				expect.Is(t, expect.Err(route.On(c).Get(t.Context(), a4)), nl.ErrMalformed, "Get")
			case strings.HasPrefix(tt.name, "rule"):
				list, err = routing.Rules(c)
			default:
				list, err = routing.Neighbours(c)
				expect.Is(t, expect.Err(routing.Find(c, 1, a4)), nl.ErrMalformed, "Neighbour")
			}
			expect.Is(t, err, nl.ErrMalformed, "listed %v", list)
		})
	}
}

func TestOtherFamiliesAreLeftOut(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		typ  uint16
		data []byte
	}{
		{unix.RTM_NEWROUTE, message([]byte{128}, 12, nil)}, // RTNL_FAMILY_IPMR
		{unix.RTM_NEWRULE, message([]byte{129}, 12, nil)},
		{unix.RTM_NEWNEIGH, message([]byte{unix.AF_BRIDGE}, 12, nil)},
		{unix.RTM_NEWLINK, nil}, // not even of the kind
	} {
		c := reply(tt.typ, tt.data)
		routes, err1 := route.On(c).List(t.Context(), route.Filter{})
		rules, err2 := routing.Rules(c)
		neighbours, err3 := routing.Neighbours(c)
		expect.That(t, len(routes)+len(rules)+len(neighbours) == 0,
			"type %d: listed %v, %v and %v", tt.typ, routes, rules, neighbours)
		expect.Success(t, errors.Join(err1, err2, err3), "type %d", tt.typ)
	}
}

func TestEnsurePassesErrorsOn(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	there := route.Route{Dst: nstest.Prefix("192.0.2.0/24"), Link: h.eth0}
	other := route.Route{Dst: nstest.Prefix("192.0.2.0/24"), Link: h.eth1}
	must.Succeed(t, h.c.Add(t.Context(), there))
	for _, tt := range []struct {
		name  string
		want  route.Route
		fault *nltest.Fault
	}{
		{"adding", there, &nltest.Fault{Type: unix.RTM_NEWROUTE, Errno: unix.EPERM}},
		{"listing", there, &nltest.Fault{Type: unix.RTM_GETROUTE, Errno: unix.EPERM}},
		{"replacing", other, &nltest.Fault{Type: unix.RTM_NEWROUTE, Nth: 2, Errno: unix.EPERM}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			nltest.MustHaveFired(t, tt.fault)
			conn := nltest.Dial(t, unix.NETLINK_ROUTE, h.ns, tt.fault)
			changed, err := route.On(conn).Ensure(t.Context(), tt.want)
			expect.That(t, !changed && errors.Is(err, unix.EPERM), "Ensure: changed %t, %v, want %v", changed, err, unix.EPERM)
			expect.Of(h.c.Ensure(t.Context(), there)).Is(t, false, "afterwards")
		})
	}
}

func TestInterruptedListsAreTriedAgain(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for name, list := range map[string]func(*nl.Conn) (int, error){
		"routes": func(c *nl.Conn) (int, error) {
			l, err := route.On(c).List(t.Context(), route.Filter{})
			return len(l), err
		},
		"rules": func(c *nl.Conn) (int, error) { l, err := routing.Rules(c); return len(l), err },
		"neighbours": func(c *nl.Conn) (int, error) {
			l, err := routing.Neighbours(c)
			groups := func(n routing.NeighbourEntry) bool { return n.Addr.IsMulticast() } // the kernel joins them in its own time
			return len(slices.DeleteFunc(l, groups)), err
		},
	} {
		fault := &nltest.Fault{Interrupt: true, Times: 2}
		conn := nltest.Dial(t, unix.NETLINK_ROUTE, h.ns, fault)
		want := must.Of(list(h.nl)).Get(t)
		expect.Of(list(conn)).Is(t, want, "%s", name)
		expect.That(t, want <= 0 || fault.Fired() == 2, "%s: interrupted %d times, want 2", name, fault.Fired())
	}
}

func TestObjectsAreNamedInErrors(t *testing.T) {
	t.Parallel()
	p, a := nstest.Prefix, nstest.Addr
	for _, tt := range []struct {
		object fmt.Stringer
		want   string
	}{
		{route.Route{Dst: p("10.0.0.0/8"), Gateway: a("10.1.0.1")}, "10.0.0.0/8 via 10.1.0.1"},
		{route.Route{Dst: p("10.5.0.0/8"), Gateway: a("10.1.0.1"), Link: 3, Table: 100}, "10.0.0.0/8 via 10.1.0.1 on link 3 in table 100"},
		{route.Route{Gateway: a("10.1.0.1"), Table: unix.RT_TABLE_MAIN}, "default via 10.1.0.1"},
		{route.Route{Dst: p("::/0"), Type: unix.RTN_UNREACHABLE}, "unreachable default"},
		{route.Route{Dst: p("fd00::/8"), From: p("fd01::/64"), NexthopID: 9}, "fd00::/8 from fd01::/64 nexthop object 9"},
		{route.Route{Type: 77}, "77 default"},
		{routing.Rule{From: p("10.1.0.0/16"), Table: 7, Priority: 100}, "100: from 10.1.0.0/16 table 7"},
		{routing.Rule{To: p("10.1.0.0/16"), Invert: true, IIF: "a", OIF: "b", Action: 3}, "not from all to 10.1.0.0/16 iif a oif b"},
		{routing.NeighbourEntry{Addr: a("10.1.0.9"), Link: 3}, "10.1.0.9 on link 3"},
	} {
		expect.Equal(t, tt.object.String(), tt.want)
	}
}

func TestCloseLeavesASharedConnectionOpen(t *testing.T) {
	t.Parallel()
	conn := must.Of(nl.Dial(unix.NETLINK_ROUTE, nstest.New(t))).Get(t)
	defer conn.Close()
	c := route.On(conn)
	must.Succeed(t, c.Close())
	expect.Success(t, expect.Err(c.List(t.Context(), route.Filter{})), "after Close")
}

func TestDialWithoutConfigIsTheCallersNamespace(t *testing.T) {
	t.Parallel()
	nstest.RequireRoot(t)
	c := must.Of(route.Dial(nil)).Get(t)
	defer c.Close()
	expect.Success(t, expect.Err(c.List(t.Context(), route.Filter{})))
}

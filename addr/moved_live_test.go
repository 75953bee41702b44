package addr_test

import (
	"encoding/binary"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// everySort are commands that add one address of every sort.
func everySort() string {
	return `
ip addr add 10.1.0.1/24 dev eth0
ip addr add 10.1.0.2/24 dev eth0
ip addr add 10.2.0.1/24 brd + label eth0:1 dev eth0
ip addr add 10.3.0.1 peer 10.4.0.1/30 scope link noprefixroute dev eth0
ip addr add 10.5.0.1/24 valid_lft 3600 preferred_lft 60 metric 9 dev eth0
ip addr add 10.6.0.1/24 valid_lft 4294967294 preferred_lft 0 dev eth0
ip addr add 10.7.0.1/24 scope 100 dev eth0
(10.9.0.1/24 with a protocol)
ip addr add 10.8.0.1/32 broadcast 10.8.0.255 scope host dev eth0
ip addr add 232.1.0.1/32 autojoin dev eth0
ip -6 addr add fd01::1/64 dev eth0 nodad
ip -6 addr add fd02::1 peer fd03::1/128 nodad valid_lft 3600 preferred_lft 60 dev eth0
ip -6 addr add fd04::1/64 nodad home mngtmpaddr noprefixroute metric 77 dev eth0
ip -6 addr add fd05::1/64 nodad preferred_lft 0 dev eth0
(fd09::1/64 with a protocol)
ip -6 addr add fd06::1/64 optimistic dev eth0
ip -6 addr add fd07::1/64 dev eth0
ip -6 addr add fe80::7/64 scope link nodad dev eth0
ip -6 addr add ff3e::7/128 autojoin dev eth0
ip -6 addr add ::ffff:10.1.0.7/120 nodad dev eth0
ip -6 addr add ::ffff:10.1.0.8 peer ::ffff:10.1.0.9/128 nodad dev eth0`
}

// requestedByHand are those that ip(8) of Debian 12 has no words for.
func requestedByHand(h host) map[string]func() (netlink.Message, error) {
	const ifaProto = 11 // Linux 5.18
	request := func(family uint8, a string) func() (netlink.Message, error) {
		return func() (netlink.Message, error) {
			p := nstest.Prefix(a)
			head := []byte{family, uint8(p.Bits()), 0, 0}
			head = binary.NativeEndian.AppendUint32(head, uint32(h.eth0))
			return nl.Encode(unix.RTM_NEWADDR, netlink.Create|netlink.Excl, head, func(ae *netlink.AttributeEncoder) {
				nl.PutAddr(ae, unix.IFA_LOCAL, p.Addr())
				ae.Uint8(ifaProto, 7)
			})
		}
	}
	return map[string]func() (netlink.Message, error){
		"(10.9.0.1/24 with a protocol)": request(unix.AF_INET, "10.9.0.1/24"),
		"(fd09::1/64 with a protocol)":  request(unix.AF_INET6, "fd09::1/64"),
	}
}

// TestAddressesAreMovedAsTheyAre adds addresses of every sort, reads them, has them on record as the journal of
// a takeover does, deletes them and adds them again.
func TestAddressesAreMovedAsTheyAre(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	conn, err := nl.Dial(unix.NETLINK_ROUTE, h.ns)
	must.Succeed(t, err)
	defer conn.Close()
	ask := func(m netlink.Message, err error) error {
		var b nl.Batch
		b.Add("ask", nil, m, err)
		return conn.Execute(&b)
	}
	byHand := requestedByHand(h)
	for command := range strings.Lines(strings.TrimSpace(everySort())) {
		command = strings.TrimSpace(command)
		if request := byHand[command]; request != nil {
			must.Succeed(t, ask(request()), "%s", command)
		} else {
			nstest.Run(t, h.ns, "ip", strings.Fields(command)[1:]...)
		}
		// The kernel brings temporary ones along.
		made := slices.DeleteFunc(h.listed(t), func(a addr.Address) bool { return a.Prefix.Addr().Is6() && a.Flags&unix.IFA_F_SECONDARY != 0 })
		must.That(t, len(made) == 1, "%s: made %v", command, made)
		shown := h.shown(t)
		must.Succeed(t, h.c.Remove(t.Context(), made[0]))
		expect.Success(t, ask(made[0].Message(unix.RTM_NEWADDR, netlink.Create|netlink.Replace)), "%s: add the copy", command)
		diff := cmp.Diff(shown, h.shown(t))
		expect.That(t, diff == "" || strings.Contains(command, "mngtmpaddr"), "%s (-made +moved):\n%s", command, diff)
		again := h.listed(t)
		i := slices.IndexFunc(again, func(a addr.Address) bool { return a.Prefix == made[0].Prefix })
		expect.That(t, i >= 0 && again[i].Protocol == made[0].Protocol, "%s: made %+v, moved %+v", command, made, again)
		nstest.Run(t, h.ns, "ip", "address", "flush", "dev", "eth0")
	}
}

// listed gives the addresses of eth0, read from a journal.
func (h host) listed(t *testing.T) []addr.Address {
	t.Helper()
	list := must.Of(h.c.List(t.Context(), addr.Filter{Link: h.eth0})).Get(t)
	text := must.Of(json.Marshal(list)).Get(t)
	var again []addr.Address
	must.Succeed(t, json.Unmarshal(text, &again))
	return again
}

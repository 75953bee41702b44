package addr_test

import (
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/golden"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// recordedCommands add one address of every sort.
func recordedCommands() string {
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
ip addr add 0.0.0.0/8 dev eth0
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

// listAll gives all addresses as the kernel writes them.
func listAll(t *testing.T, c *nl.Conn) []netlink.Message {
	t.Helper()
	var all []netlink.Message
	m := netlink.Message{Header: netlink.Header{Type: unix.RTM_GETADDR}, Data: make([]byte, unix.SizeofIfAddrmsg)}
	if err := c.List("list addresses", m, nil, func(m netlink.Message) error {
		all = append(all, m)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

// identity is a message's prefix length, link and first address, which neither time nor
// duplicate address detection changes.
func identity(m netlink.Message) string {
	return string(m.Data[:2]) + string(m.Data[4:min(len(m.Data), 8+4+16+4+4)])
}

// TestTheKernelTakesCopiesForWhatItListed deletes addresses of every sort, adds them as
// they were listed, and compares the kernel's listings.
func TestTheKernelTakesCopiesForWhatItListed(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: h.ns})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ask := func(m netlink.Message, err error) error {
		var b nl.Batch
		b.Add("ask", nil, m, err)
		return conn.Execute(&b)
	}
	byHand := requestedByHand(h)
	taken := 0
	for command := range strings.Lines(strings.TrimSpace(recordedCommands())) {
		command = strings.TrimSpace(command)
		before := map[string]bool{}
		for _, m := range listAll(t, conn) {
			before[identity(m)] = true
		}
		if request := byHand[command]; request != nil {
			if err := ask(request()); err != nil {
				t.Fatalf("%s: %v", command, err)
			}
		} else {
			nstest.Run(t, h.ns, "ip", strings.Fields(command)[1:]...)
		}
		for _, m := range listAll(t, conn) {
			if before[identity(m)] || strings.Contains(command, "mngtmpaddr") && !strings.Contains(strings.Join(addr.Said(m), " "), "mngtmpaddr") {
				continue // it brings temporary ones along
			}
			copied, err := addr.CopyOf(m)
			if err != nil {
				t.Errorf("%s: %v", command, err)
				continue
			}
			if err := ask(netlink.Message{Header: netlink.Header{Type: unix.RTM_DELADDR}, Data: m.Data}, nil); err != nil {
				t.Errorf("%s: delete it: %v", command, err)
			}
			if err := ask(copied, nil); err != nil {
				t.Errorf("%s: add the copy: %v", command, err)
				continue
			}
			want := addr.Said(m)
			if !slices.ContainsFunc(listAll(t, conn), func(have netlink.Message) bool { return cmp.Equal(addr.Said(have), want) }) {
				t.Errorf("%s: %q is no more listed", command, want)
			}
			taken++
		}
	}
	if taken < 20 {
		t.Errorf("%d copies: the commands cannot be whole", taken)
	}
}

// TestRecordMessages writes testdata/recorded/linux-VERSION.txt for the running kernel,
// given -update.
func TestRecordMessages(t *testing.T) {
	if !golden.Updates() {
		t.Skip("records only with -update")
	}
	h := newHost(t)
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: h.ns})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	byHand := requestedByHand(h)
	var records []nltest.Recording
	for command := range strings.Lines(strings.TrimSpace(recordedCommands())) {
		r := nltest.Recording{Command: strings.TrimSpace(command)}
		have := map[string]bool{}
		for _, m := range listAll(t, conn) {
			have[identity(m)] = true
		}
		if by := byHand[r.Command]; by != nil {
			var b nl.Batch
			m, err := by()
			b.Add("add", nil, m, err)
			if err := conn.Execute(&b); err != nil {
				r.Refused = err.Error()
			}
		} else if _, err := nstest.Try(h.ns, "ip", strings.Fields(r.Command)[1:]...); err != nil {
			r.Refused = strings.TrimPrefix(err.Error(), r.Command+": ")
		}
		for _, m := range listAll(t, conn) {
			if r.Refused == "" && !have[identity(m)] && int(binary.NativeEndian.Uint32(m.Data[4:])) == h.eth0 {
				r.Messages = append(r.Messages, m)
			}
		}
		t.Log(r.Command, len(r.Messages), r.Refused)
		records = append(records, r)
	}
	nltest.SaveRecordings(t, records)
}

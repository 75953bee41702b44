package addr_test

import (
	"encoding/binary"
	"strings"
	"testing"

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

// sorts are addresses of every sort, on eth0 of a host.
func sorts(t *testing.T, h host) *nltest.Objects {
	return &nltest.Objects{
		Commands: recordedCommands(), ByHand: requestedByHand(h),
		IP: func(args ...string) error { _, err := nstest.Try(h.ns, "ip", args...); return err },
		List: func(c *nl.Conn) []netlink.Message {
			var all []netlink.Message
			m := netlink.Message{Header: netlink.Header{Type: unix.RTM_GETADDR}, Data: make([]byte, unix.SizeofIfAddrmsg)}
			if err := c.List("list addresses", m, nil, func(m netlink.Message) error {
				if int(binary.NativeEndian.Uint32(m.Data[4:])) == h.eth0 {
					all = append(all, m)
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			return all
		},
		// The prefix length, the link and the first address: neither time nor duplicate
		// address detection changes them.
		Identity: func(m netlink.Message) string {
			return string(m.Data[:2]) + string(m.Data[4:min(len(m.Data), 8+4+16+4+4)])
		},
		Copy: addr.CopyOf, Said: addr.Said,
		Del: func(m netlink.Message) (netlink.Message, error) {
			return netlink.Message{Header: netlink.Header{Type: unix.RTM_DELADDR}, Data: m.Data}, nil
		},
		Refused: func(command string, err error) { t.Fatalf("%s: %v", command, err) },
		// It brings temporary ones along.
		Skips: func(command string, m netlink.Message, _ error) bool {
			return strings.Contains(command, "mngtmpaddr") && !strings.Contains(strings.Join(addr.Said(m), " "), "mngtmpaddr")
		},
		Least: 20,
	}
}

// TestCopiesLoseNothingThatKernelsList reads what kernels listed of addresses of every
// sort, records it as the journal of a takeover does, and holds the request that adds it
// elsewhere to the kernel's message, attribute by attribute.
func TestCopiesLoseNothingThatKernelsList(t *testing.T) {
	t.Parallel()
	(&nltest.Objects{Copy: addr.CopyOf, Said: addr.Said, Skips: func(string, netlink.Message, error) bool { return false }, Least: 20}).CopiesLoseNothing(t)
}

func TestTheKernelTakesCopiesForWhatItListed(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	sorts(t, h).AreTakenAgain(t, h.ns)
}

// TestRecordMessages writes testdata/recorded/linux-VERSION.txt for the running kernel,
// given -update.
func TestRecordMessages(t *testing.T) {
	if !golden.Updates() {
		t.Skip("records only with -update")
	}
	h := newHost(t)
	sorts(t, h).Record(t, h.ns)
}

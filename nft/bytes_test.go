package nft

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// fakeKernel has elements, and takes every change for good without making it.
type fakeKernel struct{ elements []ruleset.Element }

const fakeGeneration = 7

func (k *fakeKernel) answer(requests []netlink.Message) [][]byte {
	var out [][]byte
	for _, r := range requests {
		switch uint16(r.Header.Type) {
		case messageType(unix.NFT_MSG_GETGEN):
			out = append(out, answerOf(r, unix.NFT_MSG_NEWGEN, 0, nftnl.Uint32(unix.NFTA_GEN_ID, fakeGeneration)))
		case messageType(unix.NFT_MSG_GETSETELEM):
			if r.Header.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP {
				out = append(out, nltest.Done(r, 0)) // no test has elements there
			} else {
				out = append(out, k.element(r))
			}
		case messageType(unix.NFT_MSG_GETTABLE), messageType(unix.NFT_MSG_GETCHAIN),
			messageType(unix.NFT_MSG_GETSET), messageType(unix.NFT_MSG_GETRULE):
			out = append(out, nltest.AckAll([]netlink.Message{r})...)
		default: // in a transaction
			if r.Header.Flags&unix.NLM_F_ACK != 0 {
				out = append(out, nltest.Ack(r))
			}
		}
	}
	return out
}

func (k *fakeKernel) element(r netlink.Message) []byte {
	asked := ruleset.DecodeElements(unix.NFPROTO_INET, r.Data[4:])
	if len(asked) != 1 {
		panic(fmt.Sprintf("a request for %d elements", len(asked)))
	}
	i := slices.IndexFunc(k.elements, func(el ruleset.Element) bool { return el.Equal(asked[0]) })
	if i < 0 {
		return nltest.Error(r, unix.ENOENT, "")
	}
	return answerOf(r, unix.NFT_MSG_NEWSETELEM, 0, ruleset.TableName(nftnl.DefaultTable).ElementAttributes(k.elements[i])...)
}

func elementsOf(eps ...Endpoint) []ruleset.Element {
	var list []ruleset.Element
	for i := range eps {
		list = append(list, eps[i].elements()...)
	}
	return list
}

const (
	getGen  = "# (read the generation)"
	settled = "# (wait for it to settle)"
	begins  = "# nft -f -: the transaction begins"
	ends    = "# and ends"
)

// The nft commands say what each message stands for; "create" is nft's word for
// NLM_F_EXCL.
func TestMessagesAreAsRecorded(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	ep := pod("0123456789a", "10.22.0.5", "fd00:22::5")
	for _, tc := range []struct {
		name     string
		have     []ruleset.Element
		do       func(*Conn) error
		messages []string
	}{
		{
			name: "add",
			do:   func(c *Conn) error { return c.Add(ctx, ep) },
			messages: []string{
				begins,
				`# nft create element inet tombolo pods4 '{ "cbr0" . 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo masq4-podnet '{ 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo pods6 '{ "cbr0" . fd00:22::5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo masq6-podnet '{ fd00:22::5 comment "tombolo:1:0123456789a:podnet" }'`,
				ends,
			},
		}, {
			name: "add without addresses",
			do: func(c *Conn) error {
				return c.Add(ctx, Endpoint{Owner: "0123456789a", Network: "lan", Bridge: "br0", MAC: []byte{2, 0, 0, 0, 0, 5}})
			},
			messages: []string{
				begins,
				`# nft create element inet tombolo ports '{ "br0" . 02:00:00:00:00:05 comment "tombolo:1:0123456789a:lan" }'`,
				ends,
			},
		}, {
			name: "add with ports",
			do: func(c *Conn) error {
				ep := pod("0123456789a", "10.22.0.5")
				ep.Ports = []Port{{Protocol: TCP, HostPort: 8080, PodPort: 80}, {Protocol: UDP, HostAddr: netip.MustParseAddr("192.0.2.1"), HostPort: 53, PodPort: 53}}
				return c.Add(ctx, ep)
			},
			messages: []string{
				getGen,
				settled, "# (by a transaction without changes)",
				`# nft get element inet tombolo hostports4 '{ udp . 53 }'`,
				`# nft list map inet tombolo hostaddrs4`,
				begins,
				`# nft create element inet tombolo pods4 '{ "cbr0" . 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo masq4-podnet '{ 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo hostports4 '{ tcp . 8080 comment "tombolo:1:0123456789a:podnet" : 10.22.0.5 . 80 }'`,
				`# nft create element inet tombolo hostaddrs4 '{ 192.0.2.1 . udp . 53 comment "tombolo:1:0123456789a:podnet" : 10.22.0.5 . 53 }'`,
				`# nft create element inet tombolo published4 '{ "cbr0" . 10.22.0.5 . tcp . 80 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo selves4 '{ "cbr0" . 10.22.0.5 . 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo published4 '{ "cbr0" . 10.22.0.5 . udp . 53 comment "tombolo:1:0123456789a:podnet" }'`,
				ends,
			},
		}, {
			name: "add guarded",
			do: func(c *Conn) error {
				guarded := guardedPod("0123456789a", "veth1", podMAC, pod4, pod6)
				guarded.Masquerade = false
				return c.Add(ctx, guarded)
			},
			messages: []string{
				begins,
				`# nft create element inet tombolo pods4 '{ "cbr0" . 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo pods6 '{ "cbr0" . fd00:22::5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element bridge tombolo guarded '{ "veth1" comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element bridge tombolo guard-mac '{ "veth1" . 02:00:00:00:00:05 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element bridge tombolo guard4 '{ "veth1" . 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element bridge tombolo guard-lladdr '{ "veth1" . 0x020000000005 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element bridge tombolo guard6 '{ "veth1" . fd00:22::5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element bridge tombolo guard-target '{ "veth1" . 0xfd000022000000000000000000000005 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element bridge tombolo guard6 '{ "veth1" . fe80::ff:fe00:5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element bridge tombolo guard-target '{ "veth1" . 0xfe80000000000000000000fffe000005 comment "tombolo:1:0123456789a:podnet" }'`,
				ends,
			},
		}, {
			name: "remove",
			have: elementsOf(ep),
			do:   func(c *Conn) error { return c.Remove(ctx, ep) },
			messages: []string{
				getGen,
				settled, "# (by a transaction without changes)",
				`# nft get element inet tombolo pods4 '{ "cbr0" . 10.22.0.5 }'`,
				`# nft get element inet tombolo masq4-podnet '{ 10.22.0.5 }'`,
				`# nft get element inet tombolo pods6 '{ "cbr0" . fd00:22::5 }'`,
				`# nft get element inet tombolo masq6-podnet '{ fd00:22::5 }'`,
				begins,
				`# nft delete element inet tombolo pods4 '{ "cbr0" . 10.22.0.5 }'`,
				`# nft delete element inet tombolo masq4-podnet '{ 10.22.0.5 }'`,
				`# nft delete element inet tombolo pods6 '{ "cbr0" . fd00:22::5 }'`,
				`# nft delete element inet tombolo masq6-podnet '{ fd00:22::5 }'`,
				ends,
			},
		}, {
			name: "move",
			have: elementsOf(pod("0123456789a", "10.22.0.5")),
			do: func(c *Conn) error {
				return c.Move(ctx, pod("0123456789a", "10.22.0.5"), pod("0123456789a", "10.22.0.6"))
			},
			messages: []string{
				getGen,
				settled, "# (by a transaction without changes)",
				`# nft get element inet tombolo pods4 '{ "cbr0" . 10.22.0.6 }'`,
				`# nft get element inet tombolo masq4-podnet '{ 10.22.0.6 }'`,
				`# nft get element inet tombolo pods4 '{ "cbr0" . 10.22.0.5 }'`,
				`# nft get element inet tombolo masq4-podnet '{ 10.22.0.5 }'`,
				begins,
				`# nft delete element inet tombolo pods4 '{ "cbr0" . 10.22.0.5 }'`,
				`# nft delete element inet tombolo masq4-podnet '{ 10.22.0.5 }'`,
				`# nft create element inet tombolo pods4 '{ "cbr0" . 10.22.0.6 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo masq4-podnet '{ 10.22.0.6 comment "tombolo:1:0123456789a:podnet" }'`,
				ends,
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			kernel := &fakeKernel{elements: tc.have}
			rec := nltest.Record(nltest.NewFake(kernel.answer))
			c := On(nl.New(rec), nil)
			must.Succeed(t, tc.do(c))
			var out bytes.Buffer
			var n int
			for i, datagram := range rec.Sent() {
				fmt.Fprintf(&out, "== datagram %d\n", i+1)
				for _, m := range nltest.Split(datagram) {
					must.That(t, n != len(tc.messages), "more than the %d messages that are described", n)
					fmt.Fprintf(&out, "%s\ntype %#04x flags %#04x\n%s", tc.messages[n], uint16(m.Header.Type), uint16(m.Header.Flags), hex.Dump(m.Data))
					n++
				}
			}
			expect.That(t, n == len(tc.messages), "%d messages, and %d that are described", n, len(tc.messages))
			golden.Compare(t, filepath.Join("messages", strings.ReplaceAll(tc.name, " ", "-")+".txt"), out.Bytes())
		})
	}
}

// The rest of an Add is proven by this: what is sent and what comes back does not
// depend on what is there.
func TestThousandthPodCostsWhatTheFirstDid(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	mustEnsure(t, c, podnet())
	transport, err := nl.Open(unix.NETLINK_NETFILTER, ns)
	must.Succeed(t, err)
	rec := nltest.Record(transport)
	recorded := On(nl.New(rec), nil)
	defer recorded.Close()
	traffic := func(ep Endpoint) [2][]int {
		t.Helper()
		rec.Sent()
		rec.Received()
		ready, err := recorded.Ready(context.Background(), podnet())
		must.That(t, err == nil && ready, "%v %v", ready, err)
		mustAdd(t, recorded, ep)
		return [2][]int{lengths(rec.Sent()), lengths(rec.Received())}
	}
	first := traffic(pod("00000000001", "10.22.0.1", "fd00:22::1"))
	for i := 2; i < 1000; i++ {
		mustAdd(t, c, pod(Owner(fmt.Sprintf("%011x", i)), fmt.Sprintf("10.22.%d.%d", i>>8, i&255), fmt.Sprintf("fd00:22::%x", i)))
	}
	last := traffic(pod("00000001000", "10.22.100.1", "fd00:22::9999"))
	expect.That(t, slices.Equal(first[0], last[0]) && slices.Equal(first[1], last[1]),
		"bytes sent and received: %v for the first pod, %v for the thousandth", first, last)
	if len(first[0]) != 2 {
		t.Errorf("Ready and Add together take %d datagrams, want 2", len(first[0]))
	}
}

func lengths(list [][]byte) []int {
	var n []int
	for _, b := range list {
		n = append(n, len(b))
	}
	return n
}

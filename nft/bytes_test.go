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

	"github.com/tombolo-cni/tombolo/internal/golden"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// fakeKernel has elements, and takes every change for good without making it.
type fakeKernel struct{ elements []ruleset.ElementState }

const fakeGeneration = 7

func (k *fakeKernel) answer(requests []netlink.Message) [][]byte {
	var out [][]byte
	for _, r := range requests {
		switch uint16(r.Header.Type) {
		case messageType(unix.NFT_MSG_GETGEN):
			out = append(out, answerOf(r, unix.NFT_MSG_NEWGEN, 0, nftnl.Uint32(unix.NFTA_GEN_ID, fakeGeneration)))
		case messageType(unix.NFT_MSG_GETSETELEM):
			out = append(out, k.element(r))
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
	asked, err := ruleset.DecodeElements(unix.NFPROTO_INET, r.Data[4:])
	if err != nil || len(asked) != 1 {
		panic(fmt.Sprintf("a request for %d elements, %v", len(asked), err))
	}
	i := slices.IndexFunc(k.elements, func(el ruleset.ElementState) bool { return el.Equal(asked[0].Element) })
	if i < 0 {
		return nltest.Error(r, unix.ENOENT, "")
	}
	return answerOf(r, unix.NFT_MSG_NEWSETELEM, 0, ruleset.TableName(DefaultTable).ElementAttributes(k.elements[i].Element, k.elements[i].Comment)...)
}

func elementsOf(eps ...Endpoint) []ruleset.ElementState {
	var list []ruleset.ElementState
	for i := range eps {
		for _, el := range eps[i].elements() {
			list = append(list, ruleset.ElementState{Element: el, Comment: ownerComment(eps[i].Owner, eps[i].Network)})
		}
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
	stale := pod("00000000bad", "10.22.0.5", "fd00:22::5")
	for _, tc := range []struct {
		name     string
		have     []ruleset.ElementState
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
				ep.Ports = []Port{{Protocol: 6, HostPort: 8080, PodPort: 80}, {Protocol: 17, HostAddr: netip.MustParseAddr("192.0.2.1"), HostPort: 53, PodPort: 53}}
				return c.Add(ctx, ep)
			},
			messages: []string{
				getGen,
				settled, "# (by a transaction without changes)",
				`# nft get element inet tombolo hostclaims '{ ipv4 . tcp . 8080 }'`,
				`# nft get element inet tombolo hostports4 '{ udp . 53 }'`,
				begins,
				`# nft create element inet tombolo pods4 '{ "cbr0" . 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo masq4-podnet '{ 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo hostports4 '{ tcp . 8080 comment "tombolo:1:0123456789a:podnet" : 10.22.0.5 . 80 }'`,
				`# nft add element inet tombolo hostclaims '{ ipv4 . udp . 53 comment "tombolo:1:claim" }'`,
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
			name: "replace",
			have: elementsOf(stale)[:2],
			do:   func(c *Conn) error { return c.Replace(ctx, ep) },
			messages: []string{
				getGen,
				settled, "# (by a transaction without changes)",
				`# nft get element inet tombolo pods4 '{ "cbr0" . 10.22.0.5 }'`,
				`# nft get element inet tombolo masq4-podnet '{ 10.22.0.5 }'`,
				`# nft get element inet tombolo pods6 '{ "cbr0" . fd00:22::5 }'`,
				`# nft get element inet tombolo masq6-podnet '{ fd00:22::5 }'`,
				begins,
				`# nft delete element inet tombolo pods4 '{ "cbr0" . 10.22.0.5 }'`,
				`# nft create element inet tombolo pods4 '{ "cbr0" . 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft delete element inet tombolo masq4-podnet '{ 10.22.0.5 }'`,
				`# nft create element inet tombolo masq4-podnet '{ 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo pods6 '{ "cbr0" . fd00:22::5 comment "tombolo:1:0123456789a:podnet" }'`,
				`# nft create element inet tombolo masq6-podnet '{ fd00:22::5 comment "tombolo:1:0123456789a:podnet" }'`,
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
		}, {
			name: "ensure",
			do: func(c *Conn) error {
				_, err := c.Ensure(ctx, Network{Name: "podnet", Masquerade: true, Prefixes: nstest.Prefixes("10.22.0.0/18")})
				return err
			},
			messages: []string{
				getGen,
				settled, "# (by a transaction without changes)",
				`# nft list table inet tombolo`,
				`# nft list chain inet tombolo forward`,
				`# nft list chain inet tombolo unmark`,
				`# nft list chain inet tombolo loopback`,
				`# nft list chain inet tombolo loopback-answers`,
				`# nft list chain inet tombolo hostports`,
				`# nft list chain inet tombolo hostports-local`,
				`# nft list chain inet tombolo hairpin`,
				`# nft list chain inet tombolo masq-podnet`,
				`# nft list chain bridge tombolo dedup-podnet`,
				`# nft list chain bridge tombolo quiet-podnet`,
				`# nft list set inet tombolo pods4`,
				`# nft list set inet tombolo pods6`,
				`# nft list set inet tombolo ports`,
				`# nft list set inet tombolo hostports4`,
				`# nft list set inet tombolo hostports6`,
				`# nft list set inet tombolo hostaddrs4`,
				`# nft list set inet tombolo hostaddrs6`,
				`# nft list set inet tombolo hostclaims`,
				`# nft list set inet tombolo published4`,
				`# nft list set inet tombolo published6`,
				`# nft list set inet tombolo selves4`,
				`# nft list set inet tombolo selves6`,
				`# nft list set inet tombolo bridges`,
				`# nft list set inet tombolo policies`,
				`# nft list set inet tombolo isolated`,
				`# nft list set inet tombolo bypass`,
				`# nft list set inet tombolo lans`,
				`# nft list set inet tombolo masq4-podnet`,
				`# nft list set inet tombolo masq6-podnet`,
				`# nft get element inet tombolo pods4 '{ "/sentinel" . 0.0.0.0 }'`,
				`# nft get element inet tombolo pods6 '{ "/sentinel" . :: }'`,
				`# nft get element inet tombolo ports '{ "/sentinel" . 00:00:00:00:00:00 }'`,
				`# nft get element inet tombolo hostports4 '{ 255 . 0 }'`,
				`# nft get element inet tombolo hostports6 '{ 255 . 0 }'`,
				`# nft get element inet tombolo hostaddrs4 '{ 0.0.0.0 . 255 . 0 }'`,
				`# nft get element inet tombolo hostaddrs6 '{ :: . 255 . 0 }'`,
				`# nft get element inet tombolo hostclaims '{ ipv4 . 255 . 0 }'`,
				`# nft get element inet tombolo published4 '{ "/sentinel" . 0.0.0.0 . 255 . 0 }'`,
				`# nft get element inet tombolo published6 '{ "/sentinel" . :: . 255 . 0 }'`,
				`# nft get element inet tombolo selves4 '{ "/sentinel" . 0.0.0.0 . 0.0.0.0 }'`,
				`# nft get element inet tombolo selves6 '{ "/sentinel" . :: . :: }'`,
				`# nft get element inet tombolo bridges '{ "/sentinel" . "/sentinel" }'`,
				`# nft get element inet tombolo policies '{ "/sentinel" }'`,
				`# nft get element inet tombolo isolated '{ "/sentinel" . "/sentinel" }'`,
				`# nft get element inet tombolo bypass '{ "/sentinel" }'`,
				`# nft get element inet tombolo lans '{ "/sentinel" }'`,
				`# nft get element inet tombolo masq4-podnet '{ 0.0.0.0 }'`,
				`# nft get element inet tombolo masq6-podnet '{ :: }'`,
				`# (list the rules of the table)`,
				begins,
				`# nft add table inet tombolo`,
				`# nft create set inet tombolo pods4 '{ type ifname . ipv4_addr; }'`,
				`# nft create element inet tombolo pods4 '{ "/sentinel" . 0.0.0.0 comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo pods6 '{ type ifname . ipv6_addr; }'`,
				`# nft create element inet tombolo pods6 '{ "/sentinel" . :: comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo ports '{ type ifname . ether_addr; }'`,
				`# nft create element inet tombolo ports '{ "/sentinel" . 00:00:00:00:00:00 comment "tombolo:1:sentinel" }'`,
				`# nft create map inet tombolo hostports4 '{ type inet_proto . inet_service : ipv4_addr . inet_service; }'`,
				`# nft create element inet tombolo hostports4 '{ 255 . 0 comment "tombolo:1:sentinel" : 0.0.0.0 . 0 }'`,
				`# nft create map inet tombolo hostports6 '{ type inet_proto . inet_service : ipv6_addr . inet_service; }'`,
				`# nft create element inet tombolo hostports6 '{ 255 . 0 comment "tombolo:1:sentinel" : :: . 0 }'`,
				`# nft create map inet tombolo hostaddrs4 '{ type ipv4_addr . inet_proto . inet_service : ipv4_addr . inet_service; }'`,
				`# nft create element inet tombolo hostaddrs4 '{ 0.0.0.0 . 255 . 0 comment "tombolo:1:sentinel" : 0.0.0.0 . 0 }'`,
				`# nft create map inet tombolo hostaddrs6 '{ type ipv6_addr . inet_proto . inet_service : ipv6_addr . inet_service; }'`,
				`# nft create element inet tombolo hostaddrs6 '{ :: . 255 . 0 comment "tombolo:1:sentinel" : :: . 0 }'`,
				`# nft create set inet tombolo hostclaims '{ type nf_proto . inet_proto . inet_service; }'`,
				`# nft create element inet tombolo hostclaims '{ ipv4 . 255 . 0 comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo published4 '{ type ifname . ipv4_addr . inet_proto . inet_service; }'`,
				`# nft create element inet tombolo published4 '{ "/sentinel" . 0.0.0.0 . 255 . 0 comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo published6 '{ type ifname . ipv6_addr . inet_proto . inet_service; }'`,
				`# nft create element inet tombolo published6 '{ "/sentinel" . :: . 255 . 0 comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo selves4 '{ type ifname . ipv4_addr . ipv4_addr; }'`,
				`# nft create element inet tombolo selves4 '{ "/sentinel" . 0.0.0.0 . 0.0.0.0 comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo selves6 '{ type ifname . ipv6_addr . ipv6_addr; }'`,
				`# nft create element inet tombolo selves6 '{ "/sentinel" . :: . :: comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo bridges '{ type ifname . ifname; }'`,
				`# nft create element inet tombolo bridges '{ "/sentinel" . "/sentinel" comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo policies '{ type ifname; }'`,
				`# nft create element inet tombolo policies '{ "/sentinel" comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo isolated '{ type ifname . ifname; }'`,
				`# nft create element inet tombolo isolated '{ "/sentinel" . "/sentinel" comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo bypass '{ type ifname; }'`,
				`# nft create element inet tombolo bypass '{ "/sentinel" comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo lans '{ type ifname; }'`,
				`# nft create element inet tombolo lans '{ "/sentinel" comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo masq4-podnet '{ type ipv4_addr; }'`,
				`# nft create element inet tombolo masq4-podnet '{ 0.0.0.0 comment "tombolo:1:sentinel" }'`,
				`# nft create set inet tombolo masq6-podnet '{ type ipv6_addr; }'`,
				`# nft create element inet tombolo masq6-podnet '{ :: comment "tombolo:1:sentinel" }'`,
				`# nft create chain inet tombolo forward '{ type filter hook forward priority filter - 10; comment "…"; }'`,
				`# nft add rule inet tombolo forward meta mark set meta mark and 0xffffefff`,
				`# nft add rule inet tombolo forward iifname . oifname @isolated drop`,
				`# nft add rule inet tombolo forward iifname @policies oifname @policies iifname . oifname != @bridges drop`,
				`# nft add rule inet tombolo forward iifname . ip saddr @pods4 meta mark set meta mark or 0x1000`,
				`# nft add rule inet tombolo forward iifname . ip6 saddr @pods6 meta mark set meta mark or 0x1000`,
				`# nft add rule inet tombolo forward iifname . ether saddr @ports meta mark set meta mark or 0x1000`,
				`# nft add rule inet tombolo forward ct state established,related oifname . ip daddr @pods4 meta mark set meta mark or 0x1000`,
				`# nft add rule inet tombolo forward ct state established,related oifname . ip6 daddr @pods6 meta mark set meta mark or 0x1000`,
				`# nft add rule inet tombolo forward ct state established,related oifname . ether daddr @ports meta mark set meta mark or 0x1000`,
				`# nft add rule inet tombolo forward ct status dnat oifname . ip daddr . meta l4proto . th dport @published4 meta mark set meta mark or 0x1000`,
				`# nft add rule inet tombolo forward ct status dnat oifname . ip6 daddr . meta l4proto . th dport @published6 meta mark set meta mark or 0x1000`,
				`# nft add rule inet tombolo forward iifname . oifname @bridges meta mark set meta mark or 0x1000`,
				`# nft create chain inet tombolo unmark '{ type filter hook postrouting priority 300; comment "…"; }'`,
				`# nft add rule inet tombolo unmark meta mark set meta mark and 0xffffefff`,
				`# nft create chain inet tombolo loopback '{ type filter hook prerouting priority raw; comment "…"; }'`,
				`# nft add rule inet tombolo loopback iifname != "lo" ip daddr 127.0.0.0/8 drop`,
				`# nft add rule inet tombolo loopback iifname != "lo" ip saddr 127.0.0.0/8 drop`,
				`# nft create chain inet tombolo loopback-answers '{ type filter hook prerouting priority -99; comment "…"; }'`,
				`# nft add rule inet tombolo loopback-answers iifname != "lo" ip daddr 127.0.0.0/8 meta mark set meta mark or 0x1000`,
				`# nft create chain inet tombolo hostports '{ type nat hook prerouting priority dstnat; comment "…"; }'`,
				`# nft add rule inet tombolo hostports fib daddr type != local return`,
				`# nft add rule inet tombolo hostports ip6 daddr ::1 return`,
				`# nft add rule inet tombolo hostports ip6 daddr fe80::/10 return`,
				`# nft add rule inet tombolo hostports dnat ip to ip daddr . meta l4proto . th dport map @hostaddrs4`,
				`# nft add rule inet tombolo hostports dnat ip6 to ip6 daddr . meta l4proto . th dport map @hostaddrs6`,
				`# nft add rule inet tombolo hostports ip daddr 127.0.0.0/8 ip daddr != 127.0.0.1 return`,
				`# nft add rule inet tombolo hostports meta nfproto ipv4 dnat ip to meta l4proto . th dport map @hostports4`,
				`# nft add rule inet tombolo hostports meta nfproto ipv6 dnat ip6 to meta l4proto . th dport map @hostports6`,
				`# nft create chain inet tombolo hostports-local '{ type nat hook output priority -100; comment "…"; }'`,
				`# nft add rule inet tombolo hostports-local fib daddr type != local return`,
				`# nft add rule inet tombolo hostports-local ip6 daddr ::1 return`,
				`# nft add rule inet tombolo hostports-local ip6 daddr fe80::/10 return`,
				`# nft add rule inet tombolo hostports-local dnat ip to ip daddr . meta l4proto . th dport map @hostaddrs4`,
				`# nft add rule inet tombolo hostports-local dnat ip6 to ip6 daddr . meta l4proto . th dport map @hostaddrs6`,
				`# nft add rule inet tombolo hostports-local ip daddr 127.0.0.0/8 ip daddr != 127.0.0.1 return`,
				`# nft add rule inet tombolo hostports-local meta nfproto ipv4 dnat ip to meta l4proto . th dport map @hostports4`,
				`# nft add rule inet tombolo hostports-local meta nfproto ipv6 dnat ip6 to meta l4proto . th dport map @hostports6`,
				`# nft create chain inet tombolo hairpin '{ type nat hook postrouting priority srcnat - 1; comment "…"; }'`,
				`# nft add rule inet tombolo hairpin ct status dnat oifname != "lo" ip saddr 127.0.0.0/8 masquerade`,
				`# nft add rule inet tombolo hairpin ct status dnat oifname . ip saddr . ip daddr @selves4 masquerade`,
				`# nft add rule inet tombolo hairpin ct status dnat oifname . ip6 saddr . ip6 daddr @selves6 masquerade`,
				`# nft add rule inet tombolo hairpin ct status dnat oifname @bypass oifname . ip saddr @pods4 masquerade`,
				`# nft add rule inet tombolo hairpin ct status dnat oifname @bypass oifname . ip6 saddr @pods6 masquerade`,
				`# nft add rule inet tombolo hairpin ct status dnat oifname @lans oifname . ip daddr != @pods4 masquerade`,
				`# nft add rule inet tombolo hairpin ct status dnat oifname @lans oifname . ip6 daddr != @pods6 masquerade`,
				`# nft add rule inet tombolo hairpin ct status dnat oifname @lans oifname @bypass masquerade`,
				`# nft create chain inet tombolo masq-podnet '{ type nat hook postrouting priority srcnat; comment "…"; }'`,
				`# nft add rule inet tombolo masq-podnet ip saddr != @masq4-podnet return`,
				`# nft add rule inet tombolo masq-podnet ct status dnat oifname . ip daddr . meta l4proto . th dport @published4 return`,
				`# nft add rule inet tombolo masq-podnet ip daddr 10.22.0.0/18 return`,
				`# nft add rule inet tombolo masq-podnet ip daddr 224.0.0.0/4 return`,
				`# nft add rule inet tombolo masq-podnet ip daddr 255.255.255.255 return`,
				`# nft add rule inet tombolo masq-podnet ip6 saddr != @masq6-podnet return`,
				`# nft add rule inet tombolo masq-podnet ct status dnat oifname . ip6 daddr . meta l4proto . th dport @published6 return`,
				`# nft add rule inet tombolo masq-podnet ip6 daddr ff00::/8 return`,
				`# nft add rule inet tombolo masq-podnet masquerade`,
				ends,
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			kernel := &fakeKernel{elements: tc.have}
			rec := nltest.Record(nltest.NewFake(kernel.answer))
			c := on(nl.New(rec), nil)
			if err := tc.do(c); err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			var n int
			for i, datagram := range rec.Sent() {
				fmt.Fprintf(&out, "== datagram %d\n", i+1)
				for _, m := range nltest.Split(datagram) {
					if n == len(tc.messages) {
						t.Fatalf("more than the %d messages that are described", n)
					}
					fmt.Fprintf(&out, "%s\ntype %#04x flags %#04x\n%s", tc.messages[n], uint16(m.Header.Type), uint16(m.Header.Flags), hex.Dump(m.Data))
					n++
				}
			}
			if n != len(tc.messages) {
				t.Errorf("%d messages, and %d that are described", n, len(tc.messages))
			}
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
	transport, err := nl.Open(unix.NETLINK_NETFILTER, &nl.Config{NetNS: ns})
	if err != nil {
		t.Fatal(err)
	}
	rec := nltest.Record(transport)
	recorded := on(nl.New(rec), nil)
	defer recorded.Close()
	traffic := func(ep Endpoint) [2][]int {
		t.Helper()
		rec.Sent()
		rec.Received()
		ready, err := recorded.Ready(context.Background(), podnet())
		if err != nil || !ready {
			t.Fatal(ready, err)
		}
		mustAdd(t, recorded, ep)
		return [2][]int{lengths(rec.Sent()), lengths(rec.Received())}
	}
	first := traffic(pod("00000000001", "10.22.0.1", "fd00:22::1"))
	for i := 2; i < 1000; i++ {
		mustAdd(t, c, pod(Owner(fmt.Sprintf("%011x", i)), fmt.Sprintf("10.22.%d.%d", i>>8, i&255), fmt.Sprintf("fd00:22::%x", i)))
	}
	last := traffic(pod("00000001000", "10.22.100.1", "fd00:22::9999"))
	if !slices.Equal(first[0], last[0]) || !slices.Equal(first[1], last[1]) {
		t.Errorf("bytes sent and received: %v for the first pod, %v for the thousandth", first, last)
	}
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

package keeper

import (
	"errors"
	"slices"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/golden"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// hears waits for news that a test expects.
func hears(t *testing.T, f *feed, what string, is func(news) bool) {
	t.Helper()
	for {
		list, ok := <-f.news()
		if !ok {
			t.Fatalf("the feed ended before %s", what)
		}
		if slices.ContainsFunc(list, is) {
			return
		}
	}
}

func TestWhatHappensToLinksAndAddressesIsHeard(t *testing.T) {
	t.Parallel()
	ns, other := nstest.New(t), nstest.New(t)
	eth0, _ := nstest.Veth(t, ns, "eth0", other, "eth0")
	f, err := newFeed(&nl.Config{NetNS: ns})
	if err != nil {
		t.Fatal(err)
	}
	nstest.Run(t, ns, "ip", "link", "add", "br0", "type", "bridge")
	br0 := nstest.Index(t, ns, "br0")
	hears(t, f, "a new link", func(n news) bool { return n.index == br0 && n.facts != nil && n.facts.name == "br0" && !n.facts.up })
	nstest.Run(t, ns, "ip", "link", "set", "eth0", "master", "br0")
	hears(t, f, "a port", func(n news) bool {
		return n.index == eth0 && n.facts != nil && n.facts.master == br0 && n.facts.mtu == 1500
	})
	nstest.Run(t, ns, "ip", "link", "set", "eth0", "nomaster")
	hears(t, f, "a port's end", func(n news) bool {
		return n.index == eth0 && n.facts != nil && n.facts.master == 0 && len(n.facts.mac) == 6
	})
	nstest.Run(t, other, "ip", "link", "set", "eth0", "down")
	hears(t, f, "a lost carrier", func(n news) bool { return n.index == eth0 && n.facts != nil && n.facts.up && !n.facts.carrier })
	nstest.Run(t, other, "ip", "link", "set", "eth0", "up")
	hears(t, f, "a carrier", func(n news) bool { return n.index == eth0 && n.facts != nil && n.facts.up && n.facts.carrier })
	for _, a := range []string{"192.0.2.1/24", "fd00::1/64"} {
		for _, verb := range []string{"add", "del"} {
			nstest.Run(t, ns, "ip", "address", verb, a, "dev", "br0")
			hears(t, f, verb+" "+a, func(n news) bool { return n.index == br0 && n.facts == nil })
		}
	}
	nstest.Run(t, ns, "ip", "link", "del", "br0")
	hears(t, f, "a link's end", func(n news) bool { return n.index == br0 && n.gone })
	f.close()
	for range f.news() { // what was heard before
	}
}

func TestAFeedThatLosesSomethingSaysSo(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	f, err := newFeed(&nl.Config{NetNS: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	// Nobody takes what it hears: its channel fills, and then the socket's buffer.
	var b nl.Batch
	for i := range 400 {
		m, err := nl.Encode(unix.RTM_NEWLINK, 0, make([]byte, unix.SizeofIfInfomsg), func(ae *netlink.AttributeEncoder) {
			ae.String(unix.IFLA_IFNAME, "lo")
			ae.Uint32(unix.IFLA_TXQLEN, uint32(100+i))
		})
		b.Add("set link", nl.Name("lo"), m, err)
	}
	for range 5 {
		if err := conn.Execute(&b); err != nil {
			t.Fatal(err)
		}
	}
	hears(t, f, "the loss", func(n news) bool { return n.lost })
}

func TestAnnouncementsAreRead(t *testing.T) {
	t.Parallel()
	port := linkMessage(unix.RTM_NEWLINK, 3, "eth0", 4)
	port[0].Data[0] = unix.AF_BRIDGE
	for what, tt := range map[string]struct {
		m    []netlink.Message
		want []news
	}{
		"nothing":           {nil, nil},
		"a link":            {linkMessage(unix.RTM_NEWLINK, 3, "eth0", 4), []news{{index: 3, facts: &linkFacts{name: "eth0", master: 4, mtu: 1500, mac: "\x02\x00\x00\x00\x00\x01", up: true}}}},
		"a link's end":      {linkMessage(unix.RTM_DELLINK, 3, "eth0", 0), []news{{index: 3, gone: true, facts: &linkFacts{name: "eth0", mtu: 1500, mac: "\x02\x00\x00\x00\x00\x01", up: true}}}},
		"a carrier":         {withCarrier(linkMessage(unix.RTM_NEWLINK, 3, "eth0", 4)), []news{{index: 3, facts: &linkFacts{name: "eth0", master: 4, mtu: 1500, mac: "\x02\x00\x00\x00\x00\x01", up: true, carrier: true}}}},
		"an address":        {address(7), []news{{index: 7}}},
		"a bridge's port":   {port, nil},
		"something else":    {[]netlink.Message{nltest.Message(unix.RTM_NEWROUTE, make([]byte, 64))}, nil},
		"a short link":      {[]netlink.Message{nltest.Message(unix.RTM_NEWLINK, make([]byte, unix.SizeofIfInfomsg-1))}, []news{{lost: true}}},
		"a short address":   {[]netlink.Message{nltest.Message(unix.RTM_DELADDR, make([]byte, unix.SizeofIfAddrmsg-1))}, []news{{lost: true}}},
		"a short attribute": {[]netlink.Message{nltest.Message(unix.RTM_NEWLINK, append(make([]byte, unix.SizeofIfInfomsg), 9, 0, 3, 0))}, []news{{lost: true}}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			got := newsOf(tt.m)
			if !slices.EqualFunc(got, tt.want, func(a, b news) bool {
				return a.lost == b.lost && a.index == b.index && a.gone == b.gone && (a.facts == nil) == (b.facts == nil) && (a.facts == nil || *a.facts == *b.facts)
			}) {
				t.Errorf("%+v, want %+v", got, tt.want)
			}
		})
	}
}

func TestAFeedThatCannotBeIsAnError(t *testing.T) {
	t.Parallel()
	var f *feed
	if f.news() != nil {
		t.Error("no feed has news")
	}
	ns := nstest.New(t)
	if err := ns.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := newFeed(&nl.Config{NetNS: ns}); !errors.Is(err, unix.EBADF) {
		t.Errorf("of a namespace that is closed: %v", err)
	}
}

func FuzzNews(f *testing.F) {
	for name, m := range map[string][]netlink.Message{
		"link": linkMessage(unix.RTM_NEWLINK, 3, "eth0", 4), "gone": linkMessage(unix.RTM_DELLINK, 3, "eth0", 0), "address": address(3),
	} {
		f.Add(uint16(m[0].Header.Type), m[0].Data)
		if golden.Updates() {
			nstest.SaveCorpus(f, "FuzzNews", name, m[0].Header.Type, m[0].Data)
		}
	}
	f.Fuzz(func(t *testing.T, typ uint16, data []byte) {
		list := newsOf([]netlink.Message{nltest.Message(typ, data)})
		if len(list) > 1 {
			t.Errorf("%d news in one announcement", len(list))
		}
		if len(list) == 1 && list[0].lost && (list[0].facts != nil || list[0].index != 0) {
			t.Errorf("lost, and not lost: %+v", list[0])
		}
	})
}

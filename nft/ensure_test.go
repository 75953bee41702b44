package nft

import (
	"context"
	"errors"
	"io/fs"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// damages are what people and programs do to a table. Before each there is podnet
// with one pod, and a second network.
var damages = []struct {
	name string
	do   string // nft commands
	// found are parts of the differences that Check lists, in their order.
	found []string
	// unready says that Ready sees it: it looks at the table and the chains only.
	unready bool
	// emptied says that elements went with a set.
	emptied bool
	// lost says that an element went, which Ensure cannot know of.
	lost bool
}{
	{
		name: "flush ruleset", do: "flush ruleset", unready: true, emptied: true,
		found: []string{"nf_tables: table inet tombolo is missing"},
	}, {
		name: "delete table", do: "delete table inet tombolo", unready: true, emptied: true,
		found: []string{"nf_tables: table inet tombolo is missing"},
	}, {
		name: "flush table", do: "flush table inet tombolo", unready: true,
		found: []string{
			`chain forward of table inet tombolo: rule "clear the mark bit of packets from our bridges" is missing`,
			`rule "clear the mark bit of packets to our bridges" is missing`,
			`rule "drop what would stay on an isolated bridge" is missing`,
			`rule "drop what goes from one bridge with a policy to another" is missing`,
			`rule "mark what stays on a bridge of ours" is missing`,
			`rule "mark what pods send, IPv4" is missing`, `rule "mark what pods send, IPv6" is missing`,
			`rule "mark what pods without addresses send" is missing`,
			`rule "except what opens a connection to a bridge of others" is missing`,
			`rule "drop what firewalld would accept to a bridge of others" is missing`,
			`rule "except what opens a connection to a veth of others" is missing`,
			`rule "drop what firewalld would accept to a veth of others" is missing`,
			`rule "mark replies to pods, IPv4" is missing`, `rule "mark replies to pods, IPv6" is missing`,
			`rule "mark replies to pods without addresses" is missing`,
			`rule "mark what goes to published ports, IPv4" is missing`, `rule "mark what goes to published ports, IPv6" is missing`,
			`chain unmark of table inet tombolo: rule "clear the mark bit of packets from our bridges" is missing`,
			`rule "clear the mark bit of packets to our bridges" is missing`,
			`rule "the host's redirects to pods, IPv4" is missing`, `rule "the host's redirects to pods, IPv6" is missing`,
			`chain loopback of table inet tombolo: rule "others must not reach what is local to the host" is missing`,
			`rule "nor pass for it" is missing`,
			`chain loopback-answers of table inet tombolo: rule "what the firewall itself leads to what is local to the host" is missing`,
			`chain hostports of table inet tombolo: rule "only what is sent to the host" is missing`,
			`rule "cannot be forwarded: ::1/128" is missing`,
			`rule "cannot be forwarded: fe80::/10" is missing`,
			`rule "ports that are closed to the caller, IPv4" is missing`,
			`rule "ports that are closed to the caller, IPv6" is missing`,
			`rule "ports on one address, IPv4" is missing`,
			`rule "ports on one address, IPv6" is missing`,
			`rule "of 127.0.0.0/8, all addresses are 127.0.0.1 alone" is missing`,
			`rule "addresses that are left alone, IPv4" is missing`, `rule "addresses that are left alone, IPv6" is missing`,
			`rule "ports on all addresses, IPv4" is missing`,
			`rule "ports on all addresses, IPv6" is missing`,
			`chain hostports-local of table inet tombolo: rule "only what is sent to the host" is missing`,
			`rule "cannot be forwarded: ::1/128" is missing`,
			`rule "cannot be forwarded: fe80::/10" is missing`,
			`rule "ports on one address, IPv4" is missing`,
			`rule "ports on one address, IPv6" is missing`,
			`rule "of 127.0.0.0/8, all addresses are 127.0.0.1 alone" is missing`,
			`rule "addresses that are left alone, IPv4" is missing`, `rule "addresses that are left alone, IPv6" is missing`,
			`rule "ports on all addresses, IPv4" is missing`,
			`rule "ports on all addresses, IPv6" is missing`,
			`chain hairpin of table inet tombolo: rule "the host calls by 127.0.0.1" is missing`,
			`rule "a pod calls itself, IPv4" is missing`,
			`rule "a pod calls itself, IPv6" is missing`,
			`rule "the answer is bridged past the host, IPv4" is missing`,
			`rule "the answer is bridged past the host, IPv6" is missing`,
			`rule "a machine of the LAN answers past the host, IPv4" is missing`,
			`rule "a machine of the LAN answers past the host, IPv6" is missing`,
			`rule "a pod on the LAN answers past the host" is missing`,
			`chain masq-podnet of table inet tombolo: rule "not sent by pods of this network, IPv4" is missing`,
			`rule "pods keep their address towards published ports, IPv4" is missing`,
			`rule "pods keep their address towards 10.22.0.0/16" is missing`, `rule "multicast, IPv4" is missing`,
			`rule "broadcast" is missing`,
			`rule "not sent by pods of this network, IPv6" is missing`,
			`rule "pods keep their address towards published ports, IPv6" is missing`,
			`rule "pods keep their address towards fd00:22::/64" is missing`, `rule "multicast, IPv6" is missing`,
			`rule "masquerade what pods send to elsewhere" is missing`,
		},
	}, {
		name: "flush chain", do: "flush chain inet tombolo unmark", unready: true,
		found: []string{
			`chain unmark of table inet tombolo: rule "clear the mark bit of packets from our bridges" is missing`,
			`chain unmark of table inet tombolo: rule "clear the mark bit of packets to our bridges" is missing`,
			`rule "the host's redirects to pods, IPv4" is missing`, `rule "the host's redirects to pods, IPv6" is missing`,
		},
	}, {
		name: "delete chain", do: "delete chain inet tombolo unmark", unready: true,
		found: []string{"table inet tombolo: chain unmark is missing"},
	}, {
		name: "a rule of someone else at the head", do: "insert rule inet tombolo forward accept", unready: true,
		found: []string{`chain forward of table inet tombolo: rule "" does not belong there`},
	}, {
		name: "a rule of someone else at the end", do: `add rule inet tombolo masq-podnet drop comment "mine"`, unready: true,
		found: []string{`chain masq-podnet of table inet tombolo: rule "mine" does not belong there`},
	}, {
		name: "one of our rules twice", do: `add rule inet tombolo unmark counter comment "clear the mark bit of packets to our bridges"`, unready: true,
		found: []string{`chain unmark of table inet tombolo: rule "clear the mark bit of packets to our bridges" does not belong there`},
	}, {
		name: "another rule in place of ours", do: "flush chain inet tombolo unmark" + strings.Repeat("; add rule inet tombolo unmark counter", 4),
		found: []string{
			`rule "clear the mark bit of packets from our bridges" is missing`, `rule "clear the mark bit of packets to our bridges" is missing`,
			`rule "the host's redirects to pods, IPv4" is missing`, `rule "the host's redirects to pods, IPv6" is missing`,
			`chain unmark of table inet tombolo: rule "" does not belong there`, `rule "" does not belong there`,
			`rule "" does not belong there`, `rule "" does not belong there`,
		},
	}, {
		name: "dormant table", do: "add table inet tombolo { flags dormant; }", unready: true,
		found: []string{"table inet tombolo: flag dormant does not belong there"},
	}, {
		name: "policy drop", do: "chain inet tombolo forward { policy drop; }", unready: true,
		found: []string{"chain forward of table inet tombolo: policy is drop, should be accept"},
	}, {
		name: "another hook",
		do: "delete chain inet tombolo unmark; add chain inet tombolo unmark { type filter hook input priority 7; " +
			`comment "tombolo rules 1, mark 0x10, 1 in all"; }; add rule inet tombolo unmark counter comment "clear the mark bit of packets to our bridges"`,
		unready: true,
		found:   []string{"chain unmark of table inet tombolo: hook is type filter hook input priority 7, should be type filter hook postrouting priority -160"},
	}, {
		name: "no base chain",
		do:   `delete chain inet tombolo masq-podnet; add chain inet tombolo masq-podnet { comment "x"; }`, unready: true,
		found: []string{
			"chain masq-podnet of table inet tombolo: hook is none, should be type nat hook postrouting priority 100",
			`comment (version and settings) is "x", should be "tombolo rules 1, prefixes `,
			`rule "not sent by`, `rule "pods keep`, `rule "pods keep`, `rule "multicast`, `rule "broadcast`,
			`rule "not sent by`, `rule "pods keep`, `rule "pods keep`, `rule "multicast`, `rule "masquerade`,
		},
	}, {
		name: "no set", do: "flush table inet tombolo; delete set inet tombolo pods4", unready: true, emptied: true,
		found: []string{"table inet tombolo: set pods4 is missing"},
	}, {
		name: "a set of another type", unready: true, emptied: true,
		do: "flush table inet tombolo; delete set inet tombolo pods4; add set inet tombolo pods4 { type ipv4_addr; flags interval; }; " +
			"add element inet tombolo pods4 { 10.0.0.0/8 }; add rule inet tombolo forward ip saddr @pods4 accept",
		found: []string{"set pods4 of table inet tombolo: type is key type 0x7 of 4 bytes with flags 0x4, should be key type 0xa47 of 20 bytes with flags 0x0"},
	}, {
		name: "a map in place of a set", unready: true, emptied: true,
		do: "flush table inet tombolo; delete set inet tombolo masq6-podnet; " +
			"add map inet tombolo masq6-podnet { type ipv6_addr : verdict; }",
		found: []string{"set masq6-podnet of table inet tombolo: type is key type 0x8 of 16 bytes with flags 0x8 to data type 0xffffff00 of 16 bytes, should be key type 0x8 of 16 bytes with flags 0x0"},
	}, {
		name: "a deleted element", do: "delete element inet tombolo pods4 { cbr0 . 10.22.0.5 }", lost: true,
		found: []string{"set pods4 of table inet tombolo: element cbr0 . 10.22.0.5 is missing"},
	}, {
		name: "an element that is another's", lost: true,
		do:    "delete element inet tombolo pods4 { cbr0 . 10.22.0.5 }; add element inet tombolo pods4 { cbr0 . 10.22.0.5 }",
		found: []string{`set pods4 of table inet tombolo: owner of element cbr0 . 10.22.0.5 is "", should be "tombolo:1:00000000001:podnet"`},
	},
}

func TestEnsureMendsWhatWasDamaged(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, tc := range damages {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c, ns := dialNew(t)
			other := Network{Name: "other", Masquerade: true}
			ep := pod("00000000001", "10.22.0.5", "fd00:22::5")
			otherEp := Endpoint{Owner: "00000000002", Network: "other", Bridge: "br1", Addrs: nstest.Addrs("10.23.0.5"), Masquerade: true}
			mustEnsure(t, c, podnet())
			mustEnsure(t, c, other)
			mustAdd(t, c, ep, otherEp)
			want := normal(nft(t, ns, "list", "ruleset"))
			nft(t, ns, tc.do)

			ready, err := c.Ready(ctx, podnet())
			expect.That(t, err == nil && ready != tc.unready, "Ready: %v, %v", ready, err)
			checkFinds(t, c, podnet(), tc.found, ep)
			out := mustEnsure(t, c, podnet())
			if want := (outcome{Changed: tc.unready || len(tc.found) > 1, Emptied: tc.emptied}); out != want {
				t.Errorf("Ensure: %+v, want %+v", out, want)
			}
			if !tc.lost {
				// What there is of elements is as it was, or gone with its set.
				mustBeReadyButFor(t, c, tc.emptied, ep)
			}
			mustEnsure(t, c, other)
			must.Succeed(t, c.Replace(ctx, ep, otherEp))
			wantReady(t, c, podnet(), ep)
			wantReady(t, c, other, otherEp)
			expect.NoDiff(t, cmp.Diff(inAnyOrder(want), inAnyOrder(normal(nft(t, ns, "list", "ruleset")))), "the ruleset before and after")
		})
	}
}

// mustBeReadyButFor allows for elements that went with their set.
func mustBeReadyButFor(t *testing.T, c *Conn, elements bool, ep Endpoint) {
	t.Helper()
	diffs := must.Of(checkAll(c, podnet(), ep)).Get(t)
	for _, d := range diffs {
		expect.That(t, elements && d.What == "element", "after Ensure: %v", d)
	}
}

// checkFinds wants the differences that a Check lists to start with these; where
// elements went with a set, they follow.
func checkFinds(t *testing.T, c *Conn, n Network, want []string, eps ...Endpoint) {
	t.Helper()
	diffs := must.Of(checkAll(c, n, eps...)).Get(t)
	for i, part := range want {
		expect.That(t, i < len(diffs) && strings.Contains(diffs[i].String(), part),
			"difference %d of %q: want one with %q", i, diffs, part)
	}
}

// inAnyOrder sorts a listing's chains and sets, whose order is that of their making.
func inAnyOrder(listing string) map[string]bool {
	blocks := map[string]bool{}
	for block := range strings.SplitSeq(listing, "\n\t}\n") {
		blocks[strings.TrimPrefix(strings.TrimSpace(block), "table inet tombolo {\n\t")] = true
	}
	return blocks
}

func TestEnsureChangesOnlyItsNetwork(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	other := Network{Name: "other", Masquerade: true, Prefixes: nstest.Prefixes("10.23.0.0/16")}
	ep := pod("00000000001", "10.22.0.5", "fd00:22::5")
	mustEnsure(t, c, podnet())
	mustEnsure(t, c, other)
	mustAdd(t, c, ep)
	otherBefore := nft(t, ns, "-a", "list", "chain", "inet", "tombolo", "masq-other")
	forwardBefore := nft(t, ns, "-a", "list", "chain", "inet", "tombolo", "forward")

	changed := podnet()
	for _, step := range []struct {
		name   string
		change func()
		rules  string // that there is in the end, or not
		want   bool
	}{
		{"more destinations", func() { changed.NonMasquerade = nstest.Prefixes("172.16.0.0/12") }, "ip daddr 172.16.0.0/12 return", true},
		{"other destinations", func() { changed.NonMasquerade = nstest.Prefixes("172.16.0.0/13") }, "ip daddr 172.16.0.0/12 return", false},
		{"never IPv6", func() { changed.NonMasquerade = nstest.Prefixes("::/0") }, "meta nfproto ipv6 return", true},
		{"no masquerade", func() { changed.Masquerade = false }, "chain masq-podnet", false},
		{"masquerade again", func() { changed.Masquerade = true }, "chain masq-podnet", true},
	} {
		step.change()
		expect.Of(c.Ready(context.Background(), changed)).Is(t, false, "%s: Ready", step.name)
		expect.Equal(t, mustEnsure(t, c, changed), (outcome{Changed: true}), "%s", step.name)
		expect.Equal(t, strings.Contains(nft(t, ns, "list", "ruleset"), step.rules), step.want, "%s: %q is there", step.name, step.rules)
		wantReady(t, c, changed)
		wantReady(t, c, other)
		wantEndpoints(t, c, ep)
	}
	expect.Equal(t, nft(t, ns, "-a", "list", "chain", "inet", "tombolo", "masq-other"), otherBefore,
		"the other network's chain was made anew")
	expect.Equal(t, nft(t, ns, "-a", "list", "chain", "inet", "tombolo", "forward"), forwardBefore, "the shared chain was made anew:\n%s", forwardBefore)
}

func TestEnsureFollowsTheMark(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	mustEnsure(t, c, podnet())
	mustAdd(t, c, pod("00000000001", "10.22.0.5"))
	other := dialMark(t, ns, 0x20000)
	checkFinds(t, other, podnet(), []string{
		`chain forward of table inet tombolo: comment (version and settings) is "tombolo rules 1, mark 0x10, 17 in all", should be "tombolo rules 1, mark 0x20000, 17 in all"`,
		`chain unmark of table inet tombolo: comment`,
		`chain loopback-answers of table inet tombolo: comment`,
	})
	expect.Equal(t, mustEnsure(t, other, podnet()), (outcome{Changed: true}))
	if list := nft(t, ns, "list", "ruleset"); strings.Contains(list, "0x00000010") || !strings.Contains(list, "0x00020000") {
		t.Errorf("with another mark:\n%s", list)
	}
	wantReady(t, other, podnet(), pod("00000000001", "10.22.0.5"))
	expect.Of(c.Ready(context.Background(), podnet())).Is(t, false, "Ready with the old mark")
}

func TestEnsureLeavesForeignTablesAlone(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	const foreign = `table ip tombolo {
	chain forward {
		type filter hook forward priority filter; policy accept;
	}
}
table inet tombolo2 {
	chain masq-podnet {
	}
}
`
	nft(t, ns, foreign)
	before := nft(t, ns, "list", "ruleset")
	mustEnsure(t, c, podnet())
	wantReady(t, c, podnet())
	must.Succeed(t, c.RemoveNetwork(context.Background(), "podnet"))
	expect.Equal(t, nft(t, ns, "list", "ruleset"), before, "before:\n%s\nafter", before)
}

func TestEnsureSaysWhyItCannotMend(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	mustEnsure(t, c, podnet())
	// A set of another type, which someone's own chain in our table looks into.
	nft(t, ns, "flush table inet tombolo; delete set inet tombolo pods4; add set inet tombolo pods4 { type ipv4_addr; }; "+
		"add chain inet tombolo own; add rule inet tombolo own ip saddr @pods4 accept")
	_, err := c.Ensure(context.Background(), podnet())
	if !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), "delete set pods4 of table inet tombolo") ||
		!strings.Contains(err.Error(), "a rule that is not ours refers to it") {
		t.Errorf("got %v", err)
	}
}

func TestEverythingNeedsNetAdmin(t *testing.T) {
	t.Parallel()
	c, _ := dialNew(t)
	ctx := context.Background()
	ep := pod("00000000001", "10.22.0.5")
	for what, do := range map[string]func() error{
		"Probe":         func() error { return c.Probe(ctx) },
		"Ensure":        func() error { _, err := c.Ensure(ctx, podnet()); return err },
		"Ready":         func() error { _, err := c.Ready(ctx, podnet()); return err },
		"Check":         func() error { _, err := c.Check(ctx, podnet()); return err },
		"Endpoints":     func() error { _, err := c.Endpoints(ctx, ""); return err },
		"Add":           func() error { return c.Add(ctx, ep) },
		"Replace":       func() error { return c.Replace(ctx, ep) },
		"Remove":        func() error { return c.Remove(ctx, ep) },
		"RemoveOwners":  func() error { return c.RemoveOwners(ctx, ep.Owner) },
		"RemoveNetwork": func() error { return c.RemoveNetwork(ctx, "podnet") },
	} {
		expect.Is(t, withoutNetAdmin(do), fs.ErrPermission, "%s", what)
	}
}

// withoutNetAdmin runs do on a thread that lacks CAP_NET_ADMIN, and that ends with
// it.
func withoutNetAdmin(do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		err := unix.Capget(&header, &data[0])
		if err == nil {
			data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
			err = unix.Capset(&header, &data[0])
		}
		if err == nil {
			err = do()
		}
		done <- err
	}()
	return <-done
}

func TestProbeFindsNFTables(t *testing.T) {
	t.Parallel()
	c, _ := dialNew(t)
	expect.Success(t, c.Probe(t.Context()))
}

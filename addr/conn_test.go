package addr_test

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func ptr[T any](v T) *T { return &v }

// TestRequestBytes compares what is sent with a file that says for each request
// which ip-address(8) command it stands for.
func TestRequestBytes(t *testing.T) {
	t.Parallel()
	p, a := nstest.Prefix, nstest.Addr
	full := addr.Address{Prefix: p("10.1.0.1/24"), Link: 7, Peer: a("10.2.0.1"), Broadcast: a("10.1.0.255"), Label: "eth0:1",
		Scope: unix.RT_SCOPE_LINK, Flags: unix.IFA_F_NOPREFIXROUTE | unix.IFA_F_NODAD | unix.IFA_F_PERMANENT, Valid: ptr(time.Hour), Preferred: ptr(time.Minute),
		Protocol: 9, Metric: 5}
	full6 := full
	full6.Prefix, full6.Peer = p("fd01::1/64"), a("fd02::1")
	var text string
	for _, tt := range []struct {
		command string
		do      func(*addr.Conn) error
	}{
		{"ip address add 10.1.0.1/24 dev 7", func(c *addr.Conn) error { return c.Add(t.Context(), addr.Address{Prefix: p("10.1.0.1/24"), Link: 7}) }},
		{"ip address add fd01::1/64 dev 7 nodad", func(c *addr.Conn) error {
			return c.Add(t.Context(), addr.Address{Prefix: p("fd01::1/64"), Link: 7, Flags: unix.IFA_F_NODAD})
		}},
		{"ip address add 10.1.0.1 peer 10.2.0.1/24 broadcast 10.1.0.255 label eth0:1 scope link dev 7 noprefixroute" +
			" valid_lft 3600 preferred_lft 60 proto 9 metric 5", func(c *addr.Conn) error { return c.Add(t.Context(), full) }},
		{"ip address add fd01::1 peer fd02::1/64 dev 7 nodad noprefixroute valid_lft 3600 preferred_lft 60 proto 9 metric 5",
			func(c *addr.Conn) error { return c.Add(t.Context(), full6) }},
		{"ip address replace 10.1.0.1/24 dev 7 valid_lft 2 preferred_lft 2", func(c *addr.Conn) error {
			return c.Replace(t.Context(), addr.Address{Prefix: p("10.1.0.1/24"), Link: 7, Valid: ptr(1001 * time.Millisecond)})
		}},
		{"ip address replace 10.1.0.1/24 dev 7 preferred_lft 0", func(c *addr.Conn) error {
			return c.Replace(t.Context(), addr.Address{Prefix: p("10.1.0.1/24"), Link: 7, Preferred: ptr(-time.Second)})
		}},
		{"ip address del 10.1.0.1 peer 10.2.0.1/24 dev 7", func(c *addr.Conn) error { return c.Remove(t.Context(), full) }},
		{"ip address del fd01::1/64 dev 7", func(c *addr.Conn) error { return c.Remove(t.Context(), addr.Address{Prefix: p("fd01::1/64"), Link: 7}) }},
		{"ip address show", func(c *addr.Conn) error { _, err := c.List(t.Context(), addr.Filter{}); return err }},
		{"ip -4 address show dev 7", func(c *addr.Conn) error {
			_, err := c.List(t.Context(), addr.Filter{Link: 7, Family: unix.AF_INET})
			return err
		}},
	} {
		rec := nltest.Record(nltest.NewFake(nltest.AckAll))
		expect.Success(t, tt.do(addr.On(nl.New(rec))), "%s", tt.command)
		text += "# " + tt.command + "\n" + nltest.Text(unix.SizeofIfAddrmsg, rec.Sent()...)
	}
	golden.Compare(t, "requests.golden", text)
}

func TestMessagesGoInOneDatagram(t *testing.T) {
	t.Parallel()
	rec := nltest.Record(nltest.NewFake(nltest.AckAll))
	var b nl.Batch
	one := addr.Address{Prefix: nstest.Prefix("10.1.0.1/24"), Link: 7}
	two := addr.Address{Prefix: nstest.Prefix("fd01::1/64"), Link: 7, Flags: unix.IFA_F_NODAD}
	for _, a := range []addr.Address{one, two} {
		m, err := a.Message(unix.RTM_NEWADDR, netlink.Create|netlink.Excl)
		b.Add("change", nil, m, err)
	}
	m, err := one.Message(unix.RTM_DELADDR, 0)
	b.Add("change", nil, m, err)
	must.Succeed(t, nl.New(rec).Execute(&b))
	sent := rec.Sent()
	expect.That(t, len(sent) == 1 && len(nltest.Split(sent[0])) == 3,
		"%d datagrams, want one of three messages", len(sent))
}

func TestAddressThatIsNoneIsNotSent(t *testing.T) {
	t.Parallel()
	for _, a := range []addr.Address{
		{Link: 7},
		{Link: 7, Prefix: nstest.Prefix("10.0.0.0/8").Masked(), Peer: nstest.Addr("10.0.0.1")}, // a control: valid
	} {
		rec := nltest.Record(nltest.NewFake(nltest.AckAll))
		c := addr.On(nl.New(rec))
		valid := a.Prefix.IsValid()
		for _, do := range []func(context.Context, addr.Address) error{c.Add, c.Replace, c.Remove,
			func(ctx context.Context, a addr.Address) error { _, err := c.Ensure(ctx, a); return err }} {
			err := do(t.Context(), a)
			expect.That(t, (err == nil) == valid, "%s: %v", a, err)
		}
		sent := rec.Sent()
		expect.That(t, (len(sent) > 0) == valid, "%s: %d datagrams sent", a, len(sent))
	}
}

func TestEnsurePassesErrorsOn(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	there := addr.Address{Prefix: nstest.Prefix("10.1.0.1/24"), Link: 1}
	there6 := addr.Address{Prefix: nstest.Prefix("fd01::1/64"), Link: 1, Flags: unix.IFA_F_NODAD}
	moved := there6
	moved.Prefix = nstest.Prefix("fd01::1/48")
	labelled := there
	labelled.Label = "lo:1"
	metric := there
	metric.Metric = 7
	plain, err := addr.Dial(ns)
	must.Succeed(t, err)
	defer plain.Close()
	for _, a := range []addr.Address{there, there6} {
		must.Succeed(t, plain.Add(t.Context(), a))
	}
	for _, tt := range []struct {
		name  string
		want  addr.Address
		fault *nltest.Fault
	}{
		{"adding", there, &nltest.Fault{Type: unix.RTM_NEWADDR, Errno: unix.EPERM}},
		{"looking for an IPv4 address", there, &nltest.Fault{Type: unix.RTM_GETADDR, Errno: unix.EPERM}},
		{"looking for an IPv6 address", there6, &nltest.Fault{Type: unix.RTM_GETADDR, Errno: unix.EPERM}},
		{"replacing", metric, &nltest.Fault{Type: unix.RTM_NEWADDR, Nth: 2, Errno: unix.EPERM}},
		{"deleting the old one", labelled, &nltest.Fault{Type: unix.RTM_DELADDR, Errno: unix.EPERM}},
		{"adding in its place", labelled, &nltest.Fault{Type: unix.RTM_NEWADDR, Nth: 2, Errno: unix.EPERM}},
		{"adding in an IPv6 address's place", moved, &nltest.Fault{Type: unix.RTM_NEWADDR, Nth: 2, Errno: unix.EPERM}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			nltest.MustHaveFired(t, tt.fault)
			conn := nltest.Dial(t, unix.NETLINK_ROUTE, ns, tt.fault)
			changed, err := addr.On(conn).Ensure(t.Context(), tt.want)
			expect.That(t, !changed && errors.Is(err, unix.EPERM),
				"Ensure: changed %t, %v, want %v", changed, err, unix.EPERM)
			// Whatever failed, what was there is there.
			for _, a := range []addr.Address{there, there6} {
				expect.Of(plain.Ensure(t.Context(), a)).Is(t, false, "%s afterwards", a)
			}
		})
	}
}

func TestInterruptedListIsTriedAgain(t *testing.T) {
	t.Parallel()
	fault := &nltest.Fault{Type: unix.RTM_GETADDR, Interrupt: true, Times: 3}
	conn := nltest.Dial(t, unix.NETLINK_ROUTE, nstest.New(t), fault)
	c := addr.On(conn)
	a := addr.Address{Prefix: nstest.Prefix("10.1.0.1/24"), Link: 1}
	must.Succeed(t, c.Add(t.Context(), a))
	list, err := c.List(t.Context(), addr.Filter{})
	expect.That(t, err == nil && len(list) == 1 && fault.Fired() == 3,
		"listed %v, %v, after %d interruptions, want %s after 3", list, err, fault.Fired(), a)
}

// A kernel without IPv6 answers for IPv6 as if it were asked for all families.
func TestListIsOfTheFamilyThatWasAskedFor(t *testing.T) {
	t.Parallel()
	data := nltest.Body([]byte{unix.AF_INET, 24, 0, 0, 1, 0, 0, 0}, func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, unix.IFA_LOCAL, nstest.Addr("10.1.0.1")) })
	c := addr.On(nl.New(nltest.NewFake(func(r []netlink.Message) [][]byte {
		return [][]byte{nltest.Reply(r[0], unix.RTM_NEWADDR, unix.NLM_F_MULTI, data), nltest.Done(r[0], 0)}
	})))
	for family, want := range map[uint8]int{0: 1, unix.AF_INET: 1, unix.AF_INET6: 0} {
		expect.Of(c.List(t.Context(), addr.Filter{Family: family})).Len(t, want, "family %d: listed", family)
	}
}

func TestListRefusesWhatIsMalformed(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		data []byte
	}{
		{"short", []byte{2, 24, 0, 0}},
		{"no address", []byte{2, 24, 0, 0, 1, 0, 0, 0}},
		{"an address of another family", nltest.Body([]byte{10, 24, 0, 0, 1, 0, 0, 0}, func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, unix.IFA_ADDRESS, nstest.Addr("10.1.0.1")) })},
		{"a prefix too long", nltest.Body([]byte{2, 33, 0, 0, 1, 0, 0, 0}, func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, unix.IFA_ADDRESS, nstest.Addr("10.1.0.1")) })},
		{"a peer of another family", nltest.Body([]byte{2, 32, 0, 0, 1, 0, 0, 0}, func(ae *netlink.AttributeEncoder) {
			nl.PutAddr(ae, unix.IFA_LOCAL, nstest.Addr("10.1.0.1"))
			nl.PutAddr(ae, unix.IFA_ADDRESS, nstest.Addr("fd01::1"))
		})},
		{"lifetimes cut short", nltest.Body([]byte{2, 32, 0, 0, 1, 0, 0, 0}, func(ae *netlink.AttributeEncoder) {
			ae.Bytes(unix.IFA_CACHEINFO, []byte{1, 2, 3})
		})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := addr.On(nl.New(nltest.NewFake(func(r []netlink.Message) [][]byte {
				return [][]byte{nltest.Reply(r[0], unix.RTM_NEWADDR, unix.NLM_F_MULTI, tt.data), nltest.Done(r[0], 0)}
			})))
			list, err := c.List(t.Context(), addr.Filter{})
			expect.That(t, errors.Is(err, nl.ErrMalformed), "listed %v, %v, want %v", list, err, nl.ErrMalformed)
		})
	}
}

func TestAddressIsNamedInErrors(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		a    addr.Address
		want string
	}{
		{addr.Address{Prefix: nstest.Prefix("10.1.0.1/24"), Link: 3}, "10.1.0.1/24 on link 3"},
		{addr.Address{Prefix: nstest.Prefix("10.1.0.1/30"), Peer: nstest.Addr("10.1.0.2"), Link: 3}, "10.1.0.1 peer 10.1.0.2/30 on link 3"},
		{addr.Address{Link: 3}, "invalid Prefix on link 3"},
	} {
		expect.Equal(t, tt.a.String(), tt.want)
	}
}

func TestBroadcastAddresses(t *testing.T) {
	t.Parallel()
	for prefix, want := range map[string]string{"10.9.0.32/24": "10.9.0.255", "10.9.1.1/16": "10.9.255.255", "10.9.0.33/30": "10.9.0.35", "10.9.0.32/20": "10.9.15.255"} {
		got := addr.Broadcast(netip.MustParsePrefix(prefix))
		expect.That(t, got.String() == want, "of %s: %s, want %s", prefix, got, want)
	}
	for _, prefix := range []string{"10.9.0.32/31", "10.9.0.32/32", "fd00::1/64", "::ffff:10.0.0.1/120"} {
		got := addr.Broadcast(netip.MustParsePrefix(prefix))
		expect.That(t, !got.IsValid(), "of %s: %s, want none", prefix, got)
	}
}

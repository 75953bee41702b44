package nft

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// tcpPort publishes a TCP port of the pod's 80; host is "" for all addresses of both
// families.
func tcpPort(host string, port uint16) Port {
	p := Port{Protocol: TCP, HostPort: port, PodPort: 80}
	if host != "" {
		p.HostAddr = nstest.Addr(host)
	}
	return p
}

// publisher is the i-th dual-stack pod, with ports.
func publisher(i int, ports ...Port) Endpoint {
	ep := pod(Owner(fmt.Sprintf("%011x", i)), fmt.Sprintf("10.22.%d.%d", i>>8, i&255), fmt.Sprintf("fd00:22::%x", i))
	ep.Ports = ports
	return ep
}

func TestPortNamesItself(t *testing.T) {
	t.Parallel()
	for want, p := range map[string]Port{
		"8080/tcp":                {Protocol: TCP, HostPort: 8080},
		"192.0.2.1:8080/udp":      {Protocol: UDP, HostPort: 8080, HostAddr: nstest.Addr("192.0.2.1")},
		"0.0.0.0:8080/tcp":        {Protocol: TCP, HostPort: 8080, HostAddr: nstest.Addr("0.0.0.0")},
		"[2001:db8::1]:8080/sctp": {Protocol: SCTP, HostPort: 8080, HostAddr: nstest.Addr("2001:db8::1")},
		"8080/1":                  {Protocol: 1, HostPort: 8080},
	} {
		expect.Equal(t, p.String(), want)
	}
}

func TestImpossiblePortsAreRefused(t *testing.T) {
	t.Parallel()
	both := nstest.Addrs("10.22.0.5", "fd00:22::5")
	for _, tc := range []struct {
		name  string
		addrs []netip.Addr
		ports []Port
		why   string
	}{
		{"another protocol", both, []Port{{Protocol: 1, HostPort: 1, PodPort: 1}}, "protocol 1"},
		{"no host port", both, []Port{{Protocol: TCP, PodPort: 1}}, "port 0"},
		{"no pod port", both, []Port{{Protocol: TCP, HostPort: 1}}, "port 0"},
		{"multicast", both, []Port{tcpPort("224.0.0.1", 1)}, "no address"},
		{"a zone", both, []Port{tcpPort("fe80::1%eth0", 1)}, "no address"},
		{"link-local", both, []Port{tcpPort("fe80::1", 1)}, "no address"},
		{"IPv4 in IPv6", both, []Port{tcpPort("::ffff:192.0.2.1", 1)}, "no address"},
		{"IPv6 loopback", both, []Port{tcpPort("::1", 1)}, "use 127.0.0.1"},
		{"a pod without addresses", nil, []Port{tcpPort("", 1)}, "no address"},
		{"one port to two of the pod's", both, []Port{
			{Protocol: TCP, HostPort: 8080, PodPort: 80}, {Protocol: TCP, HostPort: 8080, PodPort: 81},
		}, "8080/tcp is to lead both to 10.22.0.5:80 and to 10.22.0.5:81"},
		{"one address to two of the pod's", both, []Port{
			{Protocol: TCP, HostAddr: nstest.Addr("2001:db8::1"), HostPort: 8080, PodPort: 80},
			{Protocol: TCP, HostAddr: nstest.Addr("2001:db8::1"), HostPort: 8080, PodPort: 81},
		}, "[2001:db8::1]:8080/tcp is to lead both"},
		{"all addresses, and one to another", both, []Port{
			{Protocol: TCP, HostAddr: nstest.Addr("192.0.2.1"), HostPort: 8080, PodPort: 81},
			{Protocol: TCP, HostAddr: nstest.Addr("192.0.2.2"), HostPort: 8080, PodPort: 80},
			{Protocol: TCP, HostPort: 8080, PodPort: 80},
		}, "192.0.2.1:8080/tcp is to lead both"},
	} {
		ep := Endpoint{Owner: "0", Network: "podnet", Bridge: "cbr0", Addrs: tc.addrs, MAC: make([]byte, 6), Ports: tc.ports}
		err := ep.check()
		expect.That(t, errors.Is(err, tombolo.ErrInvalid) && strings.Contains(err.Error(), tc.why), "%s: %v", tc.name, err)
	}
}

func TestPortsAreAddedAndRemoved(t *testing.T) {
	t.Parallel()
	both := nstest.Addrs("10.22.0.5", "fd00:22::5")
	for name, tc := range map[string]struct {
		addrs []netip.Addr
		ports []Port
	}{
		"all addresses":           {both, []Port{tcpPort("", 8080), tcpPort("", 8081)}},
		"all of one family":       {both, []Port{tcpPort("0.0.0.0", 8080), tcpPort("::", 8081)}},
		"single ones":             {both, []Port{tcpPort("127.0.0.1", 8080), tcpPort("192.0.2.1", 8080), tcpPort("2001:db8::1", 8080)}},
		"one of the other family": {nstest.Addrs("10.22.0.5"), []Port{tcpPort("2001:db8::1", 8080)}},
		"twice the same":          {nstest.Addrs("10.22.0.5"), []Port{tcpPort("", 8080), tcpPort("", 8080)}},
		"one that all include":    {nstest.Addrs("10.22.0.5"), []Port{tcpPort("192.0.2.1", 8080), tcpPort("", 8080), tcpPort("192.0.2.2", 8080)}},
		"further addresses":       {nstest.Addrs("10.22.0.5", "10.22.0.6"), []Port{tcpPort("", 8080)}},
		"other protocols":         {nstest.Addrs("10.22.0.5"), []Port{tcpPort("", 8080), {Protocol: UDP, HostPort: 8080, PodPort: 53}, {Protocol: SCTP, HostPort: 8080, PodPort: 65535}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, _ := dialNew(t)
			mustEnsure(t, c, podnet())
			ep := pod("0123456789a")
			ep.Addrs, ep.Ports = tc.addrs, tc.ports
			mustAdd(t, c, ep)
			wantReady(t, c, podnet(), ep)
			expect.Success(t, c.Replace(context.Background(), ep))
			must.Succeed(t, c.Remove(context.Background(), ep))
			wantNoElements(t, c)
		})
	}
}

// wantNoElements checks that nothing of endpoints is left.
func wantNoElements(tb testing.TB, c *Conn) {
	tb.Helper()
	all := must.Of(c.elements(context.Background())).Get(tb)
	for _, el := range all {
		expect.That(tb, strings.HasPrefix(el.Comment, ruleset.OwnerPrefix+":"),
			"%s (comment %q) is left", el, el.Comment)
	}
}

func TestTakenPortIsRefused(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	udp := tcpPort("", 8080)
	udp.Protocol = unix.IPPROTO_UDP
	for _, tc := range []struct {
		name         string
		theirs, mine Port
		port, key    string // of the error; "" if there is room for both
	}{
		{"all and all", tcpPort("", 8080), tcpPort("", 8080), "8080/tcp", "tcp . 8080"},
		{"all and all of IPv4", tcpPort("", 8080), tcpPort("0.0.0.0", 8080), "0.0.0.0:8080/tcp", "tcp . 8080"},
		{"all and all of IPv6", tcpPort("", 8080), tcpPort("::", 8080), "[::]:8080/tcp", "tcp . 8080"},
		{"all of IPv6 and all", tcpPort("::", 8080), tcpPort("", 8080), "8080/tcp", "tcp . 8080"},
		{"one and the same", tcpPort("192.0.2.1", 8080), tcpPort("192.0.2.1", 8080), "192.0.2.1:8080/tcp", "192.0.2.1 . tcp . 8080"},
		{"one and the same of IPv6", tcpPort("2001:db8::1", 8080), tcpPort("2001:db8::1", 8080), "[2001:db8::1]:8080/tcp", "2001:db8::1 . tcp . 8080"},
		{"all and one", tcpPort("", 8080), tcpPort("192.0.2.1", 8080), "192.0.2.1:8080/tcp", "tcp . 8080"},
		{"all and one of IPv6", tcpPort("", 8080), tcpPort("2001:db8::1", 8080), "[2001:db8::1]:8080/tcp", "tcp . 8080"},
		{"all of IPv4 and one", tcpPort("0.0.0.0", 8080), tcpPort("192.0.2.1", 8080), "192.0.2.1:8080/tcp", "tcp . 8080"},
		{"one and all", tcpPort("192.0.2.1", 8080), tcpPort("", 8080), "8080/tcp", "192.0.2.1 . tcp . 8080"},
		{"one of IPv6 and all", tcpPort("2001:db8::1", 8080), tcpPort("", 8080), "8080/tcp", "2001:db8::1 . tcp . 8080"},
		{"one and all of IPv4", tcpPort("127.0.0.1", 8080), tcpPort("0.0.0.0", 8080), "0.0.0.0:8080/tcp", "127.0.0.1 . tcp . 8080"},
		{"all of each family", tcpPort("0.0.0.0", 8080), tcpPort("::", 8080), "", ""},
		{"one and all of the other family", tcpPort("192.0.2.1", 8080), tcpPort("::", 8080), "", ""},
		{"all and one of the other family", tcpPort("::", 8080), tcpPort("192.0.2.1", 8080), "", ""},
		{"one and another", tcpPort("192.0.2.1", 8080), tcpPort("192.0.2.2", 8080), "", ""},
		{"another port", tcpPort("", 8080), tcpPort("", 8081), "", ""},
		{"another port of one", tcpPort("", 8080), tcpPort("192.0.2.1", 8081), "", ""},
		{"another protocol", tcpPort("", 8080), udp, "", ""},
		{"another protocol of one", udp, tcpPort("192.0.2.1", 8080), "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c, _ := dialNew(t)
			mustEnsure(t, c, podnet())
			theirs, mine := publisher(1, tc.theirs), publisher(2, tc.mine)
			mustAdd(t, c, theirs)
			err := c.Add(ctx, mine)
			if tc.port == "" {
				must.Succeed(t, err)
				wantEndpoints(t, c, theirs, mine)
				return
			}
			var conflict *ConflictError
			if !errors.As(err, &conflict) || !errors.Is(err, fs.ErrExist) ||
				conflict.Port != tc.port || !strings.HasSuffix(conflict.Element, " { "+tc.key+" }") || conflict.Owner != theirs.Owner || conflict.Network != "podnet" {
				t.Errorf("got %#v", err)
			}
			// Nothing of it is there, nor of what it was found out with.
			wantEndpoints(t, c, theirs)
			wantReady(t, c, podnet(), theirs)
			// What a caller does that knows that the owner is dead.
			must.Succeed(t, c.Replace(ctx, mine))
			wantReady(t, c, podnet(), mine)
			must.Succeed(t, c.RemoveOwners(ctx, theirs.Owner))
			wantEndpoints(t, c, mine)
			expect.Is(t, c.Add(ctx, theirs), fs.ErrExist, "after the port was taken over")
			must.Succeed(t, c.Remove(ctx, mine))
			wantNoElements(t, c)
			mustAdd(t, c, theirs)
		})
	}
}

func TestPortOfSomebodyElsesElementIsRefused(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	mustEnsure(t, c, podnet())
	nft(t, ns, `add element inet tombolo hostports4 { tcp . 8080 comment "by hand" : 192.0.2.7 . 80 }; `+
		`add element inet tombolo hostaddrs6 { 2001:db8::1 . tcp . 8081 : fd00::7 . 80 }`)
	for port, ep := range map[string]Endpoint{
		"8080/tcp":           publisher(1, tcpPort("", 8080)),
		"192.0.2.1:8080/tcp": publisher(2, tcpPort("192.0.2.1", 8080)),
		"8081/tcp":           publisher(3, tcpPort("", 8081)),
	} {
		var conflict *ConflictError
		err := c.Add(context.Background(), ep)
		expect.That(t, errors.As(err, &conflict) && conflict.Port == port && conflict.Owner == "", "%s: %v", port, err)
	}
}

func TestPortConflictReadsWell(t *testing.T) {
	t.Parallel()
	e := ConflictError{
		Element: "inet tombolo hostaddrs4 { 192.0.2.1 . tcp . 8080 }",
		Owner:   "00000000001", Network: "podnet", Port: "8080/tcp",
	}
	const want = "publish port 8080/tcp: element inet tombolo hostaddrs4 { 192.0.2.1 . tcp . 8080 } " +
		"stands in its way, and belongs to endpoint 00000000001 of network podnet"
	expect.Equal(t, e.Error(), want)
}

func TestReplaceOfContradictingEndpointsFails(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, ports := range [][2]Port{
		{tcpPort("", 8080), tcpPort("", 8080)},
		{tcpPort("", 8080), tcpPort("192.0.2.1", 8080)},
		{tcpPort("192.0.2.1", 8080), tcpPort("", 8080)},
	} {
		c, _ := dialNew(t)
		mustEnsure(t, c, podnet())
		eps := []Endpoint{publisher(1, ports[0]), publisher(2, ports[1])}
		expect.Is(t, c.Replace(ctx, eps...), fs.ErrExist, "%v at once", ports)
		mustAdd(t, c, eps[0])
		expect.Is(t, c.Replace(ctx, eps...), fs.ErrExist, "%v at once, of which one is there", ports)
		wantEndpoints(t, c, eps[0])
	}
}

// Every pod has ports on all addresses and on one; some share the number on others.
func TestReplaceBringsPortsBack(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	mustEnsure(t, c, podnet())
	var eps []Endpoint
	for i := range 200 {
		eps = append(eps, publisher(i+1,
			tcpPort("", uint16(1000+i)), tcpPort("192.0.2.1", uint16(2000+i)), tcpPort(fmt.Sprintf("192.0.2.%d", i+2), 80), tcpPort("2001:db8::1", uint16(2000+i))))
	}
	mustAdd(t, c, eps...)
	wantEndpoints(t, c, eps...)
	nft(t, ns, "delete table inet tombolo")
	mustEnsure(t, c, podnet())
	must.Succeed(t, c.Replace(ctx, eps...))
	wantEndpoints(t, c, eps...)
	generation := mustGeneration(t, c)
	must.Succeed(t, c.Replace(ctx, eps...))
	expect.Equal(t, mustGeneration(t, c), generation, "after a Replace of what is there")
	wantReady(t, c, podnet(), eps...)
	must.Succeed(t, c.RemoveNetwork(ctx, "podnet"))
	expect.Equal(t, nft(t, ns, "list", "ruleset"), "", "left")
}

func TestOneOfManyGetsThePort(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		port func(i int) Port
		// together says that two may both get it.
		together func(i, j int) bool
	}{
		{"all addresses", func(int) Port { return tcpPort("", 8080) }, func(i, j int) bool { return i == j }},
		{"one address", func(int) Port { return tcpPort("192.0.2.1", 8080) }, func(i, j int) bool { return i == j }},
		{"all and single ones", func(i int) Port {
			if i%2 == 0 {
				return tcpPort("", 8080)
			}
			return tcpPort(fmt.Sprintf("192.0.2.%d", i), 8080)
		}, func(i, j int) bool { return i == j || i%2 == 1 && j%2 == 1 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			const racers = 16
			conns := many(t, racers)
			c := conns[0]
			mustEnsure(t, c, podnet())
			for range 10 {
				errs := nstest.AtOnce(conns, func(i int, c *Conn) error {
					return c.Add(context.Background(), publisher(i+1, tc.port(i)))
				})
				var winners []int
				for i, err := range errs {
					switch {
					case err == nil:
						winners = append(winners, i)
					case !errors.Is(err, fs.ErrExist):
						t.Errorf("racer %d: %v", i, err)
					}
				}
				expect.That(t, len(winners) > 0, "nobody got it")
				var owners []Owner
				for _, i := range winners {
					owners = append(owners, publisher(i+1).Owner)
					expect.That(t, tc.together(winners[0], i), "racers %v all got it", winners)
				}
				must.Succeed(t, c.RemoveOwners(context.Background(), owners...))
				wantNoElements(t, c)
			}
		})
	}
}

// Ports come and go while others that exclude them do the same.
func TestPortsExcludeEachOtherInChurn(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	conns := many(t, 6)
	mustEnsure(t, conns[0], podnet())
	nstest.NoErrors(t, "churn", nstest.AtOnce(conns, func(i int, c *Conn) error {
		p := tcpPort("", 8080)
		if i > 1 {
			p = tcpPort(fmt.Sprintf("192.0.2.%d", i), 8080)
		}
		ep := publisher(i+1, p)
		for range 50 {
			err := c.Add(ctx, ep)
			if errors.Is(err, fs.ErrExist) {
				continue
			}
			if err == nil {
				err = mustExclude(c, ep)
			}
			if err == nil {
				err = c.Remove(ctx, ep)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}))
	wantNoElements(t, conns[0])
}

// mustExclude checks that nobody has what excludes an endpoint's ports.
func mustExclude(c *Conn, ep Endpoint) error {
	excluding, err := c.findExcluding(ep.elements())
	if err != nil && !nftnl.IsOvertaken(err) {
		return err
	}
	if err == nil && len(excluding) > 0 {
		return fmt.Errorf("%s has %v, and %s is there too", ep.Owner, ep.Ports, excluding[0])
	}
	return nil
}

func TestNumberOfRulesDoesNotDependOnPorts(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	mustEnsure(t, c, podnet())
	count := func() (rules int, sets []string) {
		all := listing(t, ns)
		for _, s := range slices.Concat(all["set"], all["map"]) {
			ofCallers := regexp.MustCompile("^(refused|excepted)[46]$").MatchString(s["name"].(string)) // which these pods do not limit
			if s["flags"] != nil && (!ofCallers || len(s["elem"].([]any)) > 1) || s["type"] == "verdict" {
				t.Errorf("set %v is no plain hash set", s["name"])
			}
			sets = append(sets, s["name"].(string))
		}
		return len(all["rule"]), sets
	}
	rules, sets := count()
	ports := func(i int) []Port { return []Port{tcpPort("", uint16(1000+i)), tcpPort("192.0.2.1", uint16(3000+i))} }
	for i := range 1000 {
		mustAdd(t, c, publisher(i+1, ports(i)...))
	}
	if n, s := count(); n != rules || !slices.Equal(s, sets) {
		t.Errorf("%d rules and sets %v at 2,000 ports, %d and %v at none", n, s, rules, sets)
	}
}

func TestCheckTellsWhatIsWrongWithPorts(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	ep := publisher(5, tcpPort("0.0.0.0", 8080), tcpPort("192.0.2.1", 8081))
	for _, tc := range []struct{ do, want string }{
		{"delete element inet tombolo hostports4 { tcp . 8080 }",
			"set hostports4 of table inet tombolo: element tcp . 8080 is missing"},
		{`delete element inet tombolo hostports4 { tcp . 8080 }; add element inet tombolo hostports4 { tcp . 8080 : 10.22.0.6 . 81 }`,
			"set hostports4 of table inet tombolo: data of element tcp . 8080 is 10.22.0.6 . 81, should be 10.22.0.5 . 80"},
		{"delete element inet tombolo hostaddrs4 { 192.0.2.1 . tcp . 8081 }",
			"set hostaddrs4 of table inet tombolo: element 192.0.2.1 . tcp . 8081 is missing"},
		{"delete element inet tombolo published4 { cbr0 . 10.22.0.5 . tcp . 80 }",
			"set published4 of table inet tombolo: element cbr0 . 10.22.0.5 . tcp . 80 is missing"},
		{"delete element inet tombolo selves4 { cbr0 . 10.22.0.5 . 10.22.0.5 }",
			"set selves4 of table inet tombolo: element cbr0 . 10.22.0.5 . 10.22.0.5 is missing"},
	} {
		c, ns := dialNew(t)
		mustEnsure(t, c, podnet())
		mustAdd(t, c, ep)
		nft(t, ns, tc.do)
		diffs, err := checkAll(c, podnet(), ep)
		expect.That(t, err == nil && len(diffs) == 1 && fmt.Sprint(diffs[0]) == tc.want,
			"%s: got %v, %v; want %s", tc.do, diffs, err, tc.want)
		expect.Success(t, c.Replace(ctx, ep), "%s", tc.do)
		wantReady(t, c, podnet(), ep)
	}
}

// Names are as nft prints them, for messages that send the operator there.
func TestElementsReadAsNFTPrintsThem(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	n := podnet()
	n.Bridge, n.Policy = "cbr0", Isolated
	mustEnsure(t, c, n)
	ep := publisher(5, tcpPort("", 8080), tcpPort("192.0.2.1", 8081), tcpPort("2001:db8::1", 8081))
	ep.Ports[1].Protocol, ep.Ports[2].Protocol = unix.IPPROTO_UDP, unix.IPPROTO_SCTP
	mustAdd(t, c, ep)
	all, err := c.elements(context.Background())
	must.That(t, err == nil && len(all) > 0, "%v", err)
	printed := strings.ReplaceAll(nft(t, ns, "list", "ruleset"), `"`, "")
	for _, el := range all {
		want := el.KeyText() + " comment " + el.Comment
		if len(el.Data) > 0 {
			want += " : " + el.DataText()
		}
		expect.That(t, strings.Contains(printed, want), "%s: no %q in what nft prints", el, want)
	}
}

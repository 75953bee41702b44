package nft

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

func TestKernelErrorsNameWhatFailed(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	ep := pod("00000000001", "10.22.0.5")
	onlyPort := ep
	onlyPort.Ports = []Port{tcpPort("192.0.2.1", 8080)}
	onAll := ep
	onAll.Ports = []Port{tcpPort("", 8080)}
	onBridge := func() Network { n := podnet(); n.Bridge = "cbr0"; return n }
	ensure := func(c *Conn) error { _, err := c.Ensure(ctx, podnet()); return err }
	add := func(c *Conn) error { return c.Add(ctx, ep) }
	remove := func(c *Conn) error { return c.Remove(ctx, ep) }
	for _, tc := range []struct {
		msg  uint16
		have int // before: 0 nothing, 1 the network, 2 the endpoint too
		do   func(*Conn) error
		want string
	}{
		{unix.NFT_MSG_GETGEN, 0, ensure, "get generation of nf_tables: "},
		{unix.NFT_MSG_GETTABLE, 0, ensure, "get inet tombolo: "},
		{unix.NFT_MSG_GETCHAIN, 0, ensure, "get chain forward of table inet tombolo: "},
		{unix.NFT_MSG_GETSET, 0, ensure, "get set pods4 of table inet tombolo: "},
		{unix.NFT_MSG_GETRULE, 0, ensure, "list rules: "},
		{unix.NFT_MSG_NEWTABLE, 0, ensure, "add table inet tombolo: "},
		{unix.NFT_MSG_NEWSET, 0, ensure, "add set pods4 of table inet tombolo: "},
		{unix.NFT_MSG_NEWCHAIN, 0, ensure, "add chain forward of table inet tombolo: "},
		{unix.NFT_MSG_NEWRULE, 0, ensure, `add rule "clear the mark bit of packets from our bridges" to chain forward of table inet tombolo: `},
		{unix.NFT_MSG_NEWSETELEM, 1, add, "add element cbr0 . 10.22.0.5 of set pods4: "},
		{unix.NFT_MSG_GETSETELEM, 2, remove, "get cbr0 . 10.22.0.5 of set pods4: "},
		{unix.NFT_MSG_DELSETELEM, 2, remove, "delete element cbr0 . 10.22.0.5 of set pods4: "},
		{unix.NFT_MSG_GETSET, 1, func(c *Conn) error { return c.RemoveOwners(ctx, ep.Owner) }, "list sets: "},
		{unix.NFT_MSG_GETSETELEM, 1, func(c *Conn) error { _, err := c.Endpoints(ctx, ""); return err }, "list elements of set pods4: "},
		{unix.NFT_MSG_GETCHAIN, 1, func(c *Conn) error { return c.RemoveNetwork(ctx, "podnet") }, "list chains: "},
		{unix.NFT_MSG_DELTABLE, 1, func(c *Conn) error { return c.RemoveNetwork(ctx, "podnet") }, "delete table inet tombolo: "},
		{unix.NFT_MSG_GETTABLE, 1, func(c *Conn) error { _, err := c.Ready(ctx, podnet()); return err }, "get inet tombolo: "},
		{unix.NFT_MSG_GETSETELEM, 1, func(c *Conn) error { _, err := checkAll(c, podnet(), ep); return err }, "get /sentinel . 0.0.0.0 of set pods4: "},
		{unix.NFT_MSG_NEWSETELEM, 0, ensure, "add element /sentinel . 0.0.0.0 of set pods4: "},
		{unix.NFT_MSG_GETSETELEM, 1, func(c *Conn) error { _, err := c.Ready(ctx, onBridge()); return err }, "get cbr0 . cbr0 of set bridges: "},
		{unix.NFT_MSG_NEWSETELEM, 1, func(c *Conn) error { _, err := c.Ensure(ctx, onBridge()); return err }, "add element cbr0 . cbr0 of set bridges: "},
		{unix.NFT_MSG_NEWSETELEM, 1, func(c *Conn) error { return c.Add(ctx, onlyPort) }, "add element cbr0 . 10.22.0.5 of set pods4: "},
		{unix.NFT_MSG_GETSETELEM, 1, func(c *Conn) error { return c.Add(ctx, onAll) }, "list elements of set hostaddrs4: "},
		{unix.NFT_MSG_DELSETELEM, 2, func(c *Conn) error { return c.Move(ctx, ep, pod("00000000001", "10.22.0.6")) }, "delete element cbr0 . 10.22.0.5 of set pods4: "},
		{unix.NFT_MSG_GETSETELEM, 1, func(c *Conn) error { return c.Replace(ctx, ep) }, "get cbr0 . 10.22.0.5 of set pods4: "},
	} {
		nstest.RunParallel(t, tc.want, func(t *testing.T) {
			fault := &nltest.Fault{Type: messageType(tc.msg), Errno: unix.ENOMEM, Text: "made up"}
			ns := nstest.New(t)
			good, bad := dial(t, ns), dialFaulty(t, ns, fault)
			if tc.have >= 1 {
				mustEnsure(t, good, podnet())
			}
			if tc.have >= 2 {
				mustAdd(t, good, ep)
			}
			before := nft(t, ns, "list", "ruleset")
			err := tc.do(bad)
			var opErr *tombolo.OpError
			expect.That(t, errors.As(err, &opErr) && errors.Is(err, unix.ENOMEM) && opErr.Message == "made up" &&
				strings.HasPrefix(err.Error(), tc.want),
				"got %v, want %s…", err, tc.want)
			expect.Equal(t, nft(t, ns, "list", "ruleset"), before, "what failed changed something:\n%s", before)
		})
	}
}

func TestLostRacesAreTriedAgain(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	ep := pod("00000000001", "10.22.0.5")
	for _, tc := range []struct {
		name  string
		fault *nltest.Fault
		do    func(*Conn) error
	}{
		{"Ensure over another change", &nltest.Fault{Type: unix.NFNL_MSG_BATCH_BEGIN, Nth: 2, Errno: unix.ERESTART},
			func(c *Conn) error { _, err := c.Ensure(ctx, podnet()); return err }},
		{"Ensure over an interrupted listing", &nltest.Fault{Type: messageType(unix.NFT_MSG_GETRULE), Times: 25, Interrupt: true},
			func(c *Conn) error { _, err := c.Ensure(ctx, podnet()); return err }},
		{"Add to an element that goes meanwhile", &nltest.Fault{Type: messageType(unix.NFT_MSG_NEWSETELEM), Times: 1, Errno: unix.EEXIST},
			func(c *Conn) error { return c.Add(ctx, ep) }},
		{"Add of a port to one that goes meanwhile", &nltest.Fault{Type: messageType(unix.NFT_MSG_NEWSETELEM), Nth: 2, Times: 1, Errno: unix.EEXIST},
			func(c *Conn) error { return c.Add(ctx, publisher(1, tcpPort("192.0.2.1", 8080))) }},
		{"Replace over another change", &nltest.Fault{Type: unix.NFNL_MSG_BATCH_BEGIN, Nth: 2, Errno: unix.ERESTART},
			func(c *Conn) error { return c.Replace(ctx, ep) }},
		{"Remove over other changes", &nltest.Fault{Type: unix.NFNL_MSG_BATCH_BEGIN, Times: 20, Errno: unix.ERESTART},
			func(c *Conn) error { mustAdd(t, c, ep); return c.Remove(ctx, ep) }},
		{"RemoveNetwork over another change", &nltest.Fault{Type: unix.NFNL_MSG_BATCH_BEGIN, Times: 1, Errno: unix.ERESTART},
			func(c *Conn) error { return c.RemoveNetwork(ctx, "podnet") }},
		{"Endpoints over an interrupted listing", &nltest.Fault{Type: messageType(unix.NFT_MSG_GETSETELEM), Times: 25, Interrupt: true},
			func(c *Conn) error { _, err := c.Endpoints(ctx, ""); return err }},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			ns := nstest.New(t)
			good := dial(t, ns)
			if !strings.HasPrefix(tc.name, "Ensure") {
				mustEnsure(t, good, podnet())
			}
			expect.Success(t, tc.do(dialFaulty(t, ns, tc.fault)))
		})
	}
}

func TestKernelWithoutAnExpressionIsNamed(t *testing.T) {
	t.Parallel()
	fault := &nltest.Fault{Type: messageType(unix.NFT_MSG_NEWRULE), Errno: unix.ENOENT}
	_, err := dialFaulty(t, nstest.New(t), fault).Ensure(context.Background(), podnet())
	expect.That(t, errors.Is(err, unix.ENOENT) && strings.Contains(err.Error(), "CONFIG_NFT_FIB_INET"), "got %v", err)
}

func TestRaceThatIsAlwaysLostIsGivenUp(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	fault := &nltest.Fault{Type: unix.NFNL_MSG_BATCH_BEGIN, Errno: unix.ERESTART}
	c := dialFaulty(t, ns, fault)
	_, err := c.Ensure(context.Background(), podnet())
	expect.That(t, errors.Is(err, unix.ERESTART) && strings.Contains(err.Error(), "gave up after 200 tries"),
		"got %v", err)
	expect.That(t, fault.Fired() == 200, "%d tries, want 200", fault.Fired())
}

func TestCheckLooksAgainBeforeItReports(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	c := dial(t, ns)
	mustEnsure(t, c, podnet())
	// What it reads is torn, so that the only chain that is missing is no finding.
	missing := &nltest.Fault{Type: messageType(unix.NFT_MSG_GETCHAIN), Times: 1, Errno: unix.ENOENT}
	changed := &nltest.Fault{Type: unix.NFNL_MSG_BATCH_BEGIN, Nth: 2, Errno: unix.ERESTART}
	expect.Of(dialFaulty(t, ns, missing, changed).Check(context.Background(), podnet())).Len(t, 0)
}

// The kernel shows an element twice where it lacks another one.
func TestListingWithAnElementTwiceIsAskedForAgain(t *testing.T) {
	t.Parallel()
	elements := elementsOf(pod("00000000001", "10.22.0.5"), pod("00000000002", "10.22.0.6"))
	listings := [][]ruleset.Element{{elements[0], elements[0]}, {elements[0], elements[2]}}
	c := On(nl.New(nltest.NewFake(func(requests []netlink.Message) [][]byte {
		r := requests[0]
		var out [][]byte
		switch uint16(r.Header.Type) {
		case messageType(unix.NFT_MSG_GETSET):
			out = append(out, answerOf(r, unix.NFT_MSG_NEWSET, unix.NLM_F_MULTI, nftnl.String(unix.NFTA_SET_NAME, ruleset.Pods4Set)))
		case messageType(unix.NFT_MSG_GETSETELEM):
			for _, el := range listings[0] {
				out = append(out, answerOf(r, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_MULTI, ruleset.TableName(nftnl.DefaultTable).ElementAttributes(el)...))
			}
			listings = listings[1:]
		}
		return append(out, nltest.Done(r, 0))
	})), nil)
	got, err := c.Endpoints(context.Background(), "podnet")
	expect.That(t, err == nil && len(got) == 2 && len(listings) == 0,
		"got %+v, %v, with %d listings left", got, err, len(listings))
}

func TestProbeSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	for _, errno := range []unix.Errno{unix.EINVAL, unix.EOPNOTSUPP} {
		fault := &nltest.Fault{Type: messageType(unix.NFT_MSG_GETGEN), Errno: errno}
		err := dialFaulty(t, nstest.New(t), fault).Probe(t.Context())
		expect.That(t, errors.Is(err, errors.ErrUnsupported) &&
			strings.Contains(err.Error(), "this kernel has no nf_tables; load the module"),
			"%v: %v", errno, err)
	}
}

func TestRepliesThatDoNotParseAreErrors(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	ep := pod("00000000001", "10.22.0.5")
	ep.Ports = []Port{tcpPort("", 8080)}
	for _, tc := range []struct {
		name string
		data []byte
	}{
		{"no header", []byte{1, 0}},
		{"half an attribute", []byte{1, 0, 0, 0, 8, 0, 1}},
		{"an attribute past the end", []byte{1, 0, 0, 0, 99, 0, 1, 0}},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			c := On(nl.New(nltest.NewFake(func(requests []netlink.Message) [][]byte {
				var out [][]byte
				for _, r := range requests {
					switch {
					case r.Header.Type < unix.NLMSG_MIN_TYPE+2: // the begin and end of a transaction
					case r.Header.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP:
						out = append(out, nltest.Reply(r, uint16(r.Header.Type)-1, unix.NLM_F_MULTI, tc.data), nltest.Done(r, 0))
					default:
						out = append(out, nltest.Reply(r, uint16(r.Header.Type)-1, 0, tc.data))
					}
				}
				return out
			})), nil)
			_, ensureErr := c.Ensure(ctx, podnet())
			_, readyErr := c.Ready(ctx, podnet())
			_, checkErr := checkAll(c, podnet(), ep)
			_, endpointsErr := c.Endpoints(ctx, "")
			for _, err := range []error{
				ensureErr, readyErr, checkErr, endpointsErr, c.Replace(ctx, ep), c.Remove(ctx, ep), c.RemoveOwners(ctx, ep.Owner),
				c.RemoveNetwork(ctx, "podnet"),
			} {
				expect.Is(t, err, nl.ErrMalformed)
			}
		})
	}
}

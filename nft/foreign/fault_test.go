package foreign

import (
	"context"
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func ensure(c *Conn) error { _, err := c.Ensure(context.Background()); return err }

func checkAdmission(c *Conn) error { _, err := c.Check(context.Background()); return err }

func withdraw(c *Conn) error { return c.Remove(context.Background()) }

func TestAdmissionErrorsNameWhatFailed(t *testing.T) {
	t.Parallel()
	const comment = `"tombolo: admit what table inet tombolo marks from cbr0"`
	ready := func(c *Conn) error { _, err := c.Ready(context.Background()); return err }
	for _, tc := range []struct {
		msg  uint16
		nth  int
		do   func(*Conn) error
		want string
	}{
		{unix.NFT_MSG_GETGEN, 1, ensure, "get generation of nf_tables: "},
		{unix.NFT_MSG_GETCHAIN, 2, ensure, "get chain FORWARD of table ip6 filter: "},
		{unix.NFT_MSG_GETRULE, 2, ensure, "list rules of chain FORWARD of table ip6 filter: "},
		{unix.NFT_MSG_NEWRULE, 3, ensure, "insert rule " + comment + " into chain FORWARD of table ip6 filter: "},
		{unix.NFT_MSG_GETRULE, 2, checkAdmission, "list rules of chain FORWARD of table ip6 filter: "},
		{unix.NFT_MSG_GETRULE, 2, withdraw, "list rules of chain FORWARD of table ip6 filter: "},
		{unix.NFT_MSG_GETRULE, 2, ready, "list rules of chain FORWARD of table ip6 filter: "},
		{unix.NFT_MSG_GETCHAIN, 2, ready, "get chain FORWARD of table ip6 filter: "},
	} {
		nstest.RunParallel(t, tc.want, func(t *testing.T) {
			ns := newHost(t)
			nstest.Script(t, ns, "iptables -P FORWARD DROP")
			c := dialFaulty(t, ns, &nltest.Fault{Type: messageType(tc.msg), Nth: tc.nth, Errno: unix.ENOMEM, Text: "made up"})
			before := nftables(t, ns, "list", "ruleset")
			err := tc.do(c)
			var opErr *tombolo.OpError
			expect.That(t, errors.As(err, &opErr) && errors.Is(err, unix.ENOMEM) && opErr.Message == "made up" &&
				strings.HasPrefix(err.Error(), tc.want),
				"got %v, want %s…", err, tc.want)
			expect.Equal(t, nftables(t, ns, "list", "ruleset"), before, "what failed changed something")
		})
	}
}

func TestWithdrawSaysWhatItCouldNotDelete(t *testing.T) {
	t.Parallel()
	ns := newHost(t)
	nstest.Script(t, ns, "iptables -P FORWARD DROP")
	mustPlace(t, dial(t, ns), true)
	c := dialFaulty(t, ns, &nltest.Fault{Type: messageType(unix.NFT_MSG_DELRULE), Nth: 3, Errno: unix.EPERM})
	const want = "delete rule 2 of chain FORWARD of table ip6 filter: "
	err := withdraw(c)
	expect.That(t, errors.Is(err, unix.EPERM) && strings.HasPrefix(err.Error(), want), "got %v, want %s…", err, want)
	wantRules(t, ns, "FORWARD", ourRule)
}

// What iptables does between the look and the change must not end in two rules, or
// in none.
func TestAdmissionIsTriedAgainWhenOvertaken(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		do   func(*Conn) error
		msg  uint16 // before which it happens
		want int    // rules, in the end
	}{
		{"Ensure, while it looks", ensure, unix.NFT_MSG_GETRULE, 1},
		{"Ensure, when it inserts", ensure, unix.NFT_MSG_NEWRULE, 1},
		{"Withdraw, while it looks", withdraw, unix.NFT_MSG_GETRULE, 0},
		{"Withdraw, when it deletes", withdraw, unix.NFT_MSG_DELRULE, 0},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			ns := newHost(t)
			nstest.Script(t, ns, "iptables -P FORWARD DROP")
			mustPlace(t, dial(t, ns), true)
			iptables(t, ns, "iptables", "-F")
			// Somebody restores a file that our rule was saved in.
			restored := 0
			c := watched(t, ns, tc.msg, func() {
				if restored++; restored == 1 {
					nstest.Run(t, ns, "sh", "-ec", "iptables-nft -I FORWARD "+ourRule)
				}
			})
			must.Succeed(t, tc.do(c))
			expect.That(t, restored != 0, "nothing came between")
			for _, program := range nstest.Programs() {
				expect.Equal(t, strings.Count(iptables(t, ns, program, "-S"), admissionComment), 2*tc.want, "%s: our rule is there", program)
			}
		})
	}
}

// Another program replaces all rules of a chain while Ready looks: the state before and after is right.
func TestReadyLooksAgainWhenOvertaken(t *testing.T) {
	t.Parallel()
	ns := newHost(t)
	nstest.Script(t, ns, "iptables -P FORWARD DROP")
	mustPlace(t, dial(t, ns), true)
	looks := 0
	c := watched(t, ns, unix.NFT_MSG_GETRULE, func() {
		switch looks++; looks {
		case 1:
			iptables(t, ns, "iptables", "-F")
		case 2:
			must.Succeed(t, ensure(dial(t, ns)))
		}
	})
	ok, err := c.Ready(t.Context())
	expect.That(t, ok && err == nil && looks > 2, "after %d looks: %t, %v", looks, ok, err)
}

func TestAdmissionWithAContextThatIsDone(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	nstest.Script(t, ns, "iptables -P FORWARD DROP")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for name, do := range map[string]func() error{
		"Admit":          func() error { _, err := c.Ensure(ctx); return err },
		"Admitted":       func() error { _, err := c.Ready(ctx); return err },
		"CheckAdmission": func() error { _, err := c.Check(ctx); return err },
		"Withdraw":       func() error { return c.Remove(ctx) },
	} {
		expect.Is(t, do(), context.Canceled, "%s", name)
	}
	wantRules(t, ns, "FORWARD")
}

package lan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// end has a lease end now, for the keeper and for the pod's kernel: nobody waits here for
// the shortest lease that dnsmasq grants, two minutes. No keeper runs meanwhile.
func (s *leasing) end(p *pod) {
	s.Helper()
	s.change(ident.Hash("home", p.id, nic), func(r *lease.Record) {
		ended := time.Now().UTC().Add(-time.Second)
		r.Lease.Obtained, r.Lease.Renew, r.Lease.Rebind, r.Lease.Expire = ended.Add(-time.Hour), ended, ended, ended
	})
}

// drop has the server, which is stopped, forget a lease. Nobody releases one that has ended, and it has 101 for an hour.
func (d *dhcp) drop(a netip.Addr) {
	d.Helper()
	kept := slices.DeleteFunc(strings.SplitAfter(d.Leased(), "\n"), func(line string) bool {
		return slices.Contains(strings.Fields(line), a.String())
	})
	writeFile(d, d.LeaseFile, strings.Join(kept, ""))
}

// trace is what the host has that leads to a pod, or lets it speak, by an address.
func (s *leasing) trace(a netip.Addr) string {
	s.Helper()
	var found []string
	for line := range strings.Lines(s.hostRun("nft", "list", "ruleset")) {
		for _, word := range strings.FieldsFunc(line, func(r rune) bool { return strings.ContainsRune(" ,{}\t\n", r) }) {
			if word == a.String() {
				found = append(found, strings.TrimSpace(line))
				break
			}
		}
	}
	return strings.Join(found, "\n")
}

// TestEndOfALeaseMayMeetAFaultAtAnyCall is about the keeper, from its start until it has
// withdrawn a lease that has ended, whose server is silent. One half of the pods have renamed
// their interface, so that the keeper is shut out. Whatever happened to it, the next one
// withdraws what is left.
func TestEndOfALeaseMayMeetAFaultAtAnyCall(t *testing.T) {
	t.Parallel()
	s := newLeasing(t)
	first := s.snapshot()
	// So that the loopback's opening and closing is not part of what is swept.
	holds := s.add(s.newPod("holds", fmt.Sprintf("%d:%d/udp", hostPort+1, servicePort)))
	before, leases := s.snapshot(), s.leaseFiles()
	withdrawn := func(p *pod) bool {
		return s.leaseOf(p).State == lease.Expired && s.attached(p) == "" && s.trace(p.ip4) == ""
	}
	rounds := 0
	sweep(t, func(name string, f fault.Fault) fault.Outcome {
		p := s.add(s.newPod(name, published()...))
		must.That(t, s.trace(p.ip4) != "", "nothing leads to %s, which a lease's end is to withdraw", p.ip4)
		s.d.Stop()
		s.end(p)
		rounds++
		renamed := rounds%2 == 0
		if renamed {
			ip(t, p.ns, "link set "+nic+" down", "link set "+nic+" name mine0", "link set mine0 up")
		}
		cmd := s.command(program(s, "tombolod"), nil, nil, "--leases", s.leases, "--state", s.state, "--metrics", "none", "--log-level", "debug")
		run, out := s.begin(cmd, f)
		ended := make(chan fault.Outcome, 1)
		go func() { ended <- run.Wait() }()
		var o fault.Outcome
		must.Until(s, "the fault, or the withdrawal", func() bool {
			select {
			case o = <-ended:
				ended <- o
				return true
			default:
				return run.Outcome().Fired || withdrawn(p)
			}
		})
		run.Kill()
		o = <-ended
		// The next one.
		k := s.keeper()
		must.Until(s, fmt.Sprintf("%s at %s (renamed: %t): the next keeper withdraws what is left; %s", f.Kind, o.Call, renamed, out), func() bool { return withdrawn(p) })
		k.kill()
		s.d.drop(p.ip4)
		s.d.start()
		s.del(p)
		s.wantAsBefore(fmt.Sprintf("%s at %s (%s)", f.Kind, o.Call, out), before, leases)
		return o
	})
	// The last publisher takes the way from the host's loopback along, though it has no
	// address any more.
	s.d.Stop()
	s.end(holds)
	k := s.keeper()
	must.Until(s, "the last publisher's lease is withdrawn", func() bool { return withdrawn(holds) })
	k.kill()
	s.d.start()
	s.del(holds)
	// The qdisc stays for as long as the bridge is there: the kernel drops packets where one
	// comes or goes. The filter in it, which the ruleset has no part in, does not.
	const stays = "+ qdisc clsact ffff: dev br0 parent ffff:fff1"
	for line := range strings.Lines(first.Diff(s.snapshot())) {
		line = strings.TrimSpace(line)
		expect.That(s, line == "" || line == stays, "the host without publishers (- before, + after): %s", line)
	}
	expect.Equal(s, s.hostRun("tc", "filter", "show", "dev", "br0", "ingress"), "", "filters without publishers")
}

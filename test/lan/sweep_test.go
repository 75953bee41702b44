package lan

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// sample is how many faults of each kind something meets, unless it meets all: see
// fault.Points.
const sample = 3

// command is one of a program's, with what it reads.
func (n *network) command(program string, environ []string, stdin []byte, args ...string) *exec.Cmd {
	n.Helper()
	cmd := exec.Command(program, args...)
	cmd.Env, cmd.Stdin = append(os.Environ(), environ...), bytes.NewReader(stdin)
	return cmd
}

// verbCommand is a verb for a pod, as verb calls it.
func (n *network) verbCommand(verb string, p *pod) *exec.Cmd {
	n.Helper()
	conf := maps.Clone(n.conf)
	if verb != "ADD" && p.result != nil {
		conf["prevResult"] = p.result
	}
	stdin := must.Of(json.Marshal(conf)).Get(n)
	return n.command(program(n, "tombolo-cni"), []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + p.id, "CNI_NETNS=" + p.path, "CNI_IFNAME=" + nic, "CNI_PATH=/"}, stdin)
}

// begin starts a command on the host with a fault.
func (n *network) begin(cmd *exec.Cmd, f fault.Fault) (run *fault.Run, output *bytes.Buffer) {
	n.Helper()
	output = new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr = output, output
	run, err := fault.Start(n.host.ns, cmd, f)
	must.Succeed(n, err)
	return run, output
}

// sweep has something meet faults. Each round is given its fault, makes what meets it
// and clears up after it, and gives what came of it.
func sweep(t *testing.T, round func(name string, f fault.Fault) fault.Outcome) {
	t.Helper()
	whole := round("whole", fault.Fault{})
	points := must.Of(fault.Points(whole.Calls, sample)).Get(t)
	met, missed := 0, 0
	for _, kind := range fault.Kinds() {
		for _, at := range points {
			o := round(fmt.Sprintf("%s-%d", kind, at), fault.Fault{At: at, Kind: kind})
			if o.Fired {
				met++
			} else if missed++; at <= whole.Calls/2 {
				// How many there are depends on how often something is waited for.
				t.Errorf("no %s at %d: there are %d calls, %d without a fault", kind, at, o.Calls, whole.Calls)
			}
			must.That(t, !t.Failed(),
				"%s at %d of %d, %s; %s=%d repeats it, or nearly so", kind, at, o.Calls, o.Call, fault.Variable, at)
		}
	}
	expect.That(t, met != 0, "no fault happened")
	t.Logf("%d calls, %d faults, %d beyond the last call", whole.Calls, met, missed)
}

// The first ADD makes the share. The host is reached after each fault. In every other round the next ADD makes the rest,
// and in the others the removal has to find what there is.
func TestShareMayMeetAFaultAtAnyCall(t *testing.T) {
	t.Parallel()
	l, _ := newLab(t)
	n := l.network(nil)
	first, rounds := l.moved(nic), 0
	sweep(t, func(name string, f fault.Fault) fault.Outcome {
		p := l.newPod(name)
		run, out := n.begin(n.verbCommand("ADD", p), f)
		o := run.Wait()
		l.hostTalks()
		must.That(t, !t.Failed(), "%s at %d, %s: the host does not talk; the ADD: %s", f.Kind, f.At, o.Call, out)
		if rounds++; rounds%2 == 0 {
			next := n.add(l.newPod("next-" + name))
			l.ask(next.place, l.internet.ip4, servicePort, next.ip4)
			n.check(next)
			n.del(next)
		}
		n.del(p)
		n.giveBack()
		l.hostTalks()
		l.wantNoLink(bridge)
		wantSame(t, fmt.Sprintf("the host after a fault at %s (%s)", o.Call, out), first, l.moved(nic))
		return o
	})
}

func TestRemovalOfAShareMayMeetAFaultAtAnyCall(t *testing.T) {
	t.Parallel()
	l, _ := newLab(t)
	n := l.network(nil)
	first := l.moved(nic)
	sweep(t, func(name string, f fault.Fault) fault.Outcome {
		p := n.add(l.newPod(name))
		n.del(p)
		run, out := n.begin(n.command(program(n, "tombolo"), nil, nil, "remove", "--state", n.state, "--leases", n.leases, "home"), f)
		o := run.Wait()
		l.hostTalks()
		n.giveBack()
		l.hostTalks()
		l.wantNoLink(bridge)
		wantSame(t, fmt.Sprintf("the host after a fault at %s (%s)", o.Call, out), first, l.moved(nic))
		return o
	})
}

// giveBack removes the network, and with it the share, unless that was done.
func (n *network) giveBack() {
	n.Helper()
	_, err := n.exec("tombolo", nil, nil, "remove", "--state", n.state, "--leases", n.leases, "home")
	expect.That(n, err == nil || strings.Contains(err.Error(), "no network"), "%v", err)
}

func (n *network) wantNoFile(name string) {
	n.Helper()
	_, err := os.Stat(filepath.Join(n.state, name))
	expect.That(n, os.IsNotExist(err), "%s is there: %v", name, err)
}

// leasing is a host whose NIC is taken over, with a pod that talks, and a keeper.
type leasing struct {
	*network
	d     *dhcp
	stays *pod
	talks []*nstest.Talk
}

func newLeasing(t *testing.T) *leasing {
	l, d := newLab(t)
	s := &leasing{network: l.network(object{"defaultRoute": "host"}), d: d}
	s.stays = s.add(l.newPod("stays"))
	for i, network := range []string{"udp", "tcp"} {
		at := netip.AddrPortFrom(l.internet.ip4, uint16(7000+i))
		s.talks = append(s.talks, nstest.NewTalk(t, network, l.internet.ns, at, s.stays.ns, at))
	}
	return s
}

// snapshot is the host, with the files of the state directory.
func (s *leasing) snapshot() nstest.Snapshot {
	s.Helper()
	all := nstest.Snap(s, s.host.ns, s.state, func(name string) bool {
		return filepath.Base(name) == "lock" || strings.HasPrefix(name, "networks/") || strings.HasPrefix(name, "uplinks/")
	})
	// A file that was about to replace another when the kill came is for GC to delete, and calls
	// that fail are counted.
	return slices.DeleteFunc(all, func(line string) bool {
		name, isFile := strings.CutPrefix(line, "file ")
		return isFile && (strings.HasPrefix(name, "failures/") || strings.HasPrefix(filepath.Base(strings.Fields(name)[0]), ".tmp-"))
	})
}

// leaseFiles are the names of the records of leases.
func (s *leasing) leaseFiles() string {
	s.Helper()
	list := must.Of(filepath.Glob(s.leases + "/*.json")).Get(s)
	return strings.Join(list, "\n")
}

// wantAsBefore fails the test unless host and leases are as they were.
func (s *leasing) wantAsBefore(when string, before nstest.Snapshot, leases string) {
	s.Helper()
	diff := before.Diff(s.snapshot())
	expect.That(s, diff == "", "%s: the host (- before, + after):\n%s", when, diff)
	expect.Equal(s, s.leaseFiles(), leases, "%s: leases", when)
	for _, talk := range s.talks {
		talk.Check(s)
	}
}

func TestADDWithALeaseMayMeetAFaultAtAnyCall(t *testing.T) {
	t.Parallel()
	s := newLeasing(t)
	before, leases := s.snapshot(), s.leaseFiles()
	sweep(t, func(name string, f fault.Fault) fault.Outcome {
		p := s.newPod(name)
		run, out := s.begin(s.verbCommand("ADD", p), f)
		o := run.Wait()
		s.del(p)
		s.wantAsBefore(fmt.Sprintf("%s at %s (%s)", f.Kind, o.Call, out), before, leases)
		return o
	})
}

func TestDELWithALeaseMayMeetAFaultAtAnyCall(t *testing.T) {
	t.Parallel()
	s := newLeasing(t)
	before, leases := s.snapshot(), s.leaseFiles()
	sweep(t, func(name string, f fault.Fault) fault.Outcome {
		p := s.add(s.newPod(name))
		run, out := s.begin(s.verbCommand("DEL", p), f)
		o := run.Wait()
		if o.Err == nil {
			s.wantAsBefore(fmt.Sprintf("%s at %s, which said that all is gone", f.Kind, o.Call), before, leases)
		}
		s.del(p)
		s.wantAsBefore(fmt.Sprintf("%s at %s (%s)", f.Kind, o.Call, out), before, leases)
		return o
	})
}

// TestRenewalMayMeetAFaultAtAnyCall is about the keeper, from its start until it has
// renewed a lease. An error does not end it once it keeps leases; and whatever happened to
// it, the next one goes on.
func TestRenewalMayMeetAFaultAtAnyCall(t *testing.T) {
	t.Parallel()
	s := newLeasing(t)
	hash := ident.Hash("home", s.stays.id, nic)
	mac := macOf(t, s.stays.place, nic)
	before, leases := s.snapshot(), s.leaseFiles()
	sweep(t, func(name string, f fault.Fault) fault.Outcome {
		s.makeDue(hash)
		heard := len(s.d.messages(mac))
		cmd := s.command(program(s, "tombolod"), nil, nil, "--leases", s.leases, "--state", s.state, "--metrics", "none", "--log-level", "debug")
		run, out := s.begin(cmd, f)
		ended := make(chan fault.Outcome, 1)
		go func() { ended <- run.Wait() }()
		var o fault.Outcome
		begun := func() bool { return run.Outcome().Fired || len(s.d.messages(mac)) >= heard+2 }
		must.Until(s, "the fault, or the renewal", func() bool {
			select {
			case o = <-ended:
				ended <- o
				return true
			default:
				return begun()
			}
		})
		if !run.Outcome().Fired {
			// The server's answer is logged before the keeper has it: the fault may come yet,
			// and a killed keeper puts nothing on record.
			s.dueUntil(hash, "the fault, or the renewal is on record", func() bool {
				return run.Outcome().Fired || s.leaseOf(s.stays).Renew.After(time.Now().Add(time.Minute))
			})
		}
		run.Kill()
		o = <-ended
		// The next one.
		s.makeDue(hash)
		heard = len(s.d.messages(mac))
		k := s.keeper()
		s.dueUntil(hash, fmt.Sprintf("the next keeper renews, after %s at %s", f.Kind, o.Call), func() bool {
			return slices.Contains(s.d.messages(mac)[heard:], "DHCPACK")
		})
		s.d.renewed(mac, heard)
		k.kill()
		if s.leaseOf(s.stays).State != lease.Bound {
			t.Errorf("the lease: %+v", s.leaseOf(s.stays))
		}
		s.check(s.stays)
		s.wantAsBefore(fmt.Sprintf("%s at %s (%s)", f.Kind, o.Call, out), before, leases)
		return o
	})
}

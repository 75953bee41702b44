package cni

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// What cuts a pod off is named by check, CHECK and doctor alike, each with the one cause, and what
// they advise helps. Before it, the pod works; where something is cut, the pod shows that.
func TestWhatCutsAPodOffIsNamedAndTheRemedyHelps(t *testing.T) {
	t.Parallel()
	on := func(line string) func(*scene) { return func(s *scene) { s.Helper(); s.on(line) } }
	only4, only6 := []string{outside4}, []string{outside6}
	for name, tc := range map[string]struct {
		harm func(*scene)
		cut  []string // what the pod a no longer reaches
		says string
		tag  string
		step string       // of doctor
		undo func(*scene) // nil: what is advised is done
	}{
		"the subnet's route is deleted":       {on("ip route del " + subnet4 + " dev cbr0"), only4, "bridge cbr0: the host's route to " + subnet4 + " is missing", "repair", "forwarding", nil},
		"the subnet's IPv6 route is deleted":  {on("ip -6 route del " + subnet6 + " dev cbr0"), only6, "bridge cbr0: the host's route to " + subnet6 + " is missing", "repair", "forwarding", nil},
		"the subnet's route is replaced":      {on("ip route replace " + subnet4 + " via " + outside4), only4, "the host's route to " + subnet4 + " leads elsewhere: " + subnet4 + " via " + outside4, "repair", "forwarding", nil},
		"the subnet's IPv6 route is replaced": {on("ip -6 route replace " + subnet6 + " via " + outside6 + " metric 256"), only6, "the host's route to " + subnet6 + " leads elsewhere: " + subnet6 + " via " + outside6, "repair", "forwarding", nil},
		"the subnet's route refuses packets":  {on("ip route replace blackhole " + subnet4), only4, "the host's route to " + subnet4 + " leads elsewhere: blackhole " + subnet4, "repair", "forwarding", nil},
		"another IPv6 route is better": {on("ip -6 route add " + subnet6 + " via " + outside6 + " metric 1"), only6, "the host does not send what is for fd77::2 to cbr0", "configuration", "forwarding",
			on("ip -6 route del " + subnet6 + " via " + outside6)},
		"a route of the pod's address": {on("ip route add 10.77.0.2/32 via " + outside4), only4, "the host does not send what is for 10.77.0.2 to cbr0: see ip route get 10.77.0.2", "configuration", "forwarding",
			on("ip route del 10.77.0.2/32")},
		"a rule refuses what is for pods": {on("ip -6 rule add to " + subnet6 + " prohibit"), only6, "the host does not send what is for fd77::2 to cbr0", "configuration", "forwarding",
			on("ip -6 rule del to " + subnet6 + " prohibit")},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := newScene(t)
			nstest.Serve(t, s.out, "udp", netip.AddrPortFrom(nstest.Addr(outside4), 53))
			wantPing(t, s.a.NS, outside4, outside6)
			tc.harm(s)
			wantNoPing(t, s.a.NS, tc.cut...)
			o := s.operate("check", "--state", s.state)
			line := lineWith(o.stdout, tc.says)
			must.That(t, o.status == 4 && strings.HasSuffix(line, " ["+tc.tag+"]\n"),
				"check does not say %q, or not [%s]: %+v", tc.says, tc.tag, o)
			wantError(t, s.check(s.a), 113, tc.says)
			remedy := s.diagnosed(tc.step, tc.says)
			o = s.operate("repair", "--state", s.state)
			switch {
			case tc.tag == "repair":
				expect.That(t, o.status == 0 && strings.HasPrefix(lineWith(o.stdout, tc.says), "repaired: "),
					"repair: %+v", o)
			case o.status != 4 || !strings.HasPrefix(lineWith(o.stdout, tc.says), "left: "):
				t.Errorf("repair of what is another's: %+v", o)
			case tc.undo != nil:
				tc.undo(s)
			default:
				expect.Contains(t, line, "; this helps: "+remedy, "check advises another command than %q", remedy)
				s.on(remedy)
			}
			s.quiet("after the remedy")
			wantPing(t, s.a.NS, outside4, outside6)
			expect.Success(t, s.check(s.a))
		})
	}
}

func lineWith(output, text string) string {
	for line := range strings.Lines(output) {
		if strings.Contains(line, text) {
			return line
		}
	}
	return ""
}

// diagnosed has doctor find something at one step alone for the pod a, and say a text. It gives
// the remedy.
func (s *scene) diagnosed(step, text string) string {
	s.Helper()
	var reports []struct {
		Findings []struct{ Step, Evidence, Remedy string }
	}
	unmarshal(s, s.operate("doctor", "--json", "--state", s.state, "--dns", outside4, "a").stdout, &reports)
	remedy := ""
	for _, f := range reports[0].Findings {
		if strings.Contains(f.Evidence, text) {
			remedy = f.Remedy
		}
		expect.Equal(s, f.Step, step, "doctor finds something at step %s, where %s is the cause: %+v", f.Step, step, f)
	}
	expect.That(s, remedy != "", "doctor does not say %q: %+v", text, reports)
	return remedy
}

// reservation is the file of an address.
func (s *scene) reservation(address string) string {
	return filepath.Join(s.state, "ipam", s.name, address)
}

// A reservation that has become another pod's, as by the hand of an operator, is named by CHECK. DEL leaves it.
func TestDELLeavesTheReservationOfAnother(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	const others = "other\r\neth0"
	must.Succeed(t, os.WriteFile(s.reservation("10.77.0.2"), []byte(others), 0o600))
	wantError(t, s.check(s.a), 113, "10.77.0.2 is not reserved")
	s.del(s.a)
	s.del(s.a)
	expect.Equal(t, nstest.ReadIf(t, s.reservation("10.77.0.2")), others, "the reservation is")
	s.add(s.a)
	wantPing(t, s.a.NS, outside4, outside6)
}

// A reservation that is lost leads one ADD to an address that is in use. The next gets another.
func TestAnAddressWithoutItsReservationIsNotTakenFromItsPod(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	must.Succeed(t, os.RemoveAll(s.reservation("10.77.0.2")))
	must.Succeed(t, os.WriteFile(s.reservation("last_reserved_ip.0"), []byte("10.77.0.1"), 0o600))
	c := s.pod("c")
	wantError(t, expect.Err(s.tryAdd(c)), 112, "10.77.0.2")
	expect.Equal(t, ip4(s.add(c)).String(), "10.77.0.4", "the next pod has")
	wantPing(t, s.a.NS, outside4, outside6)
}

// An operator's own bridge has the gateway's address without a broadcast address, and routes go by it.
func TestAGatewayThatIsThereIsNotExchanged(t *testing.T) {
	n := parallelNode(t)
	n.run("sh", "-ec", "ip link add cbr0 type bridge; ip link set cbr0 up; ip address add "+gateway4+"/24 dev cbr0; ip route add 10.99.0.0/16 via 10.77.0.50; ip route add default via 10.77.0.254")
	before := n.run("ip", "route")
	w := n.podnet(nil)
	for _, id := range []string{"a", "b"} {
		w.add(n.pod(id))
	}
	n.operate("repair", "--state", n.state)
	for line := range strings.Lines(before) {
		expect.Contains(t, n.run("ip", "route"), strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(line), "linkdown")), "the route %sis gone", line)
	}
}

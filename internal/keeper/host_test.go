package keeper

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
)

// fakeHost is a host whose NIC is a port, and that remembers what was done to it.
type fakeHost struct {
	*fakePod
	enterErr error
	now      []lease.HostRoute
	removed  []lease.HostRoute
}

// enter is called with the world's lock held.
func (h *fakeHost) enter(*lease.Record) (pod, error) {
	if h.enterErr != nil {
		return nil, h.enterErr
	}
	return h, nil
}

// reach says what comes of a look for the host.
func (h *fakeHost) reach(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.enterErr = err
}

func (h *fakeHost) routes(l *dhcpc.Lease) ([]lease.HostRoute, bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !slices.ContainsFunc(h.has.Addresses, func(p netip.Prefix) bool { return p.Addr() == l.Address.Addr() }) {
		return nil, false, nil
	}
	return slices.Clone(h.now), true, nil
}

func (h *fakeHost) setRoutes(list []lease.HostRoute) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range list {
		h.now = slices.DeleteFunc(h.now, func(o lease.HostRoute) bool { return sameKey(o, r) })
		h.now = append(h.now, r)
	}
	return nil
}

func (h *fakeHost) removeRoutes(list []lease.HostRoute) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.removed = append(h.removed, list...)
	h.now = slices.DeleteFunc(h.now, func(o lease.HostRoute) bool {
		return slices.ContainsFunc(list, func(r lease.HostRoute) bool { return sameKey(o, r) })
	})
	return nil
}

// withdraw does as the kernel, with the routes that have the address as their source.
func (h *fakeHost) withdraw(a lease.Applied) error {
	err := h.fakePod.withdraw(a)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now = slices.DeleteFunc(h.now, func(r lease.HostRoute) bool {
		return slices.ContainsFunc(a.Addresses, func(p netip.Prefix) bool { return p.Addr() == r.Source })
	})
	return err
}

// ends is the kernel's end of the host's address.
func (h *fakeHost) ends() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.has, h.now = lease.Applied{}, nil
}

// text gives what the host has.
func (h *fakeHost) text() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []string
	for _, r := range h.now {
		list = append(list, fmt.Sprintf("%s via %s src %s metric %d", r.Dst, r.Via, r.Source, r.Metric))
	}
	return fmt.Sprint(h.has.Addresses) + " " + strings.Join(list, ", ")
}

const hostsOwn = "[192.0.2.9/24] 192.0.2.0/24 via invalid IP src 192.0.2.9 metric 100, 0.0.0.0/0 via 192.0.2.254 src 192.0.2.9 metric 100"

// hostID is the client identifier that the host's client has leased with.
func hostID() dhcpc.Hex { return dhcpc.Hex{0xff, 1, 2, 3, 4, 0, 2} }

// hostRecord is one as lease.Adopt makes it, of a lease of an hour from now on.
func (w *world) hostRecord() *lease.Record {
	r := w.record(9)
	r.State, r.Network, r.ContainerID, r.IfName = lease.Adopting, "(host)", "(host)", "eth0"
	r.Client.ClientID, r.Lease.ClientID = hostID(), hostID()
	r.Policy, r.Host = lease.Policy{NoRoutes: true}, &lease.Host{NIC: "eth0"}
	r.Applied = r.Policy.Apply(r.Lease)
	return r
}

// forget makes a record one whose server is not known.
func forget(r *lease.Record) {
	r.Lease.Server, r.Lease.Routes = netip.IPv4Unspecified(), nil
}

func (w *world) addHost(r *lease.Record) *fakeHost {
	p := w.add(r)
	p.has.Routes = nil
	own, router := netip.MustParseAddr("192.0.2.9"), netip.MustParseAddr("192.0.2.254")
	p.host = &fakeHost{fakePod: p, now: []lease.HostRoute{
		{Dst: netip.MustParsePrefix("192.0.2.0/24"), Source: own, Table: 254, Metric: 100, Protocol: 2, Scope: 253},
		{Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: router, Source: own, Table: 254, Metric: 100, Protocol: 16},
	}}
	return p.host
}

// to is a server that knows the host by one identifier, empty for its MAC address, and
// does with others what it is told to.
func (w *world) to(id dhcpc.Hex, others func(*dhcpv4.DHCPv4) *dhcpv4.DHCPv4) func(*dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
	return func(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
		if got := dhcpc.Hex(d.Options.Get(dhcpv4.OptionClientIdentifier)); got.String() != id.String() {
			return others(d)
		}
		return w.grant(d)
	}
}

// trouble gives what an operator is told, by record and metrics, which have to agree.
func (w *world) trouble(r *lease.Record) string {
	w.t.Helper()
	got := w.load(r)
	_, body := get(w.t, w.keep, "/metrics")
	checkExposition(w.t, body)
	metric := `tombolo_host_lease_trouble{bridge="br0",nic="eth0"} `
	want := "0"
	if got.Error != "" {
		want = "1"
	}
	if !strings.Contains(body, metric+want+"\n") {
		w.t.Errorf("the record's trouble is %q, and the metrics are\n%s", got.Error, body)
	}
	return got.Error
}

func TestTheHostsLeaseIsConfirmedAtOnceAndRenewed(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.hostRecord()
		r.Lease.Renew = r.Lease.Obtained.Add(40 * time.Minute)
		w.serve(w.to(hostID(), silent))
		h := w.addHost(r)
		w.later(time.Minute)
		w.start()
		got := w.load(r)
		if got.State != lease.Bound || got.Token != r.Token || !got.Lease.Obtained.After(r.Lease.Obtained) || w.trouble(r) != "" {
			t.Fatalf("at once it is %s since %v (%s)", got.State, got.Lease.Obtained, got.Error)
		}
		w.later(5 * time.Hour)
		only(t, w.said(), "REQUEST")
		got = w.load(r)
		if got.State != lease.Bound || got.Lease.Left(now()) < 25*time.Minute || (h.left-got.Lease.Left(now())).Abs() > lookEvery || h.text() != hostsOwn {
			t.Errorf("after hours it is %s with %v left, the host has %s for %v", got.State, got.Lease.Left(now()), h.text(), h.left)
		}
		if len(got.Host.Routes) != 2 || h.removed != nil {
			t.Errorf("routes on record: %v; removed: %v", got.Host.Routes, h.removed)
		}
	})
}

func TestAServerThatIsNotKnownIsLookedFor(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.hostRecord()
		forget(r)
		w.serve(w.to(hostID(), silent))
		h := w.addHost(r)
		w.start()
		w.later(2 * time.Minute)
		only(t, w.said(), "REQUEST")
		got := w.load(r)
		if got.State != lease.Bound || got.Lease.Server.String() != "192.0.2.254" || h.text() != hostsOwn || w.trouble(r) != "" {
			t.Errorf("it is %s of server %s; the host has %s (%s)", got.State, got.Lease.Server, h.text(), got.Error)
		}
	})
}

func TestASilentServerIsToldOfBeforeTheLeaseEnds(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.hostRecord()
		w.serve(silent)
		h := w.addHost(r)
		w.start()
		w.later(time.Minute)
		if got := w.trouble(r); !strings.Contains(got, "asked 192.0.2.254 for 192.0.2.9") && !strings.Contains(got, "asked any server") || !strings.Contains(got, "tombolo uplink restore eth0 br0") {
			t.Errorf("a minute after the takeover: %q", got)
		}
		if _, body := get(t, w.keep, "/metrics"); !strings.Contains(body, `tombolo_host_lease_seconds{bridge="br0",nic="eth0"} 3540`) {
			t.Errorf("metrics:\n%s", body)
		}
		w.later(55 * time.Minute)
		if said := w.said(); len(said) < 10 || len(said) > 100 {
			t.Errorf("%d REQUESTs in 56 minutes", len(said))
		} else {
			only(t, said, "REQUEST")
		}
		if got := w.load(r); got.State != lease.Adopting || h.text() != hostsOwn {
			t.Errorf("it is %s, the host has %s", got.State, h.text())
		}
		// In time all the same.
		w.serve(w.to(hostID(), nak))
		w.later(4*time.Minute - time.Second)
		if got := w.load(r); got.State != lease.Bound || w.trouble(r) != "" {
			t.Errorf("with a server it is %s (%s)", got.State, got.Error)
		}
		// And again, of a lease that was confirmed.
		w.serve(silent)
		w.later(35 * time.Minute)
		if got := w.trouble(r); !strings.Contains(got, "no server renews the lease") {
			t.Errorf("past T1: %q", got)
		}
		w.serve(w.to(hostID(), nak))
		w.later(20 * time.Minute)
		if got := w.load(r); got.State != lease.Bound || w.trouble(r) != "" || h.text() != hostsOwn {
			t.Errorf("with a server again it is %s (%s), the host has %s", got.State, got.Error, h.text())
		}
	})
}

func TestTheHostKeepsItsAddressUntilThereIsAnother(t *testing.T) {
	for name, bound := range map[string]bool{"when it is adopted": false, "when it is renewed": true} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				r := w.hostRecord()
				h := w.addHost(r)
				var atDiscover string
				refuse := func(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
					if d.MessageType() == dhcpv4.MessageTypeDiscover {
						atDiscover = h.text()
						return nil // for now
					}
					return nak(d)
				}
				w.serve(w.grant)
				if !bound {
					w.serve(refuse)
				}
				w.start()
				if bound {
					w.later(time.Minute)
					w.serve(refuse)
					w.later(35 * time.Minute)
				}
				w.later(5 * time.Second)
				if got := w.load(r); got.State != lease.Expired || !strings.Contains(w.trouble(r), "refused") || atDiscover != hostsOwn || h.text() != hostsOwn {
					t.Errorf("refused, it is %s (%s), and the host has %s, had %s", got.State, got.Error, h.text(), atDiscover)
				}
				w.serve(func(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
					a := w.grant(d)
					a.YourIPAddr = net.IPv4(198, 51, 100, 7)
					a.UpdateOption(dhcpv4.OptRouter(net.IPv4(198, 51, 100, 1)))
					return a
				})
				w.later(10 * time.Minute)
				want := "[198.51.100.7/24] 198.51.100.0/24 via invalid IP src 198.51.100.7 metric 100, 0.0.0.0/0 via 198.51.100.1 src 198.51.100.7 metric 100"
				if got := w.load(r); got.State != lease.Bound || got.Lease.Address.String() != "198.51.100.7/24" || w.trouble(r) != "" || h.text() != want {
					t.Errorf("with another lease it is %s %s (%s), and the host has %s, want %s", got.State, got.Lease.Address, got.Error, h.text(), want)
				}
				if len(w.released()) > 0 {
					t.Errorf("released: %v", w.released())
				}
			})
		})
	}
}

func TestAHostThatLostItsAddressGetsItBackWithItsRoutes(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.hostRecord()
		w.serve(w.grant)
		h := w.addHost(r)
		w.start()
		w.later(time.Minute)
		w.serve(silent)
		w.later(59*time.Minute + 2*time.Second)
		h.ends()
		w.later(time.Minute)
		if got := w.load(r); got.State != lease.Expired || !strings.Contains(w.trouble(r), "no server gives another lease") {
			t.Errorf("after its end it is %s (%s)", got.State, got.Error)
		}
		w.serve(w.grant)
		w.later(2 * lastRetry)
		if got := w.load(r); got.State != lease.Bound || w.trouble(r) != "" || h.text() != hostsOwn {
			t.Errorf("with a server again it is %s (%s), and the host has %s", got.State, got.Error, h.text())
		}
	})
}

func TestWhatSomebodyTookFromTheHostIsPutBackAtALook(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.hostRecord()
		w.serve(w.grant)
		h := w.addHost(r)
		w.start()
		w.later(time.Minute)
		h.ends()
		w.later(lookEvery)
		if h.text() != hostsOwn {
			t.Errorf("the host has %s", h.text())
		}
		// A route that an operator changed is theirs, and comes back as they left it.
		if err := h.setRoutes([]lease.HostRoute{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("192.0.2.200"), Table: 254, Metric: 100, Protocol: 16}}); err != nil {
			t.Fatal(err)
		}
		w.later(40 * time.Minute)
		want := strings.Replace(hostsOwn, "via 192.0.2.254 src 192.0.2.9", "via 192.0.2.200 src invalid IP", 1)
		if h.text() != want {
			t.Errorf("after a renewal the host has %s, want %s", h.text(), want)
		}
		h.ends()
		w.later(lookEvery)
		if h.text() != want {
			t.Errorf("put back: %s, want %s", h.text(), want)
		}
	})
}

func TestAPermanentAddressStaysOne(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.hostRecord()
		r.Host.Permanent = true
		w.serve(w.grant)
		h := w.addHost(r)
		w.start()
		w.later(time.Hour)
		if got := w.load(r); got.State != lease.Bound || h.left != -1 {
			t.Errorf("it is %s, the address is for %v", got.State, h.left)
		}
	})
}

func TestTheHostsRecordOfAnotherBootIsDropped(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.hostRecord()
		r.Boot = lastBoot
		w.addHost(r)
		w.start()
		w.later(time.Minute)
		if w.load(r) != nil || len(w.said()) > 0 || len(w.released()) > 0 {
			t.Errorf("the record is %v; said %v, released %v", w.load(r), w.said(), w.released())
		}
		if _, body := get(t, w.keep, "/metrics"); strings.Contains(body, "tombolo_host_lease_seconds{") {
			t.Errorf("metrics:\n%s", body)
		}
	})
}

func TestALeaseThatIsHandedBackIsNotReleased(t *testing.T) {
	for name, confirmed := range map[string]bool{"while it is adopted": false, "while it is renewed": true} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				r := w.hostRecord()
				h := w.addHost(r)
				var applied int
				handBack := func(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
					applied = h.applied
					if err := lease.HandBack(t.Context(), w.dir, "eth0", func() error { return nil }); err != nil {
						t.Error(err)
					}
					return w.grant(d) // too late
				}
				if confirmed {
					w.start()
					w.later(time.Minute)
				}
				w.said()
				w.serve(handBack)
				if !confirmed {
					w.start()
				}
				w.later(40 * time.Minute)
				if len(w.said()) != 1 {
					t.Fatal("there was no exchange to race with")
				}
				if w.load(r) != nil || len(w.released()) > 0 || h.applied != applied || h.text() != hostsOwn {
					t.Errorf("the record is %v, released %v, applied %d times more, the host has %s", w.load(r), w.released(), h.applied-applied, h.text())
				}
			})
		})
	}
}

func TestAHostThatIsOutOfReachIsToldOf(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.hostRecord()
		h := w.addHost(r)
		h.reach(errors.New("eth0 is not a port of br0 any more"))
		w.start()
		w.later(30 * time.Minute)
		if got := w.trouble(r); !strings.Contains(got, "eth0 is not a port of br0") || len(w.said()) > 0 {
			t.Errorf("told: %q", got)
		}
		h.reach(nil)
		w.later(lastRetry * 2)
		if got := w.load(r); got.State != lease.Bound || w.trouble(r) != "" {
			t.Errorf("in reach again it is %s (%s)", got.State, got.Error)
		}
		// A bridge that is no more: as long as the lease lasts somebody may mend it.
		h.reach(fmt.Errorf("%w: no br0", errGone))
		w.later(40 * time.Minute)
		if w.load(r) == nil || !strings.Contains(w.trouble(r), "no br0") {
			t.Errorf("without its bridge: %v", w.load(r))
		}
		w.later(time.Hour)
		if w.load(r) != nil || len(w.released()) > 0 {
			t.Errorf("after its end there is %v; released %v", w.load(r), w.released())
		}
	})
}

func TestAKeeperThatComesTooLateGetsTheHostAnAddress(t *testing.T) {
	for name, confirmed := range map[string]bool{"never confirmed": false, "confirmed": true} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				r := w.hostRecord()
				if confirmed {
					r.State = lease.Bound
				} else {
					forget(r)
				}
				h := w.addHost(r)
				h.ends()
				w.later(2 * time.Hour)
				w.start()
				w.later(time.Minute)
				// What its client would have made of the lease.
				want := "[192.0.2.9/24] 192.0.2.254/32"
				if got := w.load(r); got.State != lease.Bound || !strings.HasPrefix(h.text(), "[192.0.2.9/24] 0.0.0.0/0 via 192.0.2.254 src 192.0.2.9 metric 0") && !strings.HasPrefix(h.text(), want) {
					t.Errorf("it is %s (%s), and the host has %s", got.State, got.Error, h.text())
				}
			})
		})
	}
}

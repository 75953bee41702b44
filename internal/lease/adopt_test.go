package lease

import (
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

var nicMAC = net.HardwareAddr{2, 0, 0, 0, 0, 9}

// leasedAddress is what a NIC has of a lease, with so much time left; -1 is for ever.
func leasedAddress(prefix string, left time.Duration) addr.Address {
	a := addr.Address{Prefix: netip.MustParsePrefix(prefix), Link: 3}
	if left >= 0 {
		a.Valid, a.Preferred = &left, &left
	}
	return a
}

// host is one whose NIC leased by its MAC address.
func host(t *testing.T) *Adoption {
	t.Helper()
	return &Adoption{NIC: "eth0", MAC: nicMAC, ClientID: "mac", Bridge: "br0", Wanted: func() (bool, error) { return true, nil }}
}

// adopted is the record that there is after an Adopt.
func adopted(t *testing.T, d *Dir, a *Adoption) *Record {
	t.Helper()
	must.Succeed(t, Adopt(t.Context(), d, a))
	return must.Of(d.Load(HostHash("eth0"))).Get(t)
}

func TestALeaseIsAdoptedAsItsServerSaidIt(t *testing.T) {
	t.Parallel()
	a := host(t)
	a.ClientID = "ff:73:1a:04:cb:00:02"
	a.Addresses = []addr.Address{leasedAddress("fd00::1/64", time.Hour), leasedAddress("198.51.100.77/24", time.Hour), leasedAddress("192.0.2.9/24", -1)}
	a.Lease = sampleLease()
	d := open(t)
	got := adopted(t, d, a)
	if got.State != Bound || got.Bridge != "br0" || got.IfName != "eth0" || !got.Host.Permanent {
		t.Errorf("the record is %+v, %+v", got, got.Host)
	}
	name, _ := os.Hostname()
	if id := got.Client.ClientID.String(); id != "ff:73:1a:04:cb:00:02" || got.Client.HostName != name {
		t.Errorf("its client is %s, %q", id, got.Client.HostName)
	}
	if l := got.Lease; l.Address.String() != "192.0.2.9/24" || l.Server.String() != "192.0.2.1" || l.MAC.String() != nicMAC.String() || l.Expire.Sub(at(time.Hour)).Abs() > time.Second {
		t.Errorf("its lease is %+v", l)
	}
	same(t, nstest.Prefixes("192.0.2.9/24"), got.Applied.Addresses)
	if cookie, err := state.NetNSCookie(); err != nil || got.NetNSCookie != cookie {
		t.Errorf("of namespace %d, want %d, %v", got.NetNSCookie, cookie, err)
	}
}

func TestWithoutAServersWordTheAddressTellsOfTheLease(t *testing.T) {
	t.Parallel()
	a := host(t)
	a.Addresses = []addr.Address{leasedAddress("192.0.2.77/24", -1), leasedAddress("10.9.0.32/24", 40*time.Minute), leasedAddress("10.9.0.33/24", time.Hour)}
	r := adopted(t, open(t), a)
	l := r.Lease
	if l.Address.String() != "10.9.0.32/24" || !l.Server.IsUnspecified() || r.Client.ClientID.String() != "01:02:00:00:00:00:09" || r.Host.Permanent {
		t.Errorf("the record is %+v, %+v", r, l)
	}
	if l.Expire.Sub(l.Obtained) != 40*time.Minute || l.Renew != l.Obtained || l.Rebind != l.Obtained { // all servers are asked at once
		t.Errorf("its times are %v, %v, %v, %v", l.Obtained, l.Renew, l.Rebind, l.Expire)
	}
}

func TestAnAddressThatIsNotLeasedIsNotAdopted(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Adoption){
		"no server confirmed it": func(a *Adoption) {
			a.ClientID, a.Addresses = "", []addr.Address{leasedAddress("10.9.0.32/24", time.Hour)}
		},
		"without an end": func(a *Adoption) { a.Addresses = []addr.Address{leasedAddress("10.9.0.32/24", -1)} },
		"IPv6":           func(a *Adoption) { a.Addresses = []addr.Address{leasedAddress("fd00::1/64", time.Hour)} },
		"none":           func(a *Adoption) { a.Lease = sampleLease() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, d := host(t), open(t)
			change(a)
			must.Succeed(t, Adopt(t.Context(), d, a))
			expect.Of(d.Hashes()).Len(t, 0, "records")
		})
	}
}

func TestAdoptingAgainLeavesTheRecordAlone(t *testing.T) {
	t.Parallel()
	d := open(t)
	a := host(t)
	a.Addresses = []addr.Address{leasedAddress("10.9.0.32/24", time.Hour)}
	var in *netns.NS // nil: the test's own
	adopt := func() (r *Record) {
		t.Helper()
		if in == nil {
			return adopted(t, d, a)
		}
		must.Succeed(t, in.Do(func() error { r = adopted(t, d, a); return nil }))
		return r
	}
	first := adopt()
	expect.That(t, adopt().Token == first.Token, "another record was written")
	// What the keeper has made of it meanwhile stays.
	h := lock(t, d, first)
	first.State = Bound
	must.Succeed(t, h.Replace(first))
	h.Close()
	again := adopt()
	expect.That(t, again.State == Bound, "its state is %s", again.State)
	for name, change := range map[string]func(){
		"another address":   func() { a.Addresses = []addr.Address{leasedAddress("10.9.0.33/24", time.Hour)} },
		"another bridge":    func() { a.Bridge = "br1" },
		"another MAC":       func() { a.MAC = net.HardwareAddr{2, 0, 0, 0, 0, 8} },
		"another namespace": func() { in = nstest.New(t) },
		"another boot": func() {
			// The bridge, the MAC and the address are the same after a boot; what the kernel has of them is not.
			h := lock(t, d, first)
			defer h.Close()
			earlier := *first
			earlier.Boot, earlier.State = "00000000-1111-2222-3333-444444444444", Bound
			must.Succeed(t, h.Replace(&earlier))
		},
		"damage": func() { must.Succeed(t, os.WriteFile(d.recordPath(HostHash("eth0")), []byte("{"), 0o600)) },
	} {
		change()
		last := adopt()
		expect.That(t, last.Token != first.Token && last.State == Bound, "%s: the record of before stayed", name)
		first = last
	}
}

func TestHandingBackForgetsTheLease(t *testing.T) {
	t.Parallel()
	d := open(t)
	a := host(t)
	a.Addresses = []addr.Address{leasedAddress("10.9.0.32/24", time.Hour)}
	adopted(t, d, a)
	create(t, d, sample())
	for range 2 {
		expect.Success(t, HandBack(t.Context(), d, "eth0"))
	}
	if got := names(t, d); !slices.Equal(got, []string{sample().Hash() + lockSuffix, sample().Hash() + recordSuffix}) &&
		!slices.Equal(got, []string{sample().Hash() + recordSuffix, sample().Hash() + lockSuffix}) {
		t.Errorf("the directory has %v", got)
	}
}

func TestTheHostsTroubleIsTold(t *testing.T) {
	t.Parallel()
	d := open(t)
	told := func() string {
		t.Helper()
		list := must.Of(HostTrouble(d)).Get(t)
		return strings.Join(list, "\n")
	}
	expect.Equal(t, told(), "", "without a directory")
	pod := sample()
	pod.Error = "a pod's"
	create(t, d, pod)
	expect.Equal(t, told(), "", "without a lease of the host's")
	a := host(t)
	a.Addresses = []addr.Address{leasedAddress("10.9.0.32/24", time.Hour)}
	r := adopted(t, d, a)
	if got := told(); !strings.Contains(got, "10.9.0.32/24, of eth0 and on br0 now, time left: ") || !strings.Contains(got, "start tombolod") {
		t.Errorf("without a keeper: %q", got)
	}
	p := keep(t, d)
	expect.Equal(t, told(), "", "just adopted")
	for name, tt := range map[string]struct {
		change func(*Record)
		want   string
	}{
		"refused": {func(r *Record) { r.Error = "refused" }, "refused"},
		"lost":    {func(r *Record) { r.State, r.Error = Expired, "" }, "asks for another"},
		"ran out": {func(r *Record) { r.State, r.Lease = Bound, aged(r.Lease, 2*time.Hour) }, "ended"},
		"not yet": {func(r *Record) {
			r.State, r.Lease = Bound, aged(r.Lease, 55*time.Minute)
			r.Lease.Rebind = r.Lease.Obtained.Add(52 * time.Minute)
		}, "no server has renewed it yet"},
		"for ever": {func(r *Record) {
			l := *r.Lease
			l.Renew, l.Rebind, l.Expire = time.Time{}, time.Time{}, time.Time{}
			r.State, r.Lease = Bound, &l
		}, ""},
		"and is why": {func(r *Record) {
			l := *r.Lease
			l.Renew, l.Rebind, l.Expire = time.Time{}, time.Time{}, time.Time{}
			r.State, r.Lease, r.Error = Bound, &l, "odd"
		}, "for ever: odd"},
	} {
		changed := *r
		tt.change(&changed)
		h := lock(t, d, r)
		must.Succeed(t, h.Replace(&changed))
		h.Close()
		if err := p.Beat(); err != nil { // to write a record may take a disk its time
			t.Fatal(err)
		}
		if got := told(); !strings.Contains(got, tt.want) || (got == "") != (tt.want == "") {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

// aged is a lease that was granted so much earlier.
func aged(l *dhcpc.Lease, by time.Duration) *dhcpc.Lease {
	o := *l
	o.Obtained, o.Renew, o.Rebind, o.Expire = o.Obtained.Add(-by), o.Renew.Add(-by), o.Rebind.Add(-by), o.Expire.Add(-by)
	return &o
}

// Between a takeover and the adoption, which waits for the lock of the lease, the NIC may
// have been given back.
func TestNothingIsAdoptedOfANICThatWasGivenBack(t *testing.T) {
	t.Parallel()
	d, a := open(t), host(t)
	a.Addresses = []addr.Address{leasedAddress("10.9.0.32/24", time.Hour)}
	asked := false
	a.Wanted = func() (bool, error) {
		held, err := d.TryLock(HostHash("eth0"))
		asked = held == nil && err == nil
		return false, nil
	}
	must.Succeed(t, Adopt(t.Context(), d, a))
	expect.That(t, asked, "it was not asked under the record's lock")
	expect.Is(t, expect.Err(d.Load(HostHash("eth0"))), os.ErrNotExist, "a record")
	a.Wanted = host(t).Wanted
	adopted(t, d, a)
}

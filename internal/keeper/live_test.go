package keeper

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestAPodsLeaseIsRenewedAgainAndAgain(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	s := l.serve(12 * time.Second)
	s.set(func(s *server) { s.renew = 2 * time.Second })
	p := l.add(1)
	requests := s.count("REQUEST")
	l.keeper()
	until(t, "4 renewals", func() bool { return s.count("REQUEST") >= requests+4 })
	s.set(func(s *server) { s.lease = time.Hour })
	until(t, "one for an hour", func() bool {
		r := l.load(p)
		return r.State == lease.Bound && r.Lease.Left(time.Now()) > 30*time.Minute
	})
	if early := s.tooEarly(); len(early) > 0 || s.count("sent NAK") != 0 {
		t.Errorf("the server heard %v, and of clients whose lease was alive: %v", s.heard, early)
	}
	if left := l.addresses(p)[netip.MustParsePrefix("10.9.1.1/16")]; left <= 0 {
		t.Errorf("the pod has %v", l.addresses(p))
	}
	if got := l.routes(p); got != "0.0.0.0/0 via 10.9.0.1" {
		t.Errorf("the pod's routes: %s", got)
	}
}

func TestTheKeeperHearsOfAnAddAndOfADel(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	s := l.serve(12 * time.Second)
	s.set(func(s *server) { s.renew = 2 * time.Second })
	l.keeper()
	p := l.add(1)
	requests := s.count("REQUEST")
	until(t, "a renewal", func() bool { return s.count("REQUEST") > requests })
	h, err := l.dir.Lock(t.Context(), p.record.Hash())
	if err == nil {
		err = errors.Join(h.Remove(), h.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	// The kernel ends the address, since nobody renews it any more.
	until(t, "the address's end", func() bool { return len(l.addresses(p)) == 0 })
	if l.load(p) != nil {
		t.Error("the record came back")
	}
}

func TestWhatIsTakenFromAPodIsPutBack(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	s := l.serve(time.Hour)
	s.set(func(s *server) { s.renew = 2 * time.Second })
	p := l.add(1)
	stop := l.keeper()
	defer stop()
	until(t, "it is kept", func() bool { return l.load(p).Updated.After(p.record.Updated) })
	nstest.Run(t, p.ns, "ip", "route", "del", "default")
	until(t, "the route is back", func() bool { return l.routes(p) != "" })
	nstest.Run(t, p.ns, "ip", "address", "flush", "dev", "eth0")
	until(t, "address and route are back", func() bool { return len(l.addresses(p)) == 1 && l.routes(p) != "" })
	if early := s.tooEarly(); len(early) > 0 {
		t.Errorf("the server heard %v, and of clients whose lease was alive: %v", s.heard, early)
	}
}

func TestAnAddressThatTheServerTakesAwayIsReplaced(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	s := l.serve(time.Hour)
	s.set(func(s *server) { s.renew = 2 * time.Second })
	p := l.add(1)
	l.keeper()
	s.set(func(s *server) { s.refuse, s.base = true, netip.MustParseAddr("10.9.2.1") })
	until(t, "the record says so", func() bool {
		r := l.load(p)
		return r.State == lease.Bound && r.Lease.Address == netip.MustParsePrefix("10.9.2.1/16") && r.Error == ""
	})
	if got := l.addresses(p); len(got) != 1 {
		t.Errorf("the pod has %v", got)
	}
	if got := l.routes(p); got != "0.0.0.0/0 via 10.9.0.1" {
		t.Errorf("the pod's routes: %s", got)
	}
}

func TestALeaseRunsOutInTheKernelAndIsGotAgain(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	s := l.serve(10 * time.Second)
	p := l.add(1)
	s.set(func(s *server) { s.silence = true })
	l.keeper()
	until(t, "the address's end", func() bool { return len(l.addresses(p)) == 0 })
	until(t, "the record says so", func() bool { return l.load(p).State == lease.Expired })
	s.set(func(s *server) { s.silence, s.lease = false, time.Hour })
	until(t, "the address is back", func() bool { return len(l.addresses(p)) == 1 && l.load(p).State == lease.Bound })
	if _, ok := l.addresses(p)[p.record.Lease.Address]; !ok {
		t.Errorf("the pod has %v, want %v again", l.addresses(p), p.record.Lease.Address)
	}
}

// The kernel takes the other addresses of a network away with the first.
func TestAnAddressOfTheSameNetworkTakesTheOldOnesPlace(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	p := l.connect(1)
	pod := l.enter(p)
	defer pod.close()
	old := &dhcpc.Lease{
		Address: netip.MustParsePrefix("10.9.1.1/16"), Routes: []dhcpc.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("10.9.0.1")}},
		Server: netip.MustParseAddr("10.9.0.1"), MAC: p.record.Client.MAC, Obtained: now(),
		Renew: now().Add(time.Hour), Rebind: now().Add(time.Hour), Expire: now().Add(time.Hour),
	}
	next := *old
	next.Address, next.MTU = netip.MustParsePrefix("10.9.1.2/16"), 1400
	next.Routes = []dhcpc.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("10.9.0.2")}}
	r := p.record
	r.State, r.Lease, r.Applied = lease.Bound, old, r.Policy.Apply(old)
	l.write(r)
	if err := pod.apply(r.Applied, time.Hour, time.Hour); err != nil {
		t.Fatal(err)
	}
	k, err := New(&Config{Leases: l.dir})
	if err != nil {
		t.Fatal(err)
	}
	v := &visit{Keeper: k, ctx: t.Context(), r: r}
	if err := v.underLockOf(func(h *lease.Held) error { return v.apply(h, pod, &next) }); err != nil {
		t.Fatal(err)
	}
	got := l.addresses(p)
	if left := got[next.Address]; len(got) != 1 || left < 59*time.Minute {
		t.Errorf("the pod has %v", got)
	}
	if got := l.routes(p); got != "0.0.0.0/0 via 10.9.0.2" {
		t.Errorf("the pod's routes: %s", got)
	}
	if out := nstest.Run(t, p.ns, "ip", "link", "show", "eth0"); !strings.Contains(out, "mtu 1400 ") {
		t.Errorf("MTU: %s", out)
	}
	// A bridge may follow the lowest of its ports.
	for _, link := range []string{r.HostIf, r.Bridge} {
		if out := nstest.Run(t, l.host, "ip", "link", "show", link); !strings.Contains(out, "mtu 1500 ") {
			t.Errorf("the server has changed the host's: %s", out)
		}
	}
}

func TestAPodIsGoneOnlyForSure(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	p := l.connect(1)
	k := l.kernel()
	l.enter(p).close()
	elsewhere := *p.record
	elsewhere.NetNS = filepath.Join(t.TempDir(), "none")
	if _, err := k.enter(&elsewhere); err == nil || errors.Is(err, errGone) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a path that the keeper does not see, of a pod whose port is there: %v", err)
	}
	other := *p.record
	other.NetNSCookie++
	if _, err := k.enter(&other); err == nil || errors.Is(err, errGone) {
		t.Errorf("a path of another namespace, while the port is there: %v", err)
	}
	// The same without the port.
	for _, r := range []*lease.Record{&elsewhere, &other} {
		r.HostIf = "veth0none"
		if _, err := k.enter(r); !errors.Is(err, errGone) {
			t.Errorf("without the port: %v, want %v", err, errGone)
		}
	}
	// An interface that somebody took out of the pod is no sign of its end.
	nstest.Run(t, p.ns, "ip", "link", "set", "eth0", "down")
	nstest.Run(t, p.ns, "ip", "link", "set", "eth0", "name", "eth9")
	if _, err := k.enter(p.record); err == nil || errors.Is(err, errGone) {
		t.Errorf("without its interface: %v", err)
	}
}

func TestAReusedPathIsNotThePod(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	s := l.serve(time.Hour)
	p := l.add(1)
	// The runtime removes the pod, and another gets the path.
	if err := unix.Unmount(p.record.NetNS, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	p.die()
	next := nstest.New(t)
	if err := unix.Mount(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), next.FD()), p.record.NetNS, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	l.keeper()
	until(t, "its record is gone", func() bool { return l.load(p) == nil })
	until(t, "a RELEASE", func() bool { return s.count("RELEASE") == 1 })
	if _, ok := s.given[string(p.record.Client.ClientID)]; ok {
		t.Error("the server did not take it for the client's")
	}
}

func TestDnsmasqRenewsAndTakesBack(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	leases := nstest.NewDnsmasq(l, l.remote, "eth0", "--dhcp-range=10.9.1.1,10.9.1.50,255.255.0.0,3600").Leased
	p := l.add(1)
	address := p.record.Lease.Address
	until(t, "its lease file has it", func() bool { return strings.Contains(leases(), address.Addr().String()) })
	due(p.record)
	p.record.Lease.Expire = p.record.Lease.Expire.Add(-10 * time.Second)
	l.write(p.record)
	stop := l.keeper()
	until(t, "a renewal", func() bool { return l.load(p).Lease.Expire.Sub(p.record.Lease.Expire) > time.Second })
	if got := l.load(p); got.Lease.Address != address || got.Error != "" {
		t.Errorf("the record has %v, %q", got.Lease.Address, got.Error)
	}
	stop()
	// The pod ends while no keeper runs, and without a DEL.
	if err := unix.Unmount(p.record.NetNS, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	p.die()
	if err := os.Remove(p.record.NetNS); err != nil {
		t.Fatal(err)
	}
	l.keeper()
	until(t, "its record is gone", func() bool { return l.load(p) == nil })
	until(t, "dnsmasq has the address back", func() bool { return !strings.Contains(leases(), address.Addr().String()) })
}

// process starts one on the host, and waits until it is ready.
func (l *lan) process() *exec.Cmd {
	l.Helper()
	// With no more capabilities than the systemd unit leaves it.
	cmd := exec.Command("setpriv", "--bounding-set", "-all,+sys_admin,+net_admin,+net_raw,+net_bind_service,+sys_ptrace", os.Args[0])
	cmd.Env = append(os.Environ(), "TOMBOLO_TEST_KEEPER="+l.dir.Path())
	cmd.Stderr = l.Output()
	out, err := cmd.StdoutPipe()
	if err != nil {
		l.Fatal(err)
	}
	if err := l.host.Do(cmd.Start); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	if _, err := out.Read(make([]byte, 16)); err != nil {
		l.Fatalf("the keeper did not begin: %v", err)
	}
	return cmd
}

func TestAKeeperThatIsStoppedIsNoticed(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	cmd := l.process()
	if err := l.dir.CheckKeeper(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	until(t, "it is noticed", func() bool { return errors.Is(l.dir.CheckKeeper(), lease.ErrSilent) })
	if err := cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	until(t, "it is alive again", func() bool { return l.dir.CheckKeeper() == nil })
}

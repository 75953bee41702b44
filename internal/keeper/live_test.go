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
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// The kernel takes the other addresses of a network away with the first.
func TestAnAddressOfTheSameNetworkTakesTheOldOnesPlace(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	p := l.connect(1)
	pod := l.enter(p)
	defer pod.close()
	old := &dhcpc.Lease{
		Address: netip.MustParsePrefix("10.9.1.1/16"), Routes: []dhcpc.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.9.0.1")}},
		Server: netip.MustParseAddr("10.9.0.1"), MAC: p.record.Client.MAC, Obtained: now(),
		Renew: now().Add(time.Hour), Rebind: now().Add(time.Hour), Expire: now().Add(time.Hour),
	}
	next := *old
	next.Address, next.MTU = netip.MustParsePrefix("10.9.1.2/16"), 1400 // the pod's MTU is its own
	next.Routes = []dhcpc.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.9.0.2")}}
	r := p.record
	r.State, r.Lease, r.Applied = lease.Bound, old, r.Policy.Apply(old)
	l.write(r)
	must.Succeed(t, pod.apply(r.Applied, time.Hour, time.Hour))
	k := must.Of(New(&Config{Leases: l.dir})).Get(t)
	v := &visit{Keeper: k, ctx: t.Context(), r: r}
	must.Succeed(t, v.underLock(func(h *lease.LockedRecord) error { return v.apply(h, pod, &next) }))
	got := l.addresses(p)
	if left := got[next.Address]; len(got) != 1 || left < 59*time.Minute {
		t.Errorf("the pod has %v", got)
	}
	if got := l.routes(p); got != "0.0.0.0/0 via 10.9.0.2" {
		t.Errorf("the pod's routes: %s", got)
	}
	if out := nstest.Run(t, p.ns, "ip", "link", "show", "eth0"); !strings.Contains(out, "mtu 1500 ") {
		t.Errorf("MTU: %s", out)
	}
	// What the pod's owner makes of the route stays, also when the lease moves again.
	nstest.Run(t, p.ns, "ip", "route", "replace", "default", "via", "10.9.0.9", "dev", "eth0", "proto", "116")
	v.m.confirm = false // a second later
	last := next
	last.Address, last.Routes = netip.MustParsePrefix("10.9.1.3/16"), old.Routes
	must.Succeed(t, v.underLock(func(h *lease.LockedRecord) error { return v.apply(h, pod, &last) }))
	if got := l.routes(p); len(l.addresses(p)) != 1 || l.addresses(p)[last.Address] == 0 || got != "0.0.0.0/0 via 10.9.0.9" {
		t.Errorf("the pod has %v, and the routes %s", l.addresses(p), got)
	}
	v.m.confirm = false
	nstest.Run(t, p.ns, "ip", "address", "flush", "dev", "eth0")
	must.Succeed(t, v.underLock(func(h *lease.LockedRecord) error { return v.apply(h, pod, &next) }))
	if got := l.addresses(p); len(got) != 0 {
		t.Errorf("the pod's owner has removed the address, and the pod has %v", got)
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
	nstest.Run(t, p.ns, "sh", "-ec", "ip link set eth0 down; ip link set eth0 name eth9; ip link add eth0 type veth")
	l.enter(p).close()
	// An interface that somebody took out of the pod is no sign of its end.
	nstest.Run(t, p.ns, "ip", "link", "set", "eth9", "netns", nstest.Path(t, nstest.New(t)))
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
	must.Succeed(t, unix.Unmount(p.record.NetNS, unix.MNT_DETACH))
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

// process starts one on the host, and waits until it is ready.
func (l *lan) process() *exec.Cmd {
	l.Helper()
	// With no more capabilities than the systemd unit leaves it.
	cmd := exec.Command("setpriv", "--bounding-set", "-all,+sys_admin,+net_admin,+net_raw,+net_bind_service,+sys_ptrace", os.Args[0])
	cmd.Env = append(os.Environ(), "TOMBOLO_TEST_KEEPER="+l.dir.Path())
	cmd.Stderr = l.Output()
	out := must.Of(cmd.StdoutPipe()).Get(l)
	must.Succeed(l, l.host.Do(cmd.Start))
	l.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	if _, err := out.Read(make([]byte, 16)); err != nil {
		l.Fatalf("the keeper did not begin: %v", err)
	}
	return cmd
}

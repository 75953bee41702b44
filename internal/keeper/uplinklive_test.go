package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/internal/nstest/fault"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
)

// home is a host whose NIC leads to a router: with addresses of both families, and
// everything else behind the router.
type home struct {
	*testing.T
	host, router *netns.NS
	state        *state.Dir
}

const (
	routerAddress  = "10.9.0.1"
	beyondTheRoute = "198.51.100.1"
)

func newHome(t *testing.T) *home {
	t.Helper()
	dir, err := state.Open(inMemory(t) + "/state")
	if err != nil {
		t.Fatal(err)
	}
	h := &home{T: t, host: nstest.New(t), router: nstest.New(t), state: dir}
	nstest.Veth(t, h.host, "eth0", h.router, "lan0")
	nstest.Run(t, h.router, "ip", "address", "add", routerAddress+"/16", "dev", "lan0")
	nstest.Run(t, h.router, "ip", "address", "add", beyondTheRoute+"/32", "dev", "lo")
	nstest.Run(t, h.router, "ip", "address", "add", "fd09::1/64", "dev", "lan0", "nodad")
	nstest.Run(t, h.host, "ip", "address", "add", hostAddress+"/16", "dev", "eth0")
	nstest.Run(t, h.host, "ip", "address", "add", "fd09::2/64", "dev", "eth0", "nodad")
	nstest.Run(t, h.host, "ip", "route", "add", "default", "via", routerAddress)
	until(t, "the LAN", h.isReachable)
	return h
}

// isReachable says whether the host answers, and is answered from beyond its router.
func (h *home) isReachable() bool {
	return nstest.Ping(h, h.router, netip.MustParseAddr(hostAddress)) == nil &&
		nstest.Ping(h, h.router, netip.MustParseAddr("fd09::2")) == nil &&
		nstest.Ping(h, h.host, netip.MustParseAddr(beyondTheRoute)) == nil
}

func (h *home) uplinks(fn func(*uplink.Conn) error) {
	h.Helper()
	conn, err := uplink.Dial(&uplink.Config{NetNS: h.host})
	if err == nil {
		err = errors.Join(fn(conn), conn.Close())
	}
	if err != nil {
		h.Fatal(err)
	}
}

func (h *home) take() {
	h.Helper()
	lock, err := h.state.LockUplink(h.Context(), "eth0")
	if err != nil {
		h.Fatal(err)
	}
	defer lock.Close()
	h.uplinks(func(c *uplink.Conn) error {
		_, err := c.Take(h.Context(), uplink.Uplink{NIC: "eth0", Bridge: "br0", ClientID: "mac"}, h.state.Uplink("eth0"))
		return err
	})
	until(h.T, "the host is reachable after the takeover", h.isReachable)
}

// record gives the uplink's record; nil if there is none.
func (h *home) record() *uplink.Record {
	h.Helper()
	data, err := h.state.Uplink("eth0").Load()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var rec *uplink.Record
	if err == nil {
		rec, err = uplink.ParseRecord(data)
	}
	if err != nil {
		h.Fatal(err)
	}
	return rec
}

// isWell says whether the takeover is as it was made.
func (h *home) isWell() (well bool) {
	h.Helper()
	rec := h.record()
	if rec == nil || rec.State != uplink.Taken {
		return false
	}
	h.uplinks(func(c *uplink.Conn) error {
		diffs, err := c.Check(h.Context(), rec)
		well = len(diffs) == 0
		return err
	})
	return well
}

// keep runs a keeper in the host until the test's end.
func (h *home) keep() {
	h.Helper()
	l := &lan{T: h.T, host: h.host, dir: h.leases(), state: h.state}
	l.keeper()
}

func (h *home) leases() *lease.Dir {
	h.Helper()
	leases, err := lease.Open(h.state.Path() + "/leases")
	if err != nil {
		h.Fatal(err)
	}
	return leases
}

// leased says whether the lease that the NIC had is the keeper's to renew.
func (h *home) leased() bool {
	h.Helper()
	r, err := h.leases().Load(lease.HostHash("eth0"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		h.Fatal(err)
	}
	return err == nil && r.Bridge == "br0" && r.Lease.Address == netip.MustParsePrefix(hostAddress+"/16")
}

// A process that was killed at a takeover has not said that there is a lease.
func TestTheLeaseOfANICThatIsTakenOverIsLookedAfter(t *testing.T) {
	t.Parallel()
	h := newHome(t)
	nstest.Run(t, h.host, "ip", "address", "change", hostAddress+"/16", "dev", "eth0", "valid_lft", "3600", "preferred_lft", "3600")
	h.take()
	h.keep()
	until(t, "the lease is adopted", h.leased)
	// Somebody gives the NIC back, and is killed at it.
	if !h.killAt("restore", 6) {
		t.Fatal("it was not killed")
	}
	until(t, "it is given back", func() bool { return h.record() == nil })
	if h.leased() {
		t.Error("the keeper goes on to renew the lease")
	}
	if out := nstest.Run(t, h.host, "ip", "address", "show", "eth0"); !strings.Contains(out, hostAddress+"/16 scope global dynamic") {
		t.Errorf("the address has no end any more, or another:\n%s", out)
	}
}

func TestWhatANetworkManagerUndoesIsPutBack(t *testing.T) {
	for what, commands := range map[string][]string{
		"the NIC is no port":                     {"ip link set eth0 nomaster"},
		"an address is back on the NIC":          {"ip address add " + hostAddress + "/16 dev eth0"},
		"the bridge loses its addresses":         {"ip address flush dev br0"},
		"the bridge loses its addresses of IPv4": {"ip -4 address flush dev br0"},
		"the bridge is deleted":                  {"ip link delete br0"},
		"the bridge is down":                     {"ip link set br0 down"},
		"all of it": {
			"ip link set eth0 nomaster", "ip address flush dev br0", "ip address add " + hostAddress + "/16 dev eth0", "ip address add fd09::2/64 dev eth0 nodad",
			"ip route replace default via " + routerAddress + " dev eth0",
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			h := newHome(t)
			h.take()
			h.keep()
			for i, command := range commands {
				args := strings.Fields(command)
				if out, err := nstest.Try(h.host, args[0], args[1:]...); err != nil && i == 0 {
					t.Fatalf("%s: %v: %s", command, err, out)
				} // the keeper may be at it by now
			}
			until(t, "it is well", h.isWell)
			until(t, "the host is reachable", h.isReachable)
		})
	}
}

// It was undone while no keeper ran.
func TestAKeeperThatBeginsMendsWhatItFinds(t *testing.T) {
	t.Parallel()
	h := newHome(t)
	h.take()
	nstest.Run(t, h.host, "ip", "link", "set", "eth0", "nomaster")
	if h.isWell() {
		t.Fatal("nothing is wrong without the port")
	}
	h.keep()
	until(t, "it is well", h.isWell)
	until(t, "the host is reachable", h.isReachable)
}

func TestAKeeperHearsOfATakeoverAndOfItsEnd(t *testing.T) {
	t.Parallel()
	h := newHome(t)
	h.keep()
	h.take()
	nstest.Run(t, h.host, "ip", "link", "set", "eth0", "nomaster")
	until(t, "it is well", h.isWell)
	lock, err := h.state.LockUplink(t.Context(), "eth0")
	if err != nil {
		t.Fatal(err)
	}
	h.uplinks(func(c *uplink.Conn) error { return c.Restore(h.Context(), h.record(), h.state.Uplink("eth0")) })
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	if h.record() != nil {
		t.Errorf("given back, with record %v", h.record())
	}
	until(t, "the host is reachable", h.isReachable)
	if out := nstest.Run(t, h.host, "ip", "address", "show", "eth0"); !strings.Contains(out, hostAddress) || strings.Contains(out, "master") {
		t.Errorf("the NIC has not what it had:\n%s", out)
	}
}

// suicide is a journal whose process is killed when it is about to save for the nth time,
// or has just done so.
type suicide struct {
	uplink.Journal
	n     int
	after bool
}

func (s *suicide) Save(record []byte) error {
	if s.n--; s.n > 0 {
		return s.Journal.Save(record)
	}
	if s.after {
		if err := s.Journal.Save(record); err != nil {
			return err
		}
	}
	return unix.Kill(os.Getpid(), unix.SIGKILL)
}

// uplinkProcess takes the uplink over, or gives it back, in a process of its own that is
// killed at a step: "take 3" or "restore 3".
func uplinkProcess(dir, verb, step string) int {
	d, err := state.Open(dir)
	if err != nil {
		panic(err)
	}
	n, err := strconv.Atoi(step)
	if err != nil {
		panic(err)
	}
	if _, err := d.LockUplink(context.Background(), "eth0"); err != nil {
		panic(err)
	}
	conn, err := uplink.Dial(nil)
	if err != nil {
		panic(err)
	}
	file := d.Uplink("eth0")
	journal := &suicide{Journal: file, n: (n + 1) / 2, after: n%2 == 0}
	if verb == "take" {
		_, err = conn.Take(context.Background(), uplink.Uplink{NIC: "eth0", Bridge: "br0"}, journal)
	} else {
		var rec *uplink.Record
		data, loadErr := file.Load()
		if loadErr == nil {
			rec, loadErr = uplink.ParseRecord(data)
		}
		if loadErr != nil {
			panic(loadErr)
		}
		err = conn.Restore(context.Background(), rec, journal)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// killAt runs it, and says whether it was killed before it had come to its end.
func (h *home) killAt(verb string, step int) (killed bool) {
	h.Helper()
	cmd := exec.Command(os.Args[0], verb, strconv.Itoa(step))
	cmd.Env = append(os.Environ(), "TOMBOLO_TEST_UPLINK="+h.state.Path())
	cmd.Stderr = h.Output()
	var err error
	if startErr := h.host.Do(func() error { err = cmd.Run(); return nil }); startErr != nil {
		h.Fatal(startErr)
	}
	var exit *exec.ExitError
	switch {
	case err == nil:
		return false
	case errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL:
		return true
	}
	h.Fatalf("%s, to be killed at %d: %v", verb, step, err)
	return false
}

// Whatever is left of a takeover, or of a return, that was killed at a step, the keeper
// brings it to an end: the host is reachable, and it is taken or it is given back.
func TestAKillAtAnyStepLeavesAReachableHost(t *testing.T) {
	const enough = 100
	first, every, err := fault.Strides(4) // and in test-long each
	if err != nil {
		t.Fatal(err)
	}
	for _, verb := range []string{"take", "restore"} {
		t.Run(verb, func(t *testing.T) {
			t.Parallel()
			killed := true
			for step := first; killed && step < enough; step += every {
				t.Run(fmt.Sprint(step), func(t *testing.T) {
					h := newHome(t)
					if verb == "restore" {
						h.take()
					}
					if killed = h.killAt(verb, step); !killed {
						if step < 8 {
							t.Errorf("no more than %d steps", step)
						}
						return
					}
					h.keep()
					until(t, "it is taken, or it is given back", func() bool {
						rec := h.record()
						return rec == nil || rec.State == uplink.Taken
					})
					until(t, "the host is reachable", h.isReachable)
					if rec := h.record(); rec != nil {
						until(t, "it is well", h.isWell)
						return
					}
					if out := nstest.Run(t, h.host, "ip", "link"); strings.Contains(out, "br0") {
						t.Errorf("it was given back, and there is the bridge:\n%s", out)
					}
				})
				if every == 0 {
					break
				}
			}
			if killed && every > 0 {
				t.Errorf("%d steps were not enough", enough)
			}
		})
	}
}

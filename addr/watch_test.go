package addr_test

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// settling is a host whose eth1 has a neighbour that may hold addresses, and that
// hears of its own.
type settling struct {
	host
	eth1  int
	other host
	watch *addr.Watch
}

func newSettling(t *testing.T) *settling {
	t.Helper()
	s := &settling{host: newHost(t), other: newHost(t)}
	s.eth1, _ = nstest.Veth(t, s.ns, "eth1", s.other.ns, "eth1")
	nstest.Sysctl(t, s.ns, "net/ipv6/conf/eth1/accept_dad", "1")
	s.watch = must.Of(addr.Listen(s.ns)).Get(t)
	t.Cleanup(func() { s.watch.Close() })
	return s
}

func (s *settling) add(t *testing.T, a addr.Address) netip.Addr {
	t.Helper()
	a.Link = s.eth1
	must.Succeed(t, s.c.Add(t.Context(), a))
	return a.Prefix.Addr()
}

// unplug takes eth1's carrier away, and has the kernel hold the detection of duplicates
// until plug: however slow the test is, an address that it adds is tentative.
func (s *settling) unplug(t *testing.T) {
	t.Helper()
	nstest.Run(t, s.other.ns, "ip", "link", "set", "eth1", "down")
	nstest.Run(t, s.ns, "ip", "link", "set", "eth1", "down")
	nstest.Run(t, s.ns, "ip", "link", "set", "eth1", "up")
}

func (s *settling) plug(t *testing.T) {
	t.Helper()
	nstest.Run(t, s.other.ns, "ip", "link", "set", "eth1", "up")
}

// addTentative adds an address that is not usable before plug.
func (s *settling) addTentative(t *testing.T, a addr.Address) netip.Addr {
	t.Helper()
	s.unplug(t)
	pending := s.add(t, a)
	list, err := s.c.List(t.Context(), addr.Filter{Link: s.eth1, Family: unix.AF_INET6})
	must.That(t, err == nil && len(list) == 1 && list[0].Flags&unix.IFA_F_TENTATIVE != 0,
		"listed %v, %v; want a tentative address", list, err)
	return pending
}

func (s *settling) del(t *testing.T, a netip.Addr) {
	t.Helper()
	must.Succeed(t, s.c.Remove(t.Context(), addr.Address{Prefix: netip.PrefixFrom(a, 64), Link: s.eth1}))
}

// flood has more announced than a socket that is not read has room for.
func (s *settling) flood(t *testing.T) {
	t.Helper()
	witness := must.Of(nl.Subscribe(unix.NETLINK_ROUTE, s.ns, unix.RTNLGRP_IPV6_IFADDR)).Get(t)
	defer witness.Close()
	a := addr.Address{Prefix: nstest.Prefix("fd02::1/64"), Link: s.eth0, Flags: unix.IFA_F_NODAD}
	for range 500 {
		must.Succeed(t, errors.Join(s.c.Add(t.Context(), a), s.c.Remove(t.Context(), a)))
	}
	for {
		heard, err := witness.Queued()
		if errors.Is(err, unix.ENOBUFS) {
			break
		}
		must.That(t, err == nil && len(heard) > 0,
			"Queued: %v, %v, want %v: the fault did not fire", heard, err, unix.ENOBUFS)
	}
}

// patience is how long tests wait for what must come: far longer than any machine
// needs, however busy.
const patience = time.Minute

// settled waits for addresses of eth1, and not for ever.
func (s *settling) settled(t *testing.T, addrs ...netip.Addr) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return s.watch.Wait(ctx, s.c, s.eth1, addrs...)
}

func TestSettledAddressIsUsable(t *testing.T) {
	t.Parallel()
	s := newSettling(t)
	a := s.addTentative(t, addr.Address{Prefix: nstest.Prefix("fd01::1/64")})
	s.plug(t)
	must.Succeed(t, s.settled(t, nstest.Addr("10.1.0.1"), a))
	list, err := s.c.List(t.Context(), addr.Filter{Link: s.eth1})
	expect.That(t, err == nil && len(list) == 1 && list[0].Flags&unix.IFA_F_TENTATIVE == 0,
		"listed %v, %v; want a usable address", list, err)
}

func TestAddressThatIsMadeAnewSettles(t *testing.T) {
	t.Parallel()
	s := newSettling(t)
	a := s.addTentative(t, addr.Address{Prefix: nstest.Prefix("fd01::1/64")})
	// It is announced as deleted first.
	changed, err := s.c.Ensure(t.Context(), addr.Address{Prefix: nstest.Prefix("fd01::1/80"), Link: s.eth1})
	must.That(t, changed && err == nil, "Ensure: changed %t, %v, want a change", changed, err)
	s.plug(t)
	expect.Success(t, s.settled(t, a))
}

func TestAnnouncementsThatAreLostAreMadeUpFor(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		gone bool
		want error
	}{
		{"the address is usable", false, nil},
		{"the address is gone", true, fs.ErrNotExist},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			s := newSettling(t)
			a := s.addTentative(t, addr.Address{Prefix: nstest.Prefix("fd01::1/64")})
			s.flood(t)
			if tt.gone {
				s.del(t, a)
			}
			s.plug(t)
			expect.Is(t, s.settled(t, a), tt.want)
		})
	}
}

func TestAddressThatCannotSettleIsAnError(t *testing.T) {
	t.Parallel()
	a := nstest.Prefix("fd01::1/64")
	taken := func(t *testing.T, s *settling) {
		t.Helper()
		nstest.Run(t, s.other.ns, "ip", "address", "add", a.String(), "dev", "eth1", "nodad")
		nstest.WaitForAddresses(t, s.other.ns)
	}
	// Or it may be usable by the time that somebody comes.
	unplug := func(t *testing.T, s *settling) { s.unplug(t) }
	for _, tt := range []struct {
		name          string
		add           addr.Address
		before, after func(*testing.T, *settling) // adding it
		want          error
	}{
		{name: "another has it", add: addr.Address{Prefix: a}, before: taken, want: addr.ErrDuplicate},
		// The kernel takes away one that is not permanent.
		{name: "another has it, lent for a while", add: addr.Address{Prefix: a, Valid: ptr(time.Hour)}, before: taken, want: addr.ErrDuplicate},
		{name: "somebody removed it", add: addr.Address{Prefix: a}, before: unplug, want: fs.ErrNotExist, after: func(t *testing.T, s *settling) {
			s.del(t, a.Addr())
		}},
		{name: "somebody removed the link", add: addr.Address{Prefix: a}, before: unplug, want: fs.ErrNotExist, after: func(t *testing.T, s *settling) {
			nstest.Run(t, s.ns, "ip", "link", "del", "eth1")
		}},
		{name: "somebody set the link down", add: addr.Address{Prefix: a}, before: unplug, want: fs.ErrNotExist, after: func(t *testing.T, s *settling) {
			nstest.Run(t, s.ns, "ip", "link", "set", "eth1", "down")
		}},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			s := newSettling(t)
			if tt.before != nil {
				tt.before(t, s)
			}
			pending := s.add(t, tt.add)
			if tt.after != nil {
				tt.after(t, s)
			}
			expect.Is(t, s.settled(t, pending), tt.want)
		})
	}
}

// As programs do that are started again: the second time there is nothing to announce.
func TestWaitForWhatWasUsableBefore(t *testing.T) {
	t.Parallel()
	s := newSettling(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a := addr.Address{Prefix: nstest.Prefix("fd00::1/64"), Link: s.eth1}
	for _, want := range []bool{true, false} {
		changed, err := s.c.Ensure(ctx, a)
		expect.That(t, changed == want && err == nil, "changed: %t, %v", changed, err)
		expect.Success(t, s.watch.Wait(ctx, s.c, s.eth1, a.Prefix.Addr()), "wait after an Ensure that changed: %t", want)
	}
	later := must.Of(addr.Listen(s.ns)).Get(t)
	defer later.Close()
	expect.Success(t, later.Wait(ctx, s.c, s.eth1, a.Prefix.Addr()), "wait of one that began later")
	// What is not there yet may come.
	soon, end := context.WithTimeout(ctx, time.Second)
	defer end()
	expect.Is(t, later.Wait(soon, s.c, s.eth1, nstest.Addr("fd00::2")), context.DeadlineExceeded)
}

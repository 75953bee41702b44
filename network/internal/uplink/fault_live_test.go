package uplink_test

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/network/internal/uplink"
)

// Whichever step of the way back the kernel refuses, the host stays reachable, and once
// the kernel relents, the rest is done.
func TestARestoreThatTheKernelRefusesCutsNobodyOff(t *testing.T) {
	t.Parallel()
	const nic = 2 // veths are the first links of a namespace but for lo
	for name, fault := range map[string]*nltest.Fault{
		"the NIC's addresses":      {Type: unix.RTM_NEWADDR},
		"the NIC's IPv4 addresses": {Type: unix.RTM_NEWADDR, Match: isIPv4},
		"the NIC's routes":         {Type: unix.RTM_NEWROUTE, Match: func(m netlink.Message) bool { return by(m, nic) }},
		"the NIC's IPv6 routes":    {Type: unix.RTM_NEWROUTE, Match: func(m netlink.Message) bool { return by(m, nic) && !isIPv4(m) }},
		"that the NIC is no port":  {Type: unix.RTM_NEWLINK, Match: releases},
		"the bridge's addresses":   {Type: unix.RTM_DELADDR},
		"the bridge's deletion":    {Type: unix.RTM_DELLINK},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t)
			before := state(t, l.host)
			rec, j := take(t, l, toBridge())
			bridge := nstest.Index(t, l.host, "br0")
			if fault.Type == unix.RTM_DELLINK {
				fault.Match = func(m netlink.Message) bool { return index(m) == bridge }
			}
			fault.Errno = unix.ENOBUFS
			nltest.MustHaveFired(t, fault)
			conn := l.through(t, fault)
			expect.Is(t, conn.Restore(t.Context(), rec, j), unix.ENOBUFS, "restore")
			l.mustReach(t, "when the kernel had refused it")
			b := must.Of(j.load()).Get(t)
			rec, err := uplink.ParseRecord(b)
			must.That(t, err == nil && rec.State == uplink.Restoring, "the journal has %v, %v", rec, err)
			must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
			l.mustReach(t, "given back")
			expect.NoDiff(t, cmp.Diff(comparableState(before), comparableState(state(t, l.host))),
				"the host after it was given back")
		})
	}
}

// A pod that talks to every address of its network fills the table of all links: what is
// only cached of the NIC's neighbours is learnt again, and what an operator set is not.
func TestAFullNeighbourTableStopsNoTakeover(t *testing.T) {
	t.Parallel()
	for name, full := range map[string]bool{"nud stale": false, "nud reachable": false, "nud permanent": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t, append(plainHost(), "neigh add 10.0.0.77 lladdr 02:00:00:00:00:77 dev eth0 "+name)...)
			before := state(t, l.host)
			kept := nltest.Fault{Type: unix.RTM_NEWNEIGH, Match: copiesNeighbour, Errno: unix.ENOBUFS}
			nltest.MustHaveFired(t, &kept)
			conn := l.through(t, &kept)
			var j memory
			rec, err := conn.Take(t.Context(), toBridge(), &j)
			if full {
				expect.That(t, errors.Is(err, unix.ENOBUFS) && rec == nil,
					"take: %v, %v, want %v: the operator's neighbour would be lost", rec, err, unix.ENOBUFS)
			} else {
				must.Succeed(t, err)
				l.mustReach(t, "taken")
				must.Succeed(t, conn.Restore(t.Context(), rec, &j))
			}
			l.mustReach(t, "given back")
			expect.NoDiff(t, cmp.Diff(before, state(t, l.host)), "the host in the end")
		})
	}
}

// copiesNeighbour says that a request writes a neighbour with a MAC, and does not ask for one.
func copiesNeighbour(m netlink.Message) bool {
	return len(m.Data) >= unix.SizeofNdMsg && binary.NativeEndian.Uint16(m.Data[8:])&(unix.NUD_PERMANENT|unix.NUD_REACHABLE|unix.NUD_STALE) != 0
}

// isIPv4 is of a message about an address or a route.
func isIPv4(m netlink.Message) bool { return len(m.Data) > 0 && m.Data[0] == unix.AF_INET }

// by says that a route leads out of a link.
func by(m netlink.Message, link int) bool {
	v, found := number(m.Data[unix.SizeofRtMsg:], unix.RTA_OIF)
	return found && int(v) == link
}

// number finds an attribute of four bytes.
func number(b []byte, typ uint16) (v uint32, found bool) {
	err := nl.Decode(nl.Pick(b, typ), func(ad *netlink.AttributeDecoder) {
		v, found = ad.Uint32(), true
	})
	return v, found && err == nil
}

func index(m netlink.Message) int { return int(binary.NativeEndian.Uint32(m.Data[4:])) }

// releases says that a request makes a link no port any more.
func releases(m netlink.Message) bool {
	if len(m.Data) < unix.SizeofIfInfomsg {
		return false // nf_tables' begin of a transaction has the same type
	}
	master, found := number(m.Data[unix.SizeofIfInfomsg:], unix.IFLA_MASTER)
	return found && master == 0
}

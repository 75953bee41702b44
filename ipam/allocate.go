package ipam

import (
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"
)

// allocate reserves an address of the range set p[index] for owner, and returns it. If requested is valid, it reserves
// this address, or returns an error that matches ErrAddressTaken. Without a requested address, it first tries addresses
// that are kept for the owner's name (see HostLocal.Keep). Then it takes the next free address in turn. If s.keeper is
// set, it takes an address that another name keeps only if no other is free.
func (s *session) allocate(p pool, index int, requested netip.Addr, owner Owner) (netip.Addr, error) {
	set := p[index]
	if requested.IsValid() {
		if name := s.keeperOf(requested); name != "" && name != s.keeper {
			return netip.Addr{}, s.failf(ErrAddressTaken, "the requested address %s is kept for %s "+
				"(in %s): request another, or delete that line", requested, name, s.keptPath())
		}

		ok, err := s.reserve(requested, reservation{Owner: owner})
		if err != nil {
			return netip.Addr{}, err
		}
		if !ok {
			return netip.Addr{}, s.failf(ErrAddressTaken, "the requested address %s is taken by %s", requested,
				s.holder(requested))
		}
		s.writeLast(index, requested)
		return requested, nil
	}

	if addr, err := s.takeKept(p, set, owner, true); addr.IsValid() || err != nil {
		return addr, err
	}

	last, _ := readFile(s.lastPath(index), maxLast)
	addr, err := s.nextFree(p, set, parseLast(last), owner)
	if err == nil {
		s.writeLast(index, addr)
	}

	if errors.Is(err, ErrPoolFull) {
		if addr, keptErr := s.takeKept(p, set, owner, false); addr.IsValid() || keptErr != nil {
			return addr, keptErr
		}
	}

	return addr, err
}

// holder describes the attachment that has addr, for an error message.
func (s *store) holder(addr netip.Addr) string {
	held, state, err := s.read(addr)
	switch {
	case err != nil || state != stateComplete:
		return "the file " + s.path(addr)
	case held.hash != "":
		return "the attachment with hash " + held.hash
	default:
		return "container " + held.ContainerID
	}
}

// The format has no list of free addresses, and the reference plugin, which may run beside us, would not maintain
// one. So allocation tries addresses. The next address in turn is almost always free, since it was released a whole
// round ago.

// nextFree reserves the first address after last that is free and that no name keeps. It tries a few addresses one by
// one, and lists the directory only if none of these is available. So the cost of a normal ADD does not depend on the
// number of reservations. If no address is left, the error matches ErrPoolFull.
func (s *session) nextFree(p pool, set RangeSet, last netip.Addr, owner Owner) (netip.Addr, error) {
	var taken map[netip.Addr]bool
	tried := 0
	for addr := range set.after(last, p) {
		if tried++; tried > maxProbes && taken == nil {
			// From here on compare only names and sizes, so that a nearly full /16 costs one listing and not 60,000
			// attempts.
			addrs, err := s.list()
			if err != nil {
				return netip.Addr{}, err
			}
			taken = reservedAddresses(addrs, p, set)
		}

		if taken[addr] && !s.isEmpty(addr) || s.keeperOf(addr) != "" {
			continue
		}

		if ok, err := s.reserve(addr, reservation{Owner: owner}); ok || err != nil {
			return addr, err
		}
	}

	return netip.Addr{}, s.fullError(set, set.size(p), set.size(p))
}

// reservedAddresses returns the addresses in addrs that the set could have assigned. addrs are the addresses that have
// a reservation file.
func reservedAddresses(addrs []netip.Addr, p pool, set RangeSet) map[netip.Addr]bool {
	taken := make(map[netip.Addr]bool, len(addrs))
	for _, addr := range addrs {
		if set.rangeOf(addr) != nil && !p.isGateway(addr) {
			taken[addr] = true
		}
	}
	return taken
}

// isEmpty reports whether the file of addr is empty. It only looks at the size, since there may be many files.
func (s *store) isEmpty(addr netip.Addr) bool {
	var stat unix.Stat_t
	err := unix.Lstat(s.path(addr), &stat)
	return err == nil && stat.Mode&unix.S_IFMT == unix.S_IFREG && stat.Size == 0
}

// fullError returns an error that matches ErrPoolFull. taken is the number of reserved addresses, and size the number
// of all addresses of the set.
func (s *store) fullError(set RangeSet, taken, size uint64) error {
	return s.failf(ErrPoolFull, "%s is full: %d of %d addresses reserved (in %s): "+
		"delete pods, run GC, or give the network more addresses", set.describe(), taken, size, s.dir)
}

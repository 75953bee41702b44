package ipam

import (
	"cmp"
	"errors"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/file"
)

const (
	// keptName is the file with the addresses that names keep, a line each: "<address> <name> <interface>". The last
	// lines are those of the addresses that were released last.
	keptName = ".tombolo-kept"
	// maxKept is the number of lines that the file can have. A name is at most maxKeptName bytes long.
	maxKept, maxKeptName = 2000, 400
)

// Keep returns a copy for an attachment with a lasting name, such as a pod's namespace and name. Its Add assigns the
// addresses that the name's last attachment had, unless another attachment has them. Addresses that Add assigned
// without Want stay with the name after Del: Add assigns them to others only if no other address is free, those that
// were released first before others. Beyond some 2,000 addresses the oldest are forgotten. A name that is empty or
// too long, or has spaces, is an error that matches tombolo.ErrInvalid.
func (h *HostLocal) Keep(name string) (*HostLocal, error) {
	if fields := strings.Fields(name); len(fields) != 1 || fields[0] != name || len(name) > maxKeptName {
		return nil, newError(tombolo.ErrInvalid, "network %q: %.100q is not a name of up to %d bytes without spaces",
			h.store.network, name, maxKeptName)
	}
	bound := *h
	bound.keeper = name
	return &bound, nil
}

// A keptAddress is an address and the name with the interface that keeps it.
type keptAddress struct {
	addr netip.Addr
	name string
}

func (s *store) keptPath() string { return s.dir + "/" + keptName }

// readKept reads the addresses that names keep, in the order of the file. A file that cannot be read has none.
func (s *store) readKept() (list []keptAddress) {
	data, _ := file.Read(s.keptPath(), file.MaxRecord)
	for line := range strings.Lines(string(data)) {
		text, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		if addr := parseLast([]byte(text)); addr.IsValid() && name != "" {
			list = append(list, keptAddress{addr, name})
		}
	}
	return list
}

// writeKept replaces the file. An error is only a warning, since the file is a convenience.
func (s *session) writeKept(list []keptAddress) {
	var text strings.Builder
	for _, k := range list {
		text.WriteString(k.addr.String() + " " + k.name + "\n")
	}
	if err := file.Replace(s.keptPath()+tempSuffix, s.keptPath(), []byte(text.String())); err != nil {
		s.warnf("write which addresses pods keep: %s", err)
	}
}

// keeperOf returns the name that keeps addr, or "" if none does.
func (s *session) keeperOf(addr netip.Addr) string {
	for _, k := range s.kept {
		if k.addr == addr {
			return k.name
		}
	}
	return ""
}

// takeKept reserves the first free address of the set that the Add's own name keeps or, without own, another name. It
// returns no range if there is none.
func (s *session) takeKept(p pool, set rangeSet, owner Owner, own bool) (netip.Addr, *ipRange, error) {
	for _, k := range s.kept {
		r := set.rangeOf(k.addr)
		if r == nil || p.isGateway(k.addr) || (k.name == s.keeper) != own {
			continue
		}
		ok, err := s.reserve(k.addr, owner.reservation())
		if err != nil {
			return netip.Addr{}, nil, err
		}
		if ok {
			return k.addr, r, nil
		}
	}

	return netip.Addr{}, nil, nil
}

// keep records that the Add's name keeps these addresses and no others.
func (s *session) keep(addrs []netip.Addr) {
	list := slices.DeleteFunc(slices.Clone(s.kept), func(k keptAddress) bool {
		return k.name == s.keeper || slices.Contains(addrs, k.addr)
	})
	for _, addr := range addrs {
		list = append(list, keptAddress{addr, s.keeper})
	}

	for len(list) > maxKept {
		i := slices.IndexFunc(list, func(k keptAddress) bool {
			_, _, err := s.read(k.addr)
			return errors.Is(err, fs.ErrNotExist)
		})
		list = slices.Delete(list, max(i, 0), max(i, 0)+1)
	}

	s.writeKept(list)
}

// rest moves released addresses that names keep to the end of the file.
func (s *session) rest(released []netip.Addr) {
	list := s.readKept()
	rank := func(k keptAddress) int {
		if slices.Contains(released, k.addr) {
			return 1
		}
		return 0
	}
	if slices.ContainsFunc(list, func(k keptAddress) bool { return rank(k) > 0 }) {
		slices.SortStableFunc(list, func(a, b keptAddress) int { return cmp.Compare(rank(a), rank(b)) })
		s.writeKept(list)
	}
}

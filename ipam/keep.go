package ipam

import (
	"errors"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/file"
)

const (
	// keptName is the file with the addresses that Add keeps for lasting names. A line is "<address> <name>
	// <interface>". A line moves to the end when its address is assigned or released.
	keptName = ".tombolo-kept"
	// maxKept is the maximum number of lines of the file. maxKeptName is the maximum length of a name in bytes.
	maxKept, maxKeptName = 2000, 400
)

// Keep returns a copy of h for an attachment with a lasting name, such as a pod's namespace and name. Add of the copy
// assigns the addresses that the name's last attachment had, unless another attachment has them. After Del, the name
// keeps the addresses that Add assigned without Want. An Add for another name takes kept addresses only if no other is
// free, and begins with the address that was released first. An Add without Keep ignores the names. Beyond 2,000
// addresses, Add forgets the oldest, first those without a reservation. If the name is empty or longer than 400 bytes,
// or has spaces, Add returns an error that matches tombolo.ErrInvalid.
func (h *HostLocal) Keep(name string) *HostLocal {
	bound := *h
	bound.keeper = &name
	return &bound
}

// checkKeeper returns an error if the name of Keep is not valid.
func (h *HostLocal) checkKeeper() error {
	if h.keeper == nil {
		return nil
	}
	if name := *h.keeper; strings.Join(strings.Fields(name), "") != name || name == "" || len(name) > maxKeptName {
		return h.store.failf(tombolo.ErrInvalid, "to keep an address, the pod needs a name (K8S_POD_NAMESPACE "+
			"and K8S_POD_NAME) of 1 to %d bytes without spaces, not %.100q", maxKeptName, name)
	}
	return nil
}

// A keptAddress is an address that a name keeps. The name includes the interface: "<name> <interface>".
type keptAddress struct {
	addr netip.Addr
	name string
}

func (s *store) keptPath() string { return s.dir + "/" + keptName }

// readKept reads the addresses that names keep, in the order of the file. A file that cannot be read counts as empty.
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
	i := slices.IndexFunc(s.kept, func(k keptAddress) bool { return k.addr == addr })
	if i < 0 {
		return ""
	}
	return s.kept[i].name
}

// takeKept reserves the first free address of the set that this Add's name keeps. If own is false, it takes the first
// that another name keeps. It returns an invalid address if there is none.
func (s *session) takeKept(p pool, set RangeSet, owner Owner, own bool) (netip.Addr, error) {
	for _, k := range s.kept {
		if set.rangeOf(k.addr) == nil || p.isGateway(k.addr) || (k.name == s.keeper) != own {
			continue
		}
		ok, err := s.reserve(k.addr, reservation{Owner: owner})
		if ok || err != nil {
			return k.addr, err
		}
	}

	return netip.Addr{}, nil
}

// keep records that this Add's name keeps these addresses, and no others. If the file becomes too long, keep drops the
// oldest lines, first those whose address has no reservation.
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

// moveToEnd moves a released address to the end of the kept addresses, so that another attachment gets it last.
func (s *session) moveToEnd(addr netip.Addr) {
	list := s.readKept()
	i := slices.IndexFunc(list, func(k keptAddress) bool { return k.addr == addr })
	if i >= 0 {
		s.writeKept(append(slices.Delete(slices.Clone(list), i, i+1), list[i]))
	}
}

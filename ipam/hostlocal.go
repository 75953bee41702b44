package ipam

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
)

// DefaultDir is where the reference plugin keeps reservations, too.
const DefaultDir = "/var/lib/cni/networks"

// A Config says which addresses a HostLocal gives, and where it keeps which are given.
type Config struct {
	// Network names the network, and its directory in Dir. It is required.
	Network string
	// Dir has a directory for each network; empty is DefaultDir.
	Dir string
	// Ranges are what is given: an attachment gets one address from each set. Where there
	// are none, addresses can be released, and none given.
	Ranges []RangeSet
	// LockWait is how long to wait for another process's lock on the directory;
	// 0 means 5 s. The context may end it earlier.
	LockWait time.Duration
	// Search has Add look through all reservations for one of the attachment's before it gives another (ErrDuplicate), for
	// callers that have no record of attachments. An address that was asked for is not looked for.
	Search bool
}

// A HostLocal gives addresses out of ranges, in turn, and keeps the reservations in a
// directory, as the reference plugin host-local does. It holds no descriptors between
// calls, and can be used by several goroutines at once. Its zero gives nothing.
type HostLocal struct {
	store  store
	pool   pool
	wanted []netip.Addr // for each set of pool the address that was asked for; the zero Addr is any
	search bool
}

// NewHostLocal checks cfg, and leaves the disk alone. A wrong value is tombolo.ErrInvalid.
func NewHostLocal(cfg *Config) (*HostLocal, error) {
	if cfg == nil {
		return nil, newError(tombolo.ErrInvalid, "host-local: %s: there is no Config", tombolo.ErrInvalid)
	}
	if err := checkNetwork(cfg.Network); err != nil {
		return nil, err
	}
	dir := cmp.Or(cfg.Dir, DefaultDir)
	if !filepath.IsAbs(dir) {
		return nil, newError(tombolo.ErrInvalid, "host-local: %s: directory %q is not an absolute path", tombolo.ErrInvalid, dir)
	}
	p, err := newPool(cfg.Ranges)
	if err != nil {
		return nil, err
	}
	return &HostLocal{
		store:  store{dir: filepath.Join(dir, cfg.Network), network: cfg.Network, wait: cmp.Or(cfg.LockWait, defaultLockWait)},
		pool:   p,
		wanted: make([]netip.Addr, len(p)),
		search: cfg.Search,
	}, nil
}

// checkNetwork refuses names that would lead out of the directory.
func checkNetwork(name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		return newError(tombolo.ErrInvalid, "network name %q cannot be the name of a directory", name)
	}
	return nil
}

// ready returns an error if the HostLocal was not made by NewHostLocal.
func (h *HostLocal) ready() error {
	if h.store.network == "" {
		return newError(tombolo.ErrInvalid, "host-local: %s: the HostLocal was not made by NewHostLocal", tombolo.ErrInvalid)
	}
	return nil
}

// gives refuses one that has no addresses to give.
func (h *HostLocal) gives() error {
	if err := h.ready(); err != nil {
		return err
	}
	if len(h.pool) == 0 {
		return newError(tombolo.ErrInvalid, "network %q: host-local: %s: there are no ranges", h.store.network, tombolo.ErrInvalid)
	}
	return nil
}

// Bind returns a copy that knows the node.
func (h *HostLocal) Bind(node Node) Allocator {
	bound := *h
	bound.store.node = node
	return &bound
}

// Slow is false: all is on this node's disk.
func (*HostLocal) Slow() bool { return false }

// Want returns a copy whose Add gives these addresses, at most one of each set; where none
// of a set is named, any. One that is in no range, or a gateway, is tombolo.ErrInvalid. An address
// that is named twice counts once.
func (h *HostLocal) Want(addresses ...netip.Addr) (*HostLocal, error) {
	if err := h.gives(); err != nil {
		return nil, err
	}
	asked := *h
	asked.wanted = make([]netip.Addr, len(h.pool))
	for _, addr := range addresses {
		addr = addr.Unmap()
		i := slices.IndexFunc(h.pool, func(s rangeSet) bool { return s.rangeOf(addr) != nil })
		switch {
		case h.pool.isGateway(addr):
			return nil, newError(tombolo.ErrInvalid, "network %q: the requested address %s is a gateway", h.store.network, addr)
		case i < 0:
			return nil, newError(tombolo.ErrInvalid, "network %q: the requested address %s is in no range of it", h.store.network, addr)
		case asked.wanted[i].IsValid() && asked.wanted[i] != addr:
			return nil, newError(tombolo.ErrInvalid, "network %q: %s gives one address to an attachment, but %s and %s were requested",
				h.store.network, h.pool[i], asked.wanted[i], addr)
		}
		asked.wanted[i] = addr
	}
	return &asked, nil
}

// Add takes the lock once, gives one address of each set, and reads neither the directory nor any other
// reservation, as long as the next address in turn is free. ErrPoolFull says that no address is left,
// ErrAddressTaken that another attachment has the one that was asked for.
//
// Add finds that the attachment already has an address (ErrDuplicate) only where a candidate turns out to be its
// own, not by a search: the caller's record of attachments guards against it.
func (h *HostLocal) Add(ctx context.Context, owner Owner) (*Allocation, error) {
	if err := h.gives(); err != nil {
		return nil, err
	}
	if !ident.IsIdentifier(owner.ContainerID) || !ident.IsLinkName(owner.IfName) {
		// Its reservation could not be told from a foreign file, and would
		// never be released.
		return nil, newError(tombolo.ErrInvalid, "container %q and interface %q are not valid names of an attachment",
			owner.ContainerID, owner.IfName)
	}
	s, err := h.lockOrCreate(ctx)
	if err != nil {
		return nil, err
	}
	defer s.unlock()
	if err := s.enter(ctx, h.pool); err != nil {
		return nil, err
	}
	if h.search {
		if err := h.refuseSecond(s, owner); err != nil {
			return nil, err
		}
	}
	given := &Allocation{}
	for i := range h.pool {
		addr, r, err := s.allocate(h.pool, i, h.wanted[i], owner)
		if err != nil {
			for _, earlier := range given.Addresses {
				err = errors.Join(err, s.release(earlier.Prefix.Addr()))
			}
			return nil, err
		}
		given.Addresses = append(given.Addresses, Address{Prefix: netip.PrefixFrom(addr, r.subnet.Bits()), Gateway: r.gateway})
	}
	given.Addresses = ipv4First(given.Addresses)
	return given, nil
}

// refuseSecond fails where the owner has an address of a set of which none was asked for.
func (h *HostLocal) refuseSecond(s *session, owner Owner) error {
	addrs, err := s.list()
	if err != nil {
		return err
	}
	exact, old, err := s.ownedBy(addrs, owner)
	for _, addr := range slices.Concat(exact, old) {
		for i, set := range h.pool {
			if !h.wanted[i].IsValid() && set.rangeOf(addr) != nil {
				return newError(ErrDuplicate, "network %q: interface %q of container %q has %s already: DEL it before another ADD", s.network, owner.IfName, owner.ContainerID, addr)
			}
		}
	}
	return err
}

// lockOrCreate locks the directory, and makes it first if it is not there.
func (h *HostLocal) lockOrCreate(ctx context.Context) (*session, error) {
	for {
		s, err := h.store.lock(ctx)
		if !errors.Is(err, fs.ErrNotExist) {
			return s, err
		}
		if err := h.store.create(); err != nil {
			return nil, err
		}
	}
}

// Del releases the addresses of hint that are the attachment's, or without
// hint all that are, as the reference plugin does: those that name the
// interface too, or, if there are none, those that name the container only.
func (h *HostLocal) Del(ctx context.Context, owner Owner, hint []netip.Addr) error {
	if err := h.owned(ctx, owner); err != nil {
		return err
	}
	s, err := h.store.lock(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer s.unlock()
	var errs []error
	candidates := hint
	if len(hint) == 0 {
		if candidates, err = s.list(); err != nil {
			return err
		}
		// A file without content is of an ADD that was killed while it held this
		// lock: perhaps of the one that is undone here.
		for _, addr := range candidates {
			if s.isEmpty(addr) {
				errs = append(errs, s.reclaim(addr))
			}
		}
	}
	exact, old, err := s.ownedBy(candidates, owner)
	// A file that could not be read may be this attachment's.
	errs = append(errs, err)
	if len(hint) > 0 {
		exact = append(exact, old...)
	} else if len(exact) == 0 {
		exact = old
	}
	for _, addr := range exact {
		errs = append(errs, s.release(addr))
	}
	return errors.Join(errs...)
}

// owned refuses an empty owner.
func (h *HostLocal) owned(ctx context.Context, owner Owner) error {
	if err := h.ready(); err != nil {
		return err
	}
	if owner.ContainerID == "" {
		return newError(tombolo.ErrInvalid, "network %q: host-local: %s: the owner has no ContainerID", h.store.network, tombolo.ErrInvalid)
	}
	return nil
}

// ownedBy picks the addresses that owner has, and those whose file names its
// container only. The error is of files that could not be read.
func (s *store) ownedBy(addrs []netip.Addr, owner Owner) (exact, old []netip.Addr, _ error) {
	var errs []error
	for _, addr := range addrs {
		held, state, err := s.read(addr)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		if err != nil || state != stateHeld {
			continue
		}
		switch is, isOld := s.isOwner(held, owner); {
		case isOld:
			old = append(old, addr)
		case is:
			exact = append(exact, addr)
		}
	}
	return exact, old, errors.Join(errs...)
}

// Collect releases every reservation whose owner is not in valid, nor on record (Node.InUse). Files of the old form
// stay while any valid owner is of that container. Empty files, whose creator was killed, go too; files of another
// format stay.
func (h *HostLocal) Collect(ctx context.Context, valid []Owner) error {
	if err := h.ready(); err != nil {
		return err
	}
	s, err := h.store.lock(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer s.unlock()
	addrs, err := s.list()
	if err != nil {
		return err
	}
	forms := s.forms(valid)
	var errs []error
	for _, addr := range addrs {
		held, state, err := s.read(addr)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			errs = append(errs, err)
		case state == stateForeign:
			s.warnf("%s holds no reservation: left alone", s.path(addr))
		case state == stateTruncated:
			errs = append(errs, s.reclaim(addr))
		case !forms[held.form()] && !s.isInUse(held):
			errs = append(errs, s.release(addr))
		}
	}
	return errors.Join(errs...)
}

// isInUse says that a reservation's owner is on record. An address is reserved after its owner is put on record,
// and given back before the record goes: so under the lock GC takes no other reservation for one without an owner.
func (s *store) isInUse(r reservation) bool {
	switch {
	case s.node.InUse == nil:
		return false
	case r.hash != "":
		return s.node.InUse(r.hash)
	case s.node.Hash == nil || r.ifName == "":
		return false
	}
	return s.node.InUse(s.node.Hash(Owner{ContainerID: r.containerID, IfName: r.ifName}))
}

// form is the reservation reduced to what GC compares.
func (r reservation) form() reservation {
	if r.hash != "" {
		return reservation{hash: r.hash}
	}
	return r
}

// forms lists every form in which a valid owner may have reserved an address.
func (s *store) forms(valid []Owner) map[reservation]bool {
	forms := make(map[reservation]bool, 3*len(valid))
	for _, owner := range valid {
		forms[reservation{containerID: owner.ContainerID, ifName: owner.IfName}] = true
		forms[reservation{containerID: owner.ContainerID}] = true
		if s.node.Hash != nil {
			forms[reservation{hash: s.node.Hash(owner)}] = true
		}
	}
	return forms
}

// Check looks, for each range set, at the addresses that the attachment has of it: each must be reserved by the
// attachment. Where it has none of a set, since another program may have taken it away, any address of the
// attachment will do. The error matches fs.ErrNotExist too where an address is not reserved.
func (h *HostLocal) Check(ctx context.Context, owner Owner, held []Address) error {
	if err := h.gives(); err != nil {
		return err
	}
	if err := h.owned(ctx, owner); err != nil {
		return err
	}
	var errs []error
	for _, set := range h.pool {
		errs = append(errs, h.checkSet(set, owner, held))
	}
	return errors.Join(errs...)
}

func (h *HostLocal) checkSet(set rangeSet, owner Owner, held []Address) error {
	seen := false
	for _, a := range held {
		addr := a.Prefix.Addr()
		if set.rangeOf(addr) == nil {
			continue
		}
		seen = true
		held, state, err := h.store.read(addr)
		if err == nil && state == stateHeld {
			if is, _ := h.store.isOwner(held, owner); is {
				continue
			}
		}
		return h.checkError(err, "%s is not reserved for interface %q of container %q (file %s)",
			addr, owner.IfName, owner.ContainerID, h.store.path(addr))
	}
	if seen {
		return nil
	}
	addrs, err := h.store.list()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	exact, old, err := h.store.ownedBy(addrs, owner)
	if err != nil {
		return err
	}
	inSet := func(addr netip.Addr) bool { return set.rangeOf(addr) != nil }
	if slices.ContainsFunc(exact, inSet) || slices.ContainsFunc(old, inSet) {
		return nil
	}
	return h.checkError(nil, "interface %q of container %q has no address of %s", owner.IfName, owner.ContainerID, set)
}

func (h *HostLocal) checkError(cause error, format string, args ...any) error {
	return newError(errors.Join(ErrNotReserved, cause), "network %q: "+format, append([]any{h.store.network}, args...)...)
}

// Status fails where Add could not succeed for any attachment: a range set has no free
// address (ErrPoolFull), or the directory cannot be written. It takes no lock and changes
// nothing, as runtimes ask every few seconds.
func (h *HostLocal) Status(ctx context.Context) error {
	if err := h.gives(); err != nil {
		return err
	}
	if err := h.writable(); err != nil {
		return h.store.ioError("write reservations", err)
	}
	addrs, err := h.store.list()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, set := range h.pool {
		taken := takenOf(addrs, h.pool, set)
		size := set.size(h.pool)
		if uint64(len(taken)) >= size && !h.store.anyReclaimable(taken) {
			return h.store.fullError(set, uint64(len(taken)), size)
		}
	}
	return nil
}

// anyReclaimable reports whether an ADD would free one of the addresses before it gave up: one with an empty file,
// or one of an earlier epoch. A node that was full when it went down would otherwise never be ready again. It does
// not ask which of these are still alive, since STATUS may only say no where it knows.
func (s *store) anyReclaimable(taken map[netip.Addr]bool) bool {
	old := s.isStale()
	for addr := range taken {
		if s.isEmpty(addr) || old && s.isOld(addr) {
			return true
		}
	}
	return false
}

// writable asks for write access to the directory, or to the nearest above it
// that is there.
func (h *HostLocal) writable() error {
	dir := h.store.dir
	for {
		err := unix.Access(dir, unix.W_OK|unix.X_OK)
		if !errors.Is(err, unix.ENOENT) || dir == filepath.Dir(dir) {
			return file.PathError("access", dir, err)
		}
		dir = filepath.Dir(dir)
	}
}

// ranged is an Allocator that gives addresses from ranges. Package network puts them on record, by
// which its Node.Pools counts. An Allocator that wraps a HostLocal passes the call on.
type ranged interface {
	RangeSets() []RangeSet
}

// RangeSetsOf gives the range sets of an Allocator, none if it is not ranged.
func RangeSetsOf(a Allocator) []RangeSet {
	if ranged, ok := a.(ranged); ok {
		return ranged.RangeSets()
	}
	return nil
}

// A Pool is how far a range set is used up.
type Pool struct {
	// Name is the subnet if the set is all of one, else its ranges.
	Name string
	IPv6 bool
	// Size is how many addresses the set can give, gateways not among them; the largest number
	// stands for more.
	Size uint64
	// Reserved is how many of them are, by attachments that are there and by what was left of
	// others.
	Reserved uint64
}

// RangeSets gives the range sets that a HostLocal was made with, with their defaults filled in
// and without their names.
func (h *HostLocal) RangeSets() []RangeSet {
	sets := make([]RangeSet, len(h.pool))
	for i, set := range h.pool {
		sets[i].Ranges = make([]Range, len(set.ranges))
		for k, r := range set.ranges {
			sets[i].Ranges[k] = Range{Subnet: r.subnet, RangeStart: r.start, RangeEnd: r.end, Gateway: r.gateway}
		}
	}
	return sets
}

// Pools counts the reservations of each range set. It takes no lock and changes nothing.
func (h *HostLocal) Pools(ctx context.Context) ([]Pool, error) {
	if err := h.ready(); err != nil {
		return nil, err
	}
	addrs, err := h.store.list()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	pools := make([]Pool, len(h.pool))
	for i, set := range h.pool {
		name := strings.TrimPrefix(strings.TrimPrefix(set.String(), "range set "), "range ")
		pools[i] = Pool{Name: name, IPv6: set.ranges[0].start.Is6(), Size: set.size(h.pool), Reserved: uint64(len(takenOf(addrs, h.pool, set)))}
	}
	return pools, nil
}

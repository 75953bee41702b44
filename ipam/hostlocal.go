package ipam

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
)

// DefaultDir is the directory of the reference plugin's reservations.
const DefaultDir = "/var/lib/cni/networks"

// A Config configures a HostLocal: its addresses and the directory of its reservations.
type Config struct {
	// Network is the network's name, and the name of its directory in Dir. It is required.
	Network string
	// Dir contains a directory for each network. Empty means DefaultDir.
	Dir string
	// Ranges are the addresses to assign. An attachment gets one address from each set. Without ranges, addresses can
	// only be released.
	Ranges []RangeSet
	// LockWait is the maximum time to wait for another process's lock on the directory. 0 means 5 s. The context may
	// end the wait earlier.
	LockWait time.Duration
	// Search is for callers without records of attachments. Before Add assigns an address, it searches all reservations
	// for an address that the attachment already has. If it finds one, the error matches ErrDuplicate. The search skips
	// a set if Want requests one of its addresses.
	Search bool
}

// A HostLocal assigns addresses from ranges, in turn. It keeps the reservations in a directory, as the reference
// plugin host-local does. It holds no descriptors between calls, and is safe for use by several goroutines. Use
// NewHostLocal to create a HostLocal.
type HostLocal struct {
	store     store
	pool      pool
	requested []netip.Addr // the requested address for each set of pool; the zero Addr means any
	search    bool
	keeper    *string // the argument of Keep; nil if Keep was not called
}

// NewHostLocal returns a HostLocal for cfg. It does not access the disk. If a value is invalid, the error matches
// tombolo.ErrInvalid.
func NewHostLocal(cfg *Config) (*HostLocal, error) {
	if cfg == nil {
		return nil, newError(tombolo.ErrInvalid, "host-local: %s: there is no Config", tombolo.ErrInvalid)
	}

	// A network has a directory of its name. The length of the name is not limited here.
	name, dir := cfg.Network, cmp.Or(cfg.Dir, DefaultDir)
	switch {
	case name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00"):
		return nil, newError(tombolo.ErrInvalid, "network name %q cannot be the name of a directory", name)
	case !filepath.IsAbs(dir):
		return nil, newError(tombolo.ErrInvalid, "host-local: %s: directory %q is not an absolute path",
			tombolo.ErrInvalid, dir)
	}

	p, err := newPool(cfg.Ranges)
	if err != nil {
		return nil, err
	}

	return &HostLocal{
		store: store{dir: filepath.Join(dir, name), network: name,
			wait: cmp.Or(cfg.LockWait, defaultLockWait)},
		pool:      p,
		requested: make([]netip.Addr, len(p)),
		search:    cfg.Search,
	}, nil
}

// checkRanges returns an error if the HostLocal has no addresses to assign.
func (h *HostLocal) checkRanges() error {
	if len(h.pool) == 0 {
		return h.store.failf(tombolo.ErrInvalid, "host-local: %s: there are no ranges", tombolo.ErrInvalid)
	}
	return nil
}

// Bind returns a copy of h that uses node to identify attachments, live addresses and the epoch.
func (h *HostLocal) Bind(node Node) Allocator {
	bound := *h
	bound.store.node = node
	return &bound
}

// Slow returns false, since all reservations are on this node's disk.
func (*HostLocal) Slow() bool { return false }

// Want returns a copy of h whose Add assigns the given addresses, at most one from each set. From the other sets, Add
// assigns any address. If an address is in no range or is a gateway, or if two different addresses are in one set, the
// error matches tombolo.ErrInvalid. An address may be listed twice.
func (h *HostLocal) Want(addresses ...netip.Addr) (*HostLocal, error) {
	if err := h.checkRanges(); err != nil {
		return nil, err
	}

	bound := *h
	bound.requested = make([]netip.Addr, len(h.pool))
	for _, addr := range addresses {
		addr = addr.Unmap()
		i := h.pool.indexOf(addr)
		switch {
		case h.pool.isGateway(addr):
			return nil, h.store.failf(tombolo.ErrInvalid, "the requested address %s is a gateway", addr)
		case i < 0:
			return nil, h.store.failf(tombolo.ErrInvalid, "the requested address %s is in no range of it", addr)
		case bound.requested[i].IsValid() && bound.requested[i] != addr:
			return nil, h.store.failf(tombolo.ErrInvalid,
				"%s gives one address to an attachment, but %s and %s were requested",
				h.pool[i].describe(), bound.requested[i], addr)
		}

		bound.requested[i] = addr
	}

	return &bound, nil
}

// Add takes the lock once, and assigns one address from each set. As long as the next address in turn is free, Add
// reads neither the directory nor other reservations. Exceptions are Keep, Config.Search and the first Add after a
// boot. The error matches ErrPoolFull if no address is left. It matches ErrAddressTaken if a requested address is taken
// or, with Keep, kept for another name.
//
// With Config.Search, the error matches ErrDuplicate if the search finds an address of the owner. Without it, Add does
// not search for earlier addresses, since callers keep records of attachments. A second Add for the owner then assigns
// more addresses. Its error matches ErrDuplicate only if Add happens to try an address that the owner already has.
func (h *HostLocal) Add(ctx context.Context, owner Owner) (*Allocation, error) {
	if err := cmp.Or(h.checkRanges(), h.checkKeeper()); err != nil {
		return nil, err
	}

	if !ident.IsIdentifier(owner.ContainerID) || !ident.IsLinkName(owner.IfName) {
		// The reservation of such an owner would look like a foreign file, and nothing would ever release it.
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

	if h.keeper != nil {
		s.keeper, s.kept = *h.keeper+" "+owner.IfName, s.readKept()
	}

	allocation := &Allocation{}
	var lasting []netip.Addr
	for i := range h.pool {
		addr, err := s.allocate(h.pool, i, h.requested[i], owner)
		if err != nil {
			for _, earlier := range allocation.Addresses {
				err = errors.Join(err, s.release(earlier.Prefix.Addr()))
			}
			return nil, err
		}
		r := h.pool[i].rangeOf(addr)
		allocation.Addresses = append(allocation.Addresses,
			Address{Prefix: netip.PrefixFrom(addr, r.Subnet.Bits()), Gateway: r.Gateway})
		if !h.requested[i].IsValid() {
			lasting = append(lasting, addr)
		}
	}

	if h.keeper != nil {
		s.keep(lasting)
	}

	return allocation, nil
}

// refuseSecond returns an error that matches ErrDuplicate if the owner already has an address of a set. It skips sets
// with a requested address.
func (h *HostLocal) refuseSecond(s *session, owner Owner) error {
	addrs, err := s.list()
	if err != nil {
		return err
	}

	own, err := s.addressesOf(addrs, owner)
	for _, addr := range own {
		for i, set := range h.pool {
			if !h.requested[i].IsValid() && set.rangeOf(addr) != nil {
				return s.failf(ErrDuplicate, "interface %q of container %q has %s already: DEL it before another ADD",
					owner.IfName, owner.ContainerID, addr)
			}
		}
	}

	return err
}

// lockOrCreate locks the directory, and creates it first if it is missing.
func (h *HostLocal) lockOrCreate(ctx context.Context) (*session, error) {
	for {
		s, err := h.store.lock(ctx)
		if !errors.Is(err, fs.ErrNotExist) {
			return s, err
		}
		if err := os.MkdirAll(h.store.dir, 0o755); err != nil { // the reference plugin's mode
			return nil, h.store.ioError("make the directory of the reservations", err)
		}
	}
}

// Del releases the attachment's addresses that are in hint. Without a hint, it searches all reservations, as the
// reference plugin does. It also removes the empty files of killed processes among the files that it reads.
func (h *HostLocal) Del(ctx context.Context, owner Owner, hint []netip.Addr) error {
	if err := h.checkOwner(owner); err != nil {
		return err
	}

	return h.sweep(ctx, hint, func(held reservation) bool { return h.store.isOwner(held, owner) })
}

// sweep releases the reservations for which isGone returns true. It looks at the addresses in hint or, without a hint,
// at all reservations. Among these it also removes the empty files of killed processes: such a file may belong to the
// very ADD that a DEL has to undo. The error includes files that could not be read.
func (h *HostLocal) sweep(ctx context.Context, hint []netip.Addr, isGone func(reservation) bool) error {
	s, err := h.store.lock(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}

	if err != nil {
		return err
	}
	defer s.unlock()

	addrs := hint
	if len(addrs) == 0 {
		if addrs, err = s.list(); err != nil {
			return err
		}
	}

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
		case isGone(held):
			errs = append(errs, s.release(addr))
		}
	}

	return errors.Join(errs...)
}

// checkOwner returns an error for an owner without a container ID.
func (h *HostLocal) checkOwner(owner Owner) error {
	if owner.ContainerID == "" {
		return h.store.failf(tombolo.ErrInvalid, "host-local: %s: the owner has no ContainerID", tombolo.ErrInvalid)
	}
	return nil
}

// addressesOf returns the addresses in addrs that are reserved for owner. The error is about files that could not be
// read.
func (s *store) addressesOf(addrs []netip.Addr, owner Owner) (own []netip.Addr, _ error) {
	var errs []error
	for _, addr := range addrs {
		held, state, err := s.read(addr)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			errs = append(errs, err)
		case state == stateComplete && s.isOwner(held, owner):
			own = append(own, addr)
		}
	}

	return own, errors.Join(errs...)
}

// Collect releases every reservation whose owner is neither in valid nor on record (Node.InUse). It also removes the
// empty files of killed processes. Files in another format stay.
func (h *HostLocal) Collect(ctx context.Context, valid []Owner) error {
	forms := h.store.forms(valid)
	return h.sweep(ctx, nil, func(held reservation) bool { return !forms[held] && !h.store.isInUse(held) })
}

// isInUse reports whether the attachment that owns the reservation has a record. It returns false if Node.InUse, or the
// hash that it needs, is unknown. An ADD writes its record before it reserves an address, and a DEL releases the
// address before it removes the record. So while GC holds the lock, it never mistakes a used reservation for an
// ownerless one.
func (s *store) isInUse(r reservation) bool {
	hash := s.hashOf(r)
	return s.node.InUse != nil && hash != "" && s.node.InUse(hash)
}

// forms returns the reservations that valid owners may have. An owner has one with container and interface and, if
// its hash is known, one with the hash.
func (s *store) forms(valid []Owner) map[reservation]bool {
	forms := make(map[reservation]bool, 2*len(valid))
	for _, owner := range valid {
		r := reservation{Owner: owner}
		forms[r], forms[reservation{hash: s.hashOf(r)}] = true, true
	}
	return forms
}

// Check returns an error unless the attachment's addresses of each range set are reserved for it. Another program may
// have removed an address from the pod, so held may have no address of a set. Then any reservation of the attachment
// in that set suffices. If an address is not reserved at all, the error also matches fs.ErrNotExist.
func (h *HostLocal) Check(ctx context.Context, owner Owner, held []Address) error {
	if err := h.checkRanges(); err != nil {
		return err
	}

	if err := h.checkOwner(owner); err != nil {
		return err
	}

	var errs []error
	for _, set := range h.pool {
		errs = append(errs, h.checkSet(set, owner, held))
	}
	return errors.Join(errs...)
}

// checkSet does the work of Check for one range set.
func (h *HostLocal) checkSet(set RangeSet, owner Owner, held []Address) error {
	seen := false
	for _, a := range held {
		addr := a.Prefix.Addr()
		if set.rangeOf(addr) == nil {
			continue
		}

		seen = true
		held, state, err := h.store.read(addr)
		if err == nil && state == stateComplete && h.store.isOwner(held, owner) {
			continue
		}
		return h.store.failf(errors.Join(ErrNotReserved, err),
			"%s is not reserved for interface %q of container %q (file %s)", addr, owner.IfName, owner.ContainerID,
			h.store.path(addr))
	}

	if seen {
		return nil
	}

	addrs, err := h.store.list()
	if err != nil {
		return err
	}

	own, err := h.store.addressesOf(addrs, owner)
	if err != nil || slices.ContainsFunc(own, func(addr netip.Addr) bool { return set.rangeOf(addr) != nil }) {
		return err
	}

	return h.store.failf(ErrNotReserved, "interface %q of container %q has no address of %s", owner.IfName,
		owner.ContainerID, set.describe())
}

// Status returns an error if Add cannot succeed for any attachment: a range set has no free address (ErrPoolFull), or
// the directory cannot be written. It takes no lock and changes nothing, since runtimes call it every few seconds.
func (h *HostLocal) Status(ctx context.Context) error {
	if err := h.checkRanges(); err != nil {
		return err
	}

	if err := h.writable(); err != nil {
		return h.store.ioError("write reservations", err)
	}

	addrs, err := h.store.list()
	if err != nil {
		return err
	}

	for _, set := range h.pool {
		taken := reservedAddresses(addrs, h.pool, set)
		size := set.size(h.pool)
		if uint64(len(taken)) >= size && !h.store.anyReclaimable(taken) {
			return h.store.fullError(set, uint64(len(taken)), size)
		}
	}

	return nil
}

// anyReclaimable reports whether Add might free one of the addresses before it failed. Add frees addresses with an
// empty file, and most addresses that were reserved in an earlier epoch. Without this check, a node that was full when
// it went down would never be ready again. anyReclaimable also returns true for old addresses that Add would keep, such
// as live ones, since STATUS must fail only if it is certain.
func (s *store) anyReclaimable(taken map[netip.Addr]bool) bool {
	old := s.isStale()
	for addr := range taken {
		if s.isEmpty(addr) || old && s.isOld(addr) {
			return true
		}
	}
	return false
}

// writable returns an error if the process cannot write to the directory or, if the directory is missing, to its
// closest existing parent.
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

// ranged is implemented by an Allocator that assigns addresses from ranges. Package network records the ranges, so
// that its Node.Pools can count the reservations. An Allocator that wraps a HostLocal forwards this method.
type ranged interface {
	RangeSets() []RangeSet
}

// RangeSetsOf returns the range sets of an Allocator, or none if it has no ranges.
func RangeSetsOf(a Allocator) []RangeSet {
	if ranged, ok := a.(ranged); ok {
		return ranged.RangeSets()
	}
	return nil
}

// A Pool counts the addresses of a range set, and the reserved ones among them.
type Pool struct {
	// Name is the subnet if the set consists of a whole subnet. Otherwise it lists the ranges of the set.
	Name string
	IPv6 bool
	// Size is the number of addresses that the set can assign, without gateways. A range of 2^64 or more addresses
	// counts as math.MaxUint64, less the gateways in it. math.MaxUint64 also stands for any larger sum of ranges.
	Size uint64
	// Reserved is the number of reserved addresses, including those of attachments that no longer exist.
	Reserved uint64
}

// RangeSets returns the configured range sets with their defaults, but without their names. The caller must not change
// them.
func (h *HostLocal) RangeSets() []RangeSet { return h.pool }

// Pools counts the reservations of each range set. It takes no lock and changes nothing.
func (h *HostLocal) Pools(ctx context.Context) ([]Pool, error) {
	addrs, err := h.store.list()
	if err != nil {
		return nil, err
	}

	pools := make([]Pool, len(h.pool))
	for i, set := range h.pool {
		pools[i] = Pool{Name: set.text(), IPv6: set.Ranges[0].RangeStart.Is6(), Size: set.size(h.pool),
			Reserved: uint64(len(reservedAddresses(addrs, h.pool, set)))}
	}
	return pools, nil
}

package ipam

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"
)

// hostLocal gives addresses out of ranges in the config, and keeps who has
// which in a directory.
type hostLocal struct {
	request *Request
	store   *store

	// The following are of no use where confErr is set: the config is wrong,
	// and only Del and GC can do anything.
	confErr    error
	pool       pool
	wanted     []netip.Addr // for each set of pool the address that was asked for; the zero Addr is any
	routes     []*types.Route
	resolvConf string
}

// newHostLocal reads the config. The disk is left alone.
func newHostLocal(r *Request) (Allocator, error) {
	h := &hostLocal{request: r}
	var conf netconf[hostLocalConf]
	h.confErr = h.configure(&conf)
	if h.confErr != nil {
		if r.Strict {
			return nil, h.confErr
		}
		r.warn(h.confErr.Error())
	}
	dataDir := conf.IPAM.DataDir
	if h.confErr != nil {
		dataDir = salvageDataDir(r.Stdin)
	}
	h.store = newStore(r, dataDir)
	return h, nil
}

// configure decodes the netconf into conf, and fills h.
func (h *hostLocal) configure(conf *netconf[hostLocalConf]) error {
	if err := conf.load(h.request); err != nil {
		return err
	}
	if dir := conf.IPAM.DataDir; dir != "" && !filepath.IsAbs(dir) {
		return newError(codeInvalidConfig, nil, "field \"ipam.dataDir\": %q is not an absolute path", dir)
	}
	p, err := newPool(conf)
	if err != nil {
		return err
	}
	if err := conf.checkFamilies(p.families()); err != nil {
		return err
	}
	args, err := parseArgs(h.request.Args)
	if err != nil {
		return err
	}
	wanted, err := p.assign(h.request.Network, slices.Concat(args.ips, conf.Args.CNI.IPs, conf.RuntimeConfig.IPs))
	if err != nil {
		return err
	}
	list, err := routes(conf.IPAM.Routes)
	if err != nil {
		return err
	}
	h.pool, h.wanted, h.routes, h.resolvConf = p, wanted, list, conf.IPAM.ResolvConf
	return nil
}

// assign finds for each requested address the set that gives it. An address
// that is named twice counts once.
func (p pool) assign(network string, texts []string) ([]netip.Addr, error) {
	wanted := make([]netip.Addr, len(p))
	for _, text := range texts {
		addr, err := parseRequestedIP(text)
		if err != nil {
			return nil, err
		}
		i := slices.IndexFunc(p, func(s rangeSet) bool { return s.rangeOf(addr) != nil })
		switch {
		case p.isGateway(addr):
			return nil, newError(codeInvalidConfig, nil, "network %q: the requested address %s is a gateway", network, addr)
		case i < 0:
			return nil, newError(codeInvalidConfig, nil, "network %q: the requested address %s is in no range of it", network, addr)
		case wanted[i].IsValid() && wanted[i] != addr:
			return nil, newError(codeInvalidConfig, nil, "network %q: %s gives one address to an attachment, but %s and %s were requested",
				network, p[i], wanted[i], addr)
		}
		wanted[i] = addr
	}
	return wanted, nil
}

// Add takes the lock once, gives one address of each set, and reads neither the
// directory nor any other reservation, as long as the next address in turn is
// free.
//
// That the attachment already has an address is noticed (ErrDuplicate) only
// where a candidate turns out to be its own, not by a search: the caller's
// attachment record guards against it.
func (h *hostLocal) Add(ctx context.Context) (*current.Result, error) {
	if h.confErr != nil {
		return nil, h.confErr
	}
	owner := h.request.owner()
	if !isContainerID(owner.ContainerID) || !isIfName(owner.IfName) {
		// Its reservation could not be told from a foreign file, and would
		// never be released.
		return nil, newError(codeInvalidEnv, nil, "container %q and interface %q are not valid names of an attachment",
			owner.ContainerID, owner.IfName)
	}
	result := &current.Result{CNIVersion: current.ImplementedSpecVersion, Routes: h.routes}
	if h.resolvConf != "" {
		dns, err := readResolvConf(h.resolvConf)
		if err != nil {
			return nil, h.store.ioError(`read "ipam.resolvConf"`, err)
		}
		result.DNS = *dns
	}
	s, err := h.lockOrCreate(ctx)
	if err != nil {
		return nil, err
	}
	defer s.unlock()
	if err := s.enter(h.request.Epoch, h.request.Live, h.pool); err != nil {
		return nil, err
	}
	var given []netip.Addr
	for i := range h.pool {
		addr, r, err := s.allocate(h.pool, i, h.wanted[i], owner)
		if err != nil {
			for _, earlier := range given {
				err = errors.Join(err, s.release(earlier))
			}
			return nil, err
		}
		given = append(given, addr)
		result.IPs = append(result.IPs, &current.IPConfig{
			Address: net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(r.subnet.Bits(), addr.BitLen())},
			Gateway: r.gateway.AsSlice(),
		})
	}
	sortIPs(result.IPs)
	return result, nil
}

// lockOrCreate locks the directory, and makes it first if it is not there.
func (h *hostLocal) lockOrCreate(ctx context.Context) (*session, error) {
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

// Del releases the addresses of hint that are this attachment's, or without
// hint all that are, as the reference plugin does: those that name the
// interface too, or, if there are none, those that name the container only.
func (h *hostLocal) Del(ctx context.Context, hint []netip.Addr) error {
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
	exact, old, err := s.ownedBy(candidates, h.request.owner())
	// What could not be read may be this attachment's.
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

// GC releases every reservation whose owner is not in valid, nor on record (Request.InUse).
// Files of the old
// form stay while any valid owner is of that container. What its creator did
// not live to write goes, what is foreign stays.
func (h *hostLocal) GC(ctx context.Context, valid []Owner) error {
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
	claims := s.claims(valid)
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
		case !claims[held.claim()] && !s.isInUse(held):
			errs = append(errs, s.release(addr))
		}
	}
	return errors.Join(errs...)
}

// isInUse says that a reservation's owner is on record. It is reserved after that, and
// given back before, so that what GC sees here under the lock is nobody's otherwise.
func (s *store) isInUse(r reservation) bool {
	switch {
	case s.inUse == nil:
		return false
	case r.hash != "":
		return s.inUse(r.hash)
	case s.hash == nil || r.ifName == "":
		return false
	}
	return s.inUse(s.hash(Owner{ContainerID: r.containerID, IfName: r.ifName}))
}

// claim is the reservation reduced to what GC compares.
func (r reservation) claim() reservation {
	if r.hash != "" {
		return reservation{hash: r.hash}
	}
	return r
}

// claims lists every form in which a valid owner may have reserved an address.
func (s *store) claims(valid []Owner) map[reservation]bool {
	claims := make(map[reservation]bool, 3*len(valid))
	for _, owner := range valid {
		claims[reservation{containerID: owner.ContainerID, ifName: owner.IfName}] = true
		claims[reservation{containerID: owner.ContainerID}] = true
		if s.hash != nil {
			claims[reservation{hash: s.hash(owner)}] = true
		}
	}
	return claims
}

// Check looks, for each range set, at the addresses of prev that are of it:
// each must be reserved by the attachment. Where prev has none of a set, since
// a later plugin may have taken it out, any address of the attachment will do.
func (h *hostLocal) Check(_ context.Context, prev *current.Result) error {
	if h.confErr != nil {
		return h.confErr
	}
	var errs []error
	for _, set := range h.pool {
		errs = append(errs, h.checkSet(set, prev))
	}
	return errors.Join(errs...)
}

func (h *hostLocal) checkSet(set rangeSet, prev *current.Result) error {
	owner := h.request.owner()
	seen := false
	for _, addr := range resultAddrs(prev) {
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
		return h.checkError("%s is not reserved for interface %s of container %s (file %s)",
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
	return h.checkError("interface %s of container %s has no address of %s", owner.IfName, owner.ContainerID, set)
}

func (h *hostLocal) checkError(format string, args ...any) error {
	return newError(CodeCheckFailed, ErrNotReserved, "network %q: "+format, append([]any{h.request.Network}, args...)...)
}

// resultAddrs lists the addresses of a result, which may be nil.
func resultAddrs(result *current.Result) []netip.Addr {
	var addrs []netip.Addr
	if result == nil {
		return nil
	}
	for _, ip := range result.IPs {
		if ip == nil {
			continue
		}
		if addr, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			addrs = append(addrs, addr.Unmap())
		}
	}
	return addrs
}

// Status fails where a range set has no free address or the directory cannot be
// written. It takes no lock and changes nothing, as runtimes ask every few
// seconds.
func (h *hostLocal) Status(context.Context) error {
	if h.confErr != nil {
		return h.confErr
	}
	if err := h.writable(); err != nil {
		return unavailable(h.store.ioError("write reservations", err))
	}
	addrs, err := h.store.list()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return unavailable(err)
	}
	for _, set := range h.pool {
		taken := takenOf(addrs, h.pool, set)
		size := set.size(h.pool)
		if uint64(len(taken)) >= size && !h.store.anyReclaimable(taken, h.request.Epoch) {
			return unavailable(h.store.fullError(set, uint64(len(taken)), size))
		}
	}
	return nil
}

// anyReclaimable reports whether an ADD would free one of the addresses before
// it gave up: one with an empty file, or one of an earlier epoch. A node that
// was full when it went down would otherwise never be ready again. What is
// still alive of these is not looked for, since STATUS may only say no where it
// knows.
func (s *store) anyReclaimable(taken map[netip.Addr]bool, epoch Epoch) bool {
	old := s.isStale(epoch)
	for addr := range taken {
		if s.isEmpty(addr) || old && s.isOld(addr, epoch) {
			return true
		}
	}
	return false
}

// writable asks for write access to the directory, or to the nearest above it
// that is there.
func (h *hostLocal) writable() error {
	dir := h.store.dir
	for {
		err := unix.Access(dir, unix.W_OK|unix.X_OK)
		if !errors.Is(err, unix.ENOENT) || dir == filepath.Dir(dir) {
			return pathError("access", dir, err)
		}
		dir = filepath.Dir(dir)
	}
}

// unavailable gives err the code by which STATUS says that ADD cannot succeed.
// The message and the sentinels stay.
func unavailable(err error) error {
	return newError(codeNotAvailable, err, "%s", err)
}

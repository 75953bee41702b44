package ipamconf

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"path/filepath"
	"slices"

	"github.com/tombolo-cni/tombolo/ipam"
)

// hostLocal is ipam.HostLocal by a config.
type hostLocal struct {
	*local
	reservations ipam.Allocator
	noRanges     error // there are none before a runtime hands them over
	resolvConf   string
	sets         []ipam.Allocator // each range set by itself, where Add has to look for reservations
}

// newHostLocal reads the config. The disk is left alone.
func newHostLocal(r *Request) (Allocator, error) {
	h := &hostLocal{local: &local{network: r.Network}}
	var conf netconf[hostLocalConf]
	if h.confErr = h.configure(&conf, r); h.confErr == nil {
		return h, nil
	}
	if r.Strict {
		return nil, h.confErr
	}
	r.warn(h.confErr.Error())
	reservations, err := ipam.NewHostLocal(r.reservations(salvageDataDir(r.Stdin), nil))
	h.reservations = reservations
	return h, invalid(err)
}

// reservations are those of the network, in ipam.dataDir, which may be empty.
func (r *Request) reservations(dataDir string, sets []ipam.RangeSet) *ipam.Config {
	if dataDir == "" {
		dataDir = r.DefaultDataDir
	}
	return &ipam.Config{Network: r.Network, Dir: dataDir, Ranges: sets, LockWait: r.LockWait}
}

// configure decodes the netconf into conf, and fills h.
func (h *hostLocal) configure(conf *netconf[hostLocalConf], r *Request) error {
	err := conf.load(r)
	if r.All {
		err = conf.faults(&conf.IPAM, r, err)
	}
	if err != nil {
		return err
	}
	if dir := conf.IPAM.DataDir; dir != "" && !filepath.IsAbs(dir) {
		return newError(codeInvalidConfig, nil, "field \"ipam.dataDir\": %q is not an absolute path", dir)
	}
	sets := conf.sets(&conf.IPAM)
	if len(sets) == 0 {
		h.noRanges = newError(codeInvalidConfig, nil, `host-local has no addresses to give: set "ipam.ranges" (or the capability ipRanges)`)
		if !r.getsRanges() {
			return h.noRanges
		}
	}
	reservations, err := ipam.NewHostLocal(r.reservations(conf.IPAM.DataDir, sets))
	if err != nil {
		return invalid(err)
	}
	var one []netip.Addr // of each set
	for _, set := range sets {
		one = append(one, set.Ranges[0].Subnet.Addr())
	}
	if err := conf.checkFamilies(one); err != nil {
		return err
	}
	args, err := ParseArgs(r.Args)
	if err != nil {
		return err
	}
	wanted, err := parseRequested(slices.Concat(args.List("IP"), conf.Args.CNI.IPs, conf.RuntimeConfig.IPs))
	if err != nil {
		return err
	}
	if h.noRanges == nil {
		if reservations, err = reservations.Want(wanted...); err != nil {
			return invalid(err)
		}
	}
	if h.said.Routes, err = routes(conf.IPAM.Routes); err != nil {
		return err
	}
	h.reservations, h.resolvConf = reservations, conf.IPAM.ResolvConf
	if r.ByName {
		for _, addr := range one {
			h.said.ipv4 = append(h.said.ipv4, addr.Is4())
		}
	}
	if r.Unrecorded {
		h.sets, err = r.unnamed(conf.IPAM.DataDir, sets, wanted)
	}
	return invalid(err)
}

// unnamed are the range sets, each by itself, of which no address was asked for. To give one
// that was asked for fails by itself if the attachment has it.
func (r *Request) unnamed(dataDir string, sets []ipam.RangeSet, wanted []netip.Addr) ([]ipam.Allocator, error) {
	var list []ipam.Allocator
	for _, set := range sets {
		one, err := ipam.NewHostLocal(r.reservations(dataDir, []ipam.RangeSet{set}))
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(wanted, func(a netip.Addr) bool { _, err := one.Want(a); return err == nil }) {
			list = append(list, one)
		}
	}
	return list, nil
}

// invalid gives what the config cannot mean its code.
func invalid(err error) error {
	if err == nil {
		return nil
	}
	return newError(codeInvalidConfig, err, "%s", err)
}

// Bind returns a copy whose reservations know the node.
func (h *hostLocal) Bind(node ipam.Node) ipam.Allocator {
	bound := *h
	bound.reservations = h.reservations.Bind(node)
	return &bound
}

// RangeSets are those of the reservations.
func (h *hostLocal) RangeSets() []ipam.RangeSet { return ipam.RangeSetsOf(h.reservations) }

// Add reads the resolv.conf before it reserves anything.
func (h *hostLocal) Add(ctx context.Context, owner ipam.Owner) (*ipam.Allocation, error) {
	if err := cmp.Or(h.confErr, h.noRanges); err != nil {
		return nil, err
	}
	if h.resolvConf != "" {
		dns, err := readResolvConf(h.resolvConf)
		if err != nil {
			return nil, newError(codeIO, err, "network %q: read \"ipam.resolvConf\": %s", h.network, err)
		}
		h.said.DNS = *dns
	}
	for _, set := range h.sets {
		if set.Check(ctx, owner, nil) == nil {
			return nil, newError(CodeDuplicate, ipam.ErrDuplicate, "network %q: interface %q of container %q has an address already: DEL it before another ADD", h.network, owner.IfName, owner.ContainerID)
		}
	}
	given, err := h.reservations.Add(ctx, owner)
	if errors.Is(err, ipam.ErrInvalid) {
		// Of what was not looked at before, that is only the owner.
		return nil, newError(codeInvalidEnv, err, "%s", err)
	}
	return given, err
}

// Del needs no more of the config than ipam.dataDir.
func (h *hostLocal) Del(ctx context.Context, owner ipam.Owner, hint []netip.Addr) error {
	return h.reservations.Del(ctx, owner, hint)
}

// Check looks at the reservations.
func (h *hostLocal) Check(ctx context.Context, owner ipam.Owner, held []ipam.Address) error {
	if err := cmp.Or(h.confErr, h.noRanges); err != nil {
		return err
	}
	return h.reservations.Check(ctx, owner, held)
}

// Collect needs no more of the config than Del.
func (h *hostLocal) Collect(ctx context.Context, valid []ipam.Owner) error {
	return h.reservations.Collect(ctx, valid)
}

// Status looks whether there are free addresses, and a place to write to. Ranges that a runtime
// hands over come with the verbs of a pod, and not with STATUS.
func (h *hostLocal) Status(ctx context.Context) error {
	if h.confErr != nil || h.noRanges != nil {
		return h.confErr
	}
	return unavailable(h.reservations.Status(ctx))
}

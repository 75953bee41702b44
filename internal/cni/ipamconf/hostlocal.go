package ipamconf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/ipam"
)

// hostLocal is ipam.HostLocal by a config. Del and Collect need no more of that than ipam.dataDir.
type hostLocal struct {
	*local
	reservations ipam.Allocator
	noRanges     error // there are none before a runtime hands them over
	resolvConf   string
}

// newHostLocal reads the config. The disk is left alone.
func newHostLocal(r *Request) (Allocator, error) {
	h := &hostLocal{local: r.local()}
	if h.confErr = h.configure(r); h.confErr == nil {
		return h, nil
	}
	if r.Strict {
		return nil, h.confErr
	}
	r.Warn(h.confErr.Error())
	dir := r.Section.DataDir
	if !filepath.IsAbs(dir) {
		dir = ""
	}
	reservations, err := r.reservations(dir, nil)
	h.reservations = reservations
	return h, err
}

// reservations are those of the network, in ipam.dataDir, which may be empty.
func (r *Request) reservations(dataDir string, sets []ipam.RangeSet) (*ipam.HostLocal, error) {
	of, err := ipam.NewHostLocal(&ipam.Config{
		Network: r.Network, Dir: cmp.Or(dataDir, r.DefaultDataDir), Ranges: sets, LockWait: r.LockWait, Search: r.Unrecorded,
	})
	return of, withCode(codeInvalidConfig, err)
}

// configure decodes the section, and fills h.
func (h *hostLocal) configure(r *Request) error {
	var conf hostLocalConf
	if err := r.read(&conf); err != nil {
		return err
	}
	if dir := conf.DataDir; dir != "" && !filepath.IsAbs(dir) {
		return newError(codeInvalidConfig, "field \"ipam.dataDir\": %q is not an absolute path", dir)
	}
	sets := conf.sets(&r.Asked)
	if len(sets) == 0 {
		h.noRanges = newError(codeInvalidConfig, `host-local has no addresses to give: set "ipam.ranges" (or the capability ipRanges)`)
		if !r.RangesLater {
			return h.noRanges
		}
	}
	reservations, err := r.reservations(conf.DataDir, sets)
	if err != nil {
		return err
	}
	args, err := ParseArgs(r.Args)
	if err != nil {
		return err
	}
	wanted, err := parseRequested(slices.Concat(args.List("IP"), r.ArgIPs, r.IPs))
	if err != nil {
		return err
	}
	if h.noRanges == nil {
		if reservations, err = reservations.Want(wanted...); err != nil {
			return withCode(codeInvalidConfig, err)
		}
	}
	if r.ByName {
		for _, set := range sets {
			h.reported = append(h.reported, ipam.Address{Prefix: set.Ranges[0].Subnet})
		}
	}
	h.reservations, h.resolvConf = reservations, conf.ResolvConf
	h.routes, err = routes(conf.Routes)
	return err
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
		text, err := os.ReadFile(h.resolvConf)
		if err != nil {
			return nil, withCode(types.ErrIOFailure, fmt.Errorf("network %q: read \"ipam.resolvConf\": %w", h.network, err))
		}
		h.dns = parseResolvConf(string(text))
	}
	reserved, err := h.reservations.Add(ctx, owner)
	if errors.Is(err, ipam.ErrInvalid) {
		// Of what was not looked at before, that is only the owner.
		err = withCode(codeInvalidEnv, err)
	}
	if err != nil {
		return nil, err
	}
	return h.given(reserved.Addresses), nil
}

func (h *hostLocal) Del(ctx context.Context, owner ipam.Owner, hint []netip.Addr) error {
	return h.reservations.Del(ctx, owner, hint)
}

func (h *hostLocal) Check(ctx context.Context, owner ipam.Owner, held []ipam.Address) error {
	if err := cmp.Or(h.confErr, h.noRanges); err != nil {
		return err
	}
	return h.reservations.Check(ctx, owner, held)
}

func (h *hostLocal) Collect(ctx context.Context, valid []ipam.Owner) error {
	return h.reservations.Collect(ctx, valid)
}

// Status looks whether there are free addresses, and a place to write to. Ranges that a runtime
// hands over come with the verbs of a pod, and not with STATUS.
func (h *hostLocal) Status(ctx context.Context) error {
	if h.confErr != nil || h.noRanges != nil {
		return h.confErr
	}
	return withCode(codeNotAvailable, h.reservations.Status(ctx))
}

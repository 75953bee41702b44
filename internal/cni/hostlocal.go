package cni

import (
	"cmp"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/ipam"
)

// hostLocal sets a.Allocator to an ipam.HostLocal for the section, and returns an error if the section is wrong. After
// an error in a strict request, the caller must not use a.Allocator. In a request that is not strict, hostLocal logs
// the error, and the HostLocal knows only ipam.dataDir. That suffices to release addresses. hostLocal does not access
// the disk.
func (a *allocator) hostLocal(r *ipamRequest) error {
	confErr := a.readHostLocal(r)
	if confErr == nil || r.Strict {
		return confErr
	}
	r.Warn(confErr.Error())
	if reservations, err := r.reservations(absolute(r.Section.DataDir, ""), nil); err == nil {
		a.Allocator = reservations
	}
	return confErr
}

// reservations returns a HostLocal with the given range sets, for the network's reservations in dataDir. If dataDir is
// empty, it uses r.DefaultDataDir.
func (r *ipamRequest) reservations(dataDir string, sets []ipam.RangeSet) (*ipam.HostLocal, error) {
	reservations, err := ipam.NewHostLocal(&ipam.Config{
		Network: r.Network, Dir: cmp.Or(dataDir,
			r.DefaultDataDir), Ranges: sets, LockWait: r.LockWait, Search: r.Unrecorded,
	})
	return reservations, withCode(codeInvalidConfig, err)
}

// readHostLocal decodes an ipam section of type host-local into a, and adds the addresses that the runtime or the pod
// requests. If there are no ranges, it sets a.noRanges, and returns that error unless r.RangesLater is set. It does not
// access the disk.
func (a *allocator) readHostLocal(r *ipamRequest) error {
	var conf hostLocalConf
	if err := r.read(&conf); err != nil {
		return err
	}

	if dir := conf.DataDir; dir != "" && !filepath.IsAbs(dir) {
		return newError(codeInvalidConfig, "field \"ipam.dataDir\": %q is not an absolute path", dir)
	}

	sets := conf.sets(&r.RequestedAddresses)
	if len(sets) == 0 {
		a.noRanges = newError(codeInvalidConfig,
			`host-local has no addresses to give: set "ipam.ranges" (or the capability ipRanges)`)
		if !r.RangesLater {
			return a.noRanges
		}
	}

	reservations, err := r.reservations(conf.DataDir, sets)
	args, argsErr := parseArgs(r.Args)
	wanted, wantedErr := parseRequested(slices.Concat(args.List("IP"), r.ArgIPs, r.IPs, r.AnnotatedIPs))
	if err := cmp.Or(err, argsErr, wantedErr); err != nil {
		return err
	}

	if a.noRanges == nil {
		if reservations, err = reservations.Want(wanted...); err != nil {
			return withCode(codeInvalidConfig, err)
		}
	}

	if conf.Keep && !r.ByName {
		reservations = reservations.Keep(args.Pod())
	}

	if r.ByName {
		for _, set := range sets {
			a.reported = append(a.reported, ipam.Address{Prefix: set.Ranges[0].Subnet})
		}
	}

	a.Allocator, a.resolvConf = reservations, conf.ResolvConf
	a.routes, err = routes(conf.Routes)
	return err
}

// ParseResolvConf parses the lines nameserver, domain, search and options of a file in the format of resolv.conf(5).
// Like the reference plugin host-local, it joins the values of repeated search and options lines, and ignores other
// lines.
func ParseResolvConf(text string) types.DNS {
	var dns types.DNS
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0][0] == '#' || fields[0][0] == ';' {
			continue
		}
		switch fields[0] {
		case "nameserver":
			dns.Nameservers = append(dns.Nameservers, fields[1])
		case "domain":
			dns.Domain = fields[1]
		case "search":
			dns.Search = append(dns.Search, fields[1:]...)
		case "options":
			dns.Options = append(dns.Options, fields[1:]...)
		}
	}

	return dns
}

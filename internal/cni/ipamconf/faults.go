package ipamconf

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"

	"github.com/tombolo-cni/tombolo/ipam"
)

// faults are all that is wrong with a section of host-local, in one error, as far as one fault
// does not hide another: what could not be read is one of them. nil is none.
func (c *netconf[S]) faults(h *hostLocalConf, r *Request, unread error) error {
	list := []error{unread}
	if dir := h.DataDir; dir != "" && !filepath.IsAbs(dir) {
		list = append(list, newError(codeInvalidConfig, nil, "field \"ipam.dataDir\": %q is not an absolute path", dir))
	}
	try := func(sets ...ipam.RangeSet) bool {
		_, err := ipam.NewHostLocal(r.reservations("/", sets))
		if err != nil && !slices.ContainsFunc(list, func(known error) bool { return known != nil && known.Error() == err.Error() }) {
			list = append(list, invalid(err))
		}
		return err == nil
	}
	var good []ipam.RangeSet
	for _, set := range c.sets(h) {
		alone := ipam.RangeSet{Name: set.Name}
		for i, one := range set.Ranges {
			if one.Name == "" {
				one.Name = fmt.Sprintf("%s[%d]", set.Name, i)
			}
			if !one.Subnet.IsValid() && unread != nil {
				continue // it may be what could not be read
			}
			if tryRange(one, func(one ipam.Range) bool { return try(ipam.RangeSet{Ranges: []ipam.Range{one}}) }) {
				alone.Ranges = append(alone.Ranges, one)
			}
		}
		if (len(alone.Ranges) > 0 || len(set.Ranges) == 0) && try(alone) {
			good = append(good, alone)
		}
	}
	for i := range good {
		for _, other := range good[i+1:] {
			try(good[i], other)
		}
	}
	for i, conf := range h.Routes {
		if _, err := conf.route(i); err != nil && unread == nil {
			list = append(list, err)
		}
	}
	return errors.Join(list...)
}

// tryRange tries the parts of a range one by one, and says whether all of it is good.
func tryRange(r ipam.Range, try func(ipam.Range) bool) bool {
	only := ipam.Range{Name: r.Name, Subnet: r.Subnet}
	ok := try(only)
	if !ok {
		only.Subnet = r.Subnet.Masked() // it may have host bits only
	}
	if !r.Subnet.IsValid() || only.Subnet.Bits() > only.Subnet.Addr().BitLen()-2 {
		return false
	}
	inOrder := true
	for _, part := range []struct{ start, end, gateway netip.Addr }{{start: r.RangeStart}, {end: r.RangeEnd}, {gateway: r.Gateway}} {
		one := only
		one.RangeStart, one.RangeEnd, one.Gateway = part.start, part.end, part.gateway
		inOrder = try(one) && inOrder
	}
	only.RangeStart, only.RangeEnd = r.RangeStart, r.RangeEnd
	return inOrder && try(only) && ok
}

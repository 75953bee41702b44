package foreign

import (
	"bytes"
	"cmp"
	"errors"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// setMentions says how likely it is that a link is in a set, or in a map. That is certain where the link's name is
// the whole key.
func (c *Conn) setMentions(ch chain, l lookup, link string) (likelihood, error) {
	found, exact := never, interfaceName(link)
	err := c.elements(ch, l.set, func(key []byte, _ bool) {
		switch {
		case l.key == onIn && bytes.Equal(key, exact):
			found = always
		case keyNames(key, link):
			found = max(found, likely)
		}
	})
	return found, err
}

// setLeads says how likely it is that what pods send leaves by a link in a set, as podPacket.leavesBy does for one.
func (c *Conn) setLeads(ch chain, set string, p *podPacket) (likelihood, error) {
	if p.out != "" {
		return c.setMentions(ch, lookup{set, onIn}, p.out)
	}
	found := never
	err := c.elements(ch, set, func(key []byte, end bool) {
		name, _, _ := strings.Cut(string(key), "\x00")
		pair := len(key) > ifnameLen // with the link that it came in by, perhaps
		if !end && pair == keyNames(key, p.bridge) && !slices.Contains(p.others, name) {
			found = likely
		}
	})
	return found, err
}

// setHolds says how likely it is that some of the addresses are in a set of addresses. It is certain where one
// element holds a prefix of them.
func (c *Conn) setHolds(ch chain, set string, prefixes []netip.Prefix) (likelihood, error) {
	var list []element
	err := c.elements(ch, set, func(key []byte, end bool) { list = append(list, element{key, end}) })
	found := never
	for _, p := range prefixes {
		found = max(found, holds(list, p))
	}
	return found, err
}

// element is a member of a set. In a set of intervals it begins one, or is what follows after its end.
type element struct {
	key []byte
	end bool
}

// holds says how likely it is that elements hold what is of a prefix. It puts them in order.
func holds(list []element, p netip.Prefix) likelihood {
	first := p.Masked().Addr().AsSlice()
	last := slices.Clone(first)
	for bit := p.Bits(); bit < 8*len(last); bit++ {
		last[bit/8] |= 0x80 >> (bit % 8)
	}
	slices.SortFunc(list, func(a, b element) int {
		ends := map[bool]int{false: 1}
		return cmp.Or(bytes.Compare(a.key, b.key), cmp.Compare(ends[a.end], ends[b.end]))
	})
	intervals := slices.ContainsFunc(list, func(e element) bool { return e.end })
	found := never
	for i, e := range list {
		if e.end || len(e.key) != len(first) || bytes.Compare(e.key, last) > 0 {
			continue
		}
		end := e.key // the last that it holds, or what follows on that
		if intervals {
			end = nil // there is nothing
			if i+1 < len(list) {
				end = list[i+1].key
			}
		}
		begins, beyond := bytes.Compare(e.key, first), 1
		if end != nil {
			beyond = bytes.Compare(end, last)
		}
		switch {
		case begins <= 0 && (beyond > 0 || beyond == 0 && !intervals):
			return always
		case begins >= 0 || intervals && bytes.Compare(end, first) > 0:
			found = likely
		}
	}
	return found
}

// elements lists those of a set.
func (c *Conn) elements(ch chain, set string, each func(key []byte, end bool)) error {
	err := c.dump("list elements of set "+set+" of table "+ch.table, ch.family, unix.NFT_MSG_GETSETELEM, func(data []byte) error {
		return eachElement(data, each)
	}, nftnl.String(unix.NFTA_SET_ELEM_LIST_TABLE, ch.table), nftnl.String(unix.NFTA_SET_ELEM_LIST_SET, set))
	if errors.Is(err, fs.ErrNotExist) {
		err = nftnl.ErrOvertaken
	}
	return err
}

// eachElement reads a message that lists elements of a set. One without a key is that of maps for all else.
func eachElement(b []byte, each func(key []byte, end bool)) error {
	return nftnl.Decode(b, func(ad *netlink.AttributeDecoder) error {
		if ad.Type() != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			return nil
		}
		return nftnl.Nested(ad, func(ad *netlink.AttributeDecoder) error {
			var key []byte
			var flags uint32
			err := nftnl.Nested(ad, func(ad *netlink.AttributeDecoder) (err error) {
				switch ad.Type() {
				case unix.NFTA_SET_ELEM_KEY:
					key, err = nftnl.ValueOf(ad)
				case unix.NFTA_SET_ELEM_FLAGS:
					flags = ad.Uint32()
				}
				return err
			})
			if key != nil {
				each(key, flags&unix.NFT_SET_ELEM_INTERVAL_END != 0)
			}
			return err
		})
	})
}

package foreign

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// This file is what reference.go alone needs, and goes with it: rules with the addresses that they name.

// namedRule is a rule with its conditions about addresses.
type namedRule struct {
	rule
	conditions []namedAddresses
}

type namedAddresses struct {
	source, negated bool
	prefix          netip.Prefix
}

func (c *Conn) namedRulesIn(ctx context.Context, family uint8, table string) (map[string][]namedRule, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	chains := map[string][]namedRule{}
	op := fmt.Sprintf("list rules of table %s %s", nftnl.FamilyName(family), table)
	err := nftnl.List(c.nl, op, family, unix.NFT_MSG_GETRULE, func(data []byte) error {
		r, err := decodeNamedRule(family, data)
		if err == nil {
			chains[r.chain] = append(chains[r.chain], r)
		}
		return err
	}, nftnl.String(unix.NFTA_RULE_TABLE, table))
	return chains, err
}

func decodeNamedRule(family uint8, b []byte) (namedRule, error) {
	plain, err := decodeRule(family, b, &packet{})
	r := namedRule{rule: plain}
	if err != nil {
		return r, err
	}
	a := addressReader{rule: &r, family: family}
	err = nftnl.Decode(b, func(ad *netlink.AttributeDecoder) error {
		if ad.Type() != unix.NFTA_RULE_EXPRESSIONS {
			return nil
		}
		return nftnl.Nested(ad, a.expression)
	})
	return r, err
}

// addressReader reads payload, bitwise and cmp in a row.
type addressReader struct {
	rule   *namedRule
	family uint8
	length int // of the addresses that were loaded; 0: something else was
	source bool
	mask   []byte
}

func (a *addressReader) expression(ad *netlink.AttributeDecoder) error {
	var name string
	var own []byte
	err := nftnl.Nested(ad, func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.NFTA_EXPR_NAME:
			name = ad.String()
		case unix.NFTA_EXPR_DATA:
			own = ad.Bytes()
		}
		return nil
	})
	if err != nil {
		return err
	}
	switch name {
	case "payload":
		return a.payload(own)
	case "bitwise":
		var e expr.Bitwise
		err := expr.Unmarshal(a.family, own, &e)
		a.mask = e.Mask
		return err
	case "cmp":
		var e expr.Cmp
		err := expr.Unmarshal(a.family, own, &e)
		if prefix, ok := prefixOf(e.Data, a.mask, a.length); ok && a.length > 0 {
			a.rule.conditions = append(a.rule.conditions, namedAddresses{a.source, e.Op != expr.CmpOpEq, prefix})
		}
		return err
	}
	a.length = 0
	return nil
}

func (a *addressReader) payload(b []byte) error {
	var e expr.Payload
	err := expr.Unmarshal(a.family, b, &e)
	offset := e.Offset
	length, first := 4, uint32(12)
	if a.family == unix.NFPROTO_IPV6 {
		length, first = 16, 8
	}
	a.length, a.mask, a.source = 0, nil, offset == first
	if e.Base == expr.PayloadBaseNetworkHeader && (offset == first || offset == first+uint32(length)) {
		a.length = length
	}
	return err
}

// prefixOf makes a prefix of the beginning of an address and a mask; a nil mask is
// all of what there is.
func prefixOf(address, mask []byte, addrLen int) (netip.Prefix, bool) {
	if len(address) > addrLen || mask != nil && len(mask) != len(address) {
		return netip.Prefix{}, false
	}
	length := 8 * len(address)
	if mask != nil {
		ones, all := net.IPMask(mask).Size()
		if all == 0 && len(mask) > 0 {
			return netip.Prefix{}, false
		}
		length = ones
	}
	full := make([]byte, addrLen)
	copy(full, address)
	addr, ok := netip.AddrFromSlice(full)
	return netip.PrefixFrom(addr, length), ok
}

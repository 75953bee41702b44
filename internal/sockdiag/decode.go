package sockdiag

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

const (
	msgLen      = 72 // struct inet_diag_msg
	attrV6Only  = 11 // INET_DIAG_SKV6ONLY
	attrLocals  = 12 // INET_DIAG_LOCALS, of SCTP
	storageLen  = 128
	portOffset  = 4
	addrOffset  = 8
	linkOffset  = 40
	uidOffset   = 64
	inodeOffset = 68
)

// decodeReceiver is decode of a socket that receives from anybody. Of another it gives
// none: SCTP lists other states too.
func decodeReceiver(proto uint8, b []byte) ([]Socket, error) {
	if len(b) >= msgLen && b[1] != state(proto) {
		return nil, nil
	}
	return decode(proto, b)
}

// decode reads struct inet_diag_msg and its attributes: a socket. One of SCTP can have
// several addresses, and is given once for each.
func decode(proto uint8, b []byte) ([]Socket, error) {
	if len(b) < msgLen {
		return nil, fmt.Errorf("%w: a socket of %d bytes", nl.ErrMalformed, len(b))
	}
	local, err := address(b[0], b[addrOffset:])
	if err != nil {
		return nil, err
	}
	s := Socket{
		Proto: proto,
		Link:  int(int32(binary.NativeEndian.Uint32(b[linkOffset:]))),
		UID:   binary.NativeEndian.Uint32(b[uidOffset:]),
		Inode: binary.NativeEndian.Uint32(b[inodeOffset:]),
	}
	locals := []netip.Addr{local}
	err = nl.Decode(b[msgLen:], func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case attrV6Only:
			s.V6Only = ad.Uint8() != 0
		case attrLocals:
			ad.Do(func(b []byte) error {
				var err error
				locals, err = addresses(b)
				return err
			})
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var list []Socket
	for _, local := range locals {
		s.Local = netip.AddrPortFrom(local, binary.BigEndian.Uint16(b[portOffset:]))
		list = append(list, s)
	}
	return list, nil
}

// address takes an address off the front of b.
func address(family uint8, b []byte) (netip.Addr, error) {
	switch {
	case family == unix.AF_INET && len(b) >= 4:
		return netip.AddrFrom4([4]byte(b[:4])), nil
	case family == unix.AF_INET6 && len(b) >= 16:
		return netip.AddrFrom16([16]byte(b[:16])).Unmap(), nil
	}
	return netip.Addr{}, fmt.Errorf("%w: an address of family %d in %d bytes", nl.ErrMalformed, family, len(b))
}

// addresses reads a row of struct sockaddr_storage.
func addresses(b []byte) ([]netip.Addr, error) {
	if len(b)%storageLen != 0 {
		return nil, fmt.Errorf("%w: %d bytes of addresses of %d", nl.ErrMalformed, len(b), storageLen)
	}
	var list []netip.Addr
	for ; len(b) > 0; b = b[storageLen:] {
		at := 4 // sin_addr, behind family and port
		family := binary.NativeEndian.Uint16(b)
		if family == unix.AF_INET6 {
			at = 8 // sin6_addr, behind sin6_flowinfo
		}
		if family > 0xff {
			return nil, fmt.Errorf("%w: an address of family %d", nl.ErrMalformed, family)
		}
		a, err := address(uint8(family), b[at:storageLen])
		if err != nil {
			return nil, err
		}
		list = append(list, a)
	}
	return list, nil
}

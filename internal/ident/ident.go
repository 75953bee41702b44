// Package ident makes short names for attachments, where their full names do not fit. An attachment is one interface of
// a container in a network. The package also derives MACs and link-local addresses, and checks names.
package ident

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// ShareGroup is the link group (IFLA_GROUP) of the port that connects a bridge to a shared NIC (package share). The
// firewall's rules match the port by its group.
const ShareGroup uint32 = 0x746d

// Digits is the number of hexadecimal digits of a Hash. With 11 digits, the name that Port returns has 15 bytes, the
// longest name that the kernel allows for a link.
const Digits = 11

// Hash returns the short name of an attachment. The attachment's port has the hash in its name and alias. Its nft
// elements have it in their comments, and its record in the file name. The hash consists of the first Digits
// hexadecimal digits of SHA-256. It is computed over the three arguments as netstrings ("<decimal length>:<bytes>,"),
// so that different arguments never encode alike. With 44 bits, a collision among 1,000 attachments happens on one node
// in 35 million.
func Hash(network, containerID, ifname string) string {
	buf := make([]byte, 0, 192)
	for _, s := range [...]string{network, containerID, ifname} {
		buf = strconv.AppendInt(buf, int64(len(s)), 10)
		buf = append(buf, ':')
		buf = append(buf, s...)
		buf = append(buf, ',')
	}
	sum := sha256.Sum256(buf)
	return hex.EncodeToString(sum[:(Digits+1)/2])[:Digits]
}

// Port returns the name of an attachment's port, which is the host's end of the pod's veth pair. hash is the
// attachment's Hash.
func Port(hash string) string { return "veth" + hash }

// RandomMAC returns a random, locally administered unicast MAC. The MAC must be unique but not secret, so it comes
// from the Go runtime's generator. The kernel's generator would cost a process 0.03 ms.
func RandomMAC() net.HardwareAddr {
	mac := binary.NativeEndian.AppendUint64(make(net.HardwareAddr, 0, 8), rand.Uint64())[:6]
	mac[0] = mac[0]&^1 | 2
	return mac
}

// DerivedMAC is the first byte of every MAC that is derived from an address, a pod or a container.
const DerivedMAC = 0x0a

// MACOf derives a MAC from the first IPv4 address or, if there is none, from the first address. A later pod with the
// same address gets the same MAC, so neighbour entries of other hosts stay valid. Without addresses, MACOf returns nil.
func MACOf(addresses []netip.Addr) net.HardwareAddr {
	if i := slices.IndexFunc(addresses, netip.Addr.Is4); i >= 0 {
		return append(net.HardwareAddr{DerivedMAC, 0x58}, addresses[i].AsSlice()...)
	}
	if len(addresses) == 0 {
		return nil
	}
	sum := sha256.Sum256(addresses[0].AsSlice())
	return append(net.HardwareAddr{DerivedMAC}, sum[:5]...)
}

// LinkLocal returns the IPv6 link-local address that the kernel derives from a MAC of 6 bytes. addr.LinkLocal returns
// the same address, but its package depends on more libraries.
func LinkLocal(mac net.HardwareAddr) netip.Addr {
	return netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80,
		8: mac[0] ^ 2, 9: mac[1], 10: mac[2], 11: 0xff, 12: 0xfe, 13: mac[3], 14: mac[4], 15: mac[5]})
}

// EndsAlike reports whether two IPv6 addresses have the same interface identifier, which is the last 8 bytes.
func EndsAlike(a, b netip.Addr) bool {
	one, other := a.As16(), b.As16()
	return [8]byte(one[8:]) == [8]byte(other[8:])
}

// ErrName is the cause of an error about a name or a hash that has a wrong length, or characters that are not allowed.
var ErrName = errors.New("bad name")

// IsIdentifier reports whether s is a valid container ID or network name. The CNI specification demands
// ^[a-zA-Z0-9][a-zA-Z0-9_.-]*$.
func IsIdentifier(s string) bool {
	const alphanumeric = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	return s != "" && strings.Contains(alphanumeric, s[:1]) && strings.Trim(s, alphanumeric+"_.-") == ""
}

// IsLinkName reports whether the kernel accepts s as the name of a link (dev_valid_name()). IsLinkName also rejects
// percent signs, since for "br%d" the kernel chooses a new number at each call.
func IsLinkName(s string) bool {
	return s != "" && len(s) <= 15 && s != "." && s != ".." && !strings.ContainsAny(s, "/:% \t\n\v\f\r\x00")
}

// LinkNameForm is the last part of an error message about a name that IsLinkName rejects.
const LinkNameForm = ": want 1 to 15 bytes without space, slash, colon and percent sign"

// IsHash reports whether s has the form of a Hash.
func IsHash(s string) bool { return len(s) == Digits && strings.Trim(s, "0123456789abcdef") == "" }

// CheckHash returns an error if hash does not have the form of a Hash. If it has, a file name made from it cannot lead
// out of its directory.
func CheckHash(hash string) error {
	if !IsHash(hash) {
		return fmt.Errorf("hash %.20q: %w: want %d lower-case hexadecimal digits", hash, ErrName, Digits)
	}
	return nil
}

// CheckText returns an error if name is empty or not UTF-8. what describes the name, for the error. Use CheckText for
// names that never become part of a path. JSON cannot store bytes that are not UTF-8, so a record with such a name
// would not match its own hash.
func CheckText(what, name string) error {
	if name == "" {
		return fmt.Errorf("%s: %w: it is empty", what, ErrName)
	}
	if !utf8.ValidString(name) {
		return fmt.Errorf("%s %q: %w: it is not UTF-8", what, name, ErrName)
	}
	return nil
}

// Package ident names attachments where their full names do not fit.
package ident

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
)

// Digits is the length of a Hash: what fits beside "veth" into the name of a link.
const Digits = 11

// Hash is the short name of an attachment: in the name and the alias of its port,
// in the comments of its nft elements, in the name of its record. It is the first
// Digits hexadecimal digits of SHA-256 over the three names as netstrings
// ("<decimal length>:<bytes>,"), so that no two triples encode alike. With 44 bits,
// a collision among 1,000 attachments happens on one node in 35 million.
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

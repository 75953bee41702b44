package ipam

import (
	"strings"

	"github.com/tombolo-cni/tombolo/internal/ident"
)

// lineBreak is between the lines of a reservation file. There is none at the
// end.
const lineBreak = "\r\n"

// hashPrefix starts a reservation whose owner is known only by the hash that
// marks its link. A container ID cannot have a colon, so the reference plugin
// takes such a file for that of a container it does not know.
const hashPrefix = "tombolo:"

// A reservation names the attachment that holds an address. The content of its file has one of
// the forms
//
//	<container>\r\n<interface>    what the reference plugin writes, and we
//	<container>                   what it wrote before version 0.8
//	tombolo:<hash>\r\n[<interface>]    what we write for an address that we found alive without a file
type reservation struct {
	containerID string
	ifName      string // empty in the second form
	hash        string // of the third form, which has no containerID
}

// reservation is what an attachment's file has.
func (o Owner) reservation() reservation {
	return reservation{containerID: o.ContainerID, ifName: o.IfName}
}

// A reservationState is what the content of a file turned out to be.
type reservationState int

const (
	stateHeld      reservationState = iota // a reservation
	stateTruncated                         // what a creator left that died before it had written all
	stateForeign                           // something else: not ours to judge
)

// maxReservation bounds the content that is read, in bytes. A container ID may
// be of any length; those of runtimes have 64.
const maxReservation = 1024

// parseReservation reads the content of a reservation file. What it does not
// understand is foreign, and never an error.
func parseReservation(data []byte) (reservation, reservationState) {
	text := string(data)
	if len(data) > maxReservation {
		return reservation{}, stateForeign
	}
	// A file may come out of a power failure with its length but without its
	// content.
	if strings.Trim(text, "\x00 \t\r\n") == "" {
		return reservation{}, stateTruncated
	}
	trimmed := strings.TrimSpace(text)
	first, second, _ := strings.Cut(trimmed, lineBreak)
	if hash, ok := strings.CutPrefix(first, hashPrefix); ok {
		if !isHash(hash) || !ident.IsLinkName(second) && second != "" {
			return reservation{}, stateForeign
		}
		return reservation{hash: hash, ifName: second}, stateHeld
	}
	switch {
	case !ident.IsIdentifier(first):
		return reservation{}, stateForeign
	case second != "":
		if !ident.IsLinkName(second) {
			return reservation{}, stateForeign
		}
		return reservation{containerID: first, ifName: second}, stateHeld
	default:
		return reservation{containerID: first}, stateHeld
	}
}

// content is the file of r.
func (r reservation) content() string {
	switch {
	case r.hash != "":
		return hashPrefix + r.hash + lineBreak + r.ifName
	case r.ifName == "":
		return r.containerID
	default:
		return r.containerID + lineBreak + r.ifName
	}
}

// isHash reports whether text is a hexadecimal number in lower case.
func isHash(text string) bool {
	for i := range len(text) {
		if c := text[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return text != ""
}

package state

import (
	"fmt"

	"github.com/tombolo-cni/tombolo/internal/ident"
)

// ErrName is ident.ErrName.
var ErrName = ident.ErrName

// maxNetworkName leaves room for ".json" in NAME_MAX (255).
const maxNetworkName = 250

// checkNetwork accepts what the CNI specification allows as a network's name. So "..", '/', NUL and our own ".tmp-"
// do not get into paths.
func checkNetwork(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("network: %w: it is empty", ErrName)
	case len(name) > maxNetworkName:
		return fmt.Errorf("network %.20q…: %w: %d bytes, at most %d fit in a file name", name, ErrName, len(name), maxNetworkName)
	case !ident.IsIdentifier(name):
		return fmt.Errorf("network %q: %w: only letters, digits, '_', '.' and '-' are allowed, and first a letter or a digit", name, ErrName)
	}
	return nil
}

// checkNIC accepts the names of links, which lead out of no directory.
func checkNIC(name string) error {
	if !ident.IsLinkName(name) {
		return fmt.Errorf("uplink %.20q: %w: no link has it", name, ErrName)
	}
	return nil
}

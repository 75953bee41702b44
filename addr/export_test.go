package addr

import "github.com/mdlayher/netlink"

// CopyOf gives the request that adds the address of a message again.
func CopyOf(m netlink.Message) (netlink.Message, error) { return copyOf(m) }

// Said gives what a message says, for comparison.
func Said(m netlink.Message) []string { return said(m) }

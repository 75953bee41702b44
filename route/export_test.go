package route

import "github.com/mdlayher/netlink"

// CopyOf gives the request that adds the object of a message again.
func CopyOf(m netlink.Message) (netlink.Message, error) { return copyOf(m) }

// DelOf gives the request that deletes it.
func DelOf(m netlink.Message) (netlink.Message, error) { return requestOf(m, deletion) }

// Said gives what a message says, for comparison.
func Said(m netlink.Message) []string { return said(m) }

package cni

import (
	"context"
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
)

// inNamespace opens the network namespace at path. It calls do with the namespace and a netlink socket in it. This
// needs CAP_SYS_ADMIN.
func inNamespace(path string, do func(*nl.Conn, *netns.NS) error) error {
	pod, err := netns.Open(path)
	if err != nil {
		return err
	}
	defer pod.Close()
	conn, err := nl.Dial(unix.NETLINK_ROUTE, pod)
	if err != nil {
		return err
	}
	defer conn.Close()
	return do(conn, pod)
}

// inPodNamespace works like inNamespace, but does nothing if path is empty, the namespace is gone, or path leads to the
// caller's own namespace. A path in /proc may lead there if the kernel has given the pod's process ID to another
// process.
func inPodNamespace(path string, do func(*nl.Conn, *netns.NS) error) error {
	if path == "" {
		return nil
	}

	err := inNamespace(path, func(conn *nl.Conn, pod *netns.NS) error {
		if host, err := isHost(pod); host || err != nil {
			return err
		}
		return do(conn, pod)
	})
	return state.Ignore(err, fs.ErrNotExist, netns.ErrNotNetNS)
}

// isHost reports whether pod is the caller's own network namespace.
func isHost(pod *netns.NS) (bool, error) {
	own, err := netns.Current()
	if err != nil {
		return false, err
	}
	defer own.Close()
	return own.ID() == pod.ID(), nil
}

// findLink returns the link called name, with all attributes that the plugin tuning can set.
func findLink(conn *nl.Conn, name string) (*link.Info, error) {
	return link.Find(context.Background(), conn, name, 0, unix.IFLA_ADDRESS, unix.IFLA_MTU, unix.IFLA_TXQLEN)
}

// podHasLink reports whether the namespace at path has a link called name. It also returns true if the link cannot be
// read, for example because it has more alternative names than fit into the kernel's answer. It returns false if the
// namespace cannot be opened, or is the caller's own.
func podHasLink(path, name string) (has bool) {
	_ = inPodNamespace(path, func(conn *nl.Conn, _ *netns.NS) error {
		_, err := findLink(conn, name)
		has = !errors.Is(err, fs.ErrNotExist)
		return nil
	})
	return has
}

package cni

import (
	"context"
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// inNamespace opens the namespace at path, and calls do with a socket in it. It needs CAP_SYS_ADMIN to enter the
// namespace.
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

// inPodNamespace works like inNamespace, for verbs that remove a pod. If path is empty, or the namespace is gone, it
// does nothing. It also does nothing if path leads to the caller's own namespace. A path in /proc may lead there if
// another process got the process ID.
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
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, netns.ErrNotNetNS) {
		return nil
	}
	return err
}

// isHost reports whether a namespace is the caller's own.
func isHost(pod *netns.NS) (bool, error) {
	own, err := netns.Current()
	if err != nil {
		return false, err
	}
	defer own.Close()
	return own.ID() == pod.ID(), nil
}

// findLink returns a link with the attributes that the plugin tuning can set.
func findLink(conn *nl.Conn, name string) (*link.Info, error) {
	return link.Find(context.Background(), conn, name, 0, unix.IFLA_ADDRESS, unix.IFLA_MTU, unix.IFLA_TXQLEN)
}

// podHasLink reports whether the pod has a link with the given name. It also returns true if the link cannot be read.
// That happens if the pod has given the link more names than fit into the kernel's answer.
func podHasLink(path, name string) (has bool) {
	_ = inPodNamespace(path, func(conn *nl.Conn, _ *netns.NS) error {
		_, err := findLink(conn, name)
		has = !errors.Is(err, fs.ErrNotExist)
		return nil
	})
	return has
}

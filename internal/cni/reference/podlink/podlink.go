// Package podlink works on a link in a pod's namespace, whichever plugin made it.
package podlink

import (
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Within has a function work in the pod's namespace at path. It needs CAP_SYS_ADMIN to enter it.
func Within(path string, do func(*nl.Conn, *netns.NS) error) error {
	pod, err := netns.Open(path)
	if err != nil {
		return err
	}
	defer pod.Close()
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: pod})
	if err != nil {
		return err
	}
	defer conn.Close()
	return do(conn, pod)
}

// WithinPod is Within for verbs that take down: a namespace that is gone, or that nobody names, is
// success, and so is the caller's own, to which the path of a process leads whose number was
// given anew.
func WithinPod(path string, do func(*nl.Conn, *netns.NS) error) error {
	if path == "" {
		return nil
	}
	host, err := netns.Current()
	if err != nil {
		return err
	}
	defer host.Close()
	err = Within(path, func(conn *nl.Conn, pod *netns.NS) error {
		if pod.ID() == host.ID() {
			return nil
		}
		return do(conn, pod)
	})
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, netns.ErrNotNetNS) {
		return nil
	}
	return err
}

// IsOthers says whether the pod has a link of a name whose other end on the host is no port of ours. A link that
// cannot be read is one: the pod gave it more names than fit into an answer.
func IsOthers(path, name string) (others bool) {
	_ = WithinPod(path, func(conn *nl.Conn, _ *netns.NS) error {
		var l link.Link
		var b nl.Batch
		link.Get(&b, name, 0, &l)
		err := conn.Execute(&b)
		others = !errors.Is(err, fs.ErrNotExist) && (err != nil || !isOurs(conn, &l))
		return nil
	})
	return others
}

// isOurs says whether a pod's link has an end on the host, with an alias of ours.
func isOurs(pod *nl.Conn, in *link.Link) bool {
	if onHost, err := in.RestsHere(pod); err != nil || !onHost {
		return false
	}
	host, err := nl.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return false
	}
	defer host.Close()
	var l link.Link
	var b nl.Batch
	link.Get(&b, "", in.Lower, &l)
	if host.Execute(&b) != nil {
		return false
	}
	_, ours := endpoint.ParseAlias(l.Alias)
	return ours
}

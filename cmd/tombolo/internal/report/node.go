package report

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
)

// Selection selects attachments: pods' interfaces on networks. The zero Selection selects all.
type Selection struct {
	Pod     string // a pod's name or address: see Meant
	Network string
}

// None returns the message for a selection that matches no attachment.
func (s Selection) None() string {
	return map[bool]string{true: "no pod is on record\n", false: "no pod on record matches\n"}[s == Selection{}]
}

// PodName returns a name for a pod: its own name or, if that is not known, the shortened ID of its container, as in
// ls.
func PodName(pod, containerID string) string {
	return cmp.Or(pod, fmt.Sprintf("container %.12s", containerID))
}

// Meant reports whether name denotes an attachment. name may be the pod's name with or without its namespace, and with
// the wildcards of filepath.Match. It may also be an address, or the beginning of the container's ID. The name of the
// port on the bridge and the name of the pod's interface denote the attachment too. An empty name denotes every
// attachment.
func Meant(a *network.Attachment, name string) bool {
	if name == a.Port || name == a.IfName || strings.HasPrefix(a.ContainerID, name) {
		return true
	}

	address, _ := netip.ParseAddr(name)
	if slices.ContainsFunc(a.Addresses, func(has ipam.Address) bool { return has.Prefix.Addr() == address }) {
		return true
	}

	pod := a.Pod
	if !strings.Contains(name, "/") {
		pod = pod[strings.LastIndexByte(pod, '/')+1:]
	}

	ok, err := filepath.Match(name, pod)
	return ok && err == nil && pod != ""
}

// Inspect inspects a node, and returns only the selected attachments, their networks, and the notes about the host. It
// returns an error if a name without wildcards denotes no pod, or if the network is not on record. Otherwise an empty
// result is no error. The zero Selection returns the whole inspection.
func (s Selection) Inspect(ctx context.Context, node *network.Node) (*network.Inspection, error) {
	if _, err := filepath.Match(s.Pod, ""); err != nil {
		return nil, fmt.Errorf("pod %q: %w", s.Pod, err)
	}

	if s.Network != "" {
		names, err := node.Networks(ctx)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(names, s.Network) {
			return nil, state.UnknownNetwork(names, s.Network)
		}
	}

	inspection, err := node.Inspect(ctx)
	if err != nil || s == (Selection{}) {
		return inspection, err
	}

	isOther := func(r network.Report) bool { return !Meant(r.Attachment, s.Pod) }
	pods := slices.DeleteFunc(inspection.Attachments, isOther)
	if s.Pod != "" && len(pods) == 0 && !strings.ContainsAny(s.Pod, "*?[") {
		return nil, fmt.Errorf("no pod %q: tombolo ls lists the pods", s.Pod)
	}

	pods = slices.DeleteFunc(pods, func(r network.Report) bool { return s.Network != "" && r.Network != s.Network })
	networks := slices.DeleteFunc(inspection.Networks, func(n network.NetworkReport) bool {
		return n.Network != s.Network &&
			!slices.ContainsFunc(pods, func(r network.Report) bool { return r.Network == n.Network })
	})
	return &network.Inspection{Attachments: pods, Networks: networks, Others: inspection.Others}, nil
}

// Open opens a node. If the state directory is missing, it returns an error. A missing default directory is no
// error, since it only means that no pod was attached since the boot.
func Open(ctx context.Context, cfg *network.Config) (*network.Node, error) {
	if dir := cfg.StateDir; filepath.IsAbs(dir) && dir != network.DefaultStateDir {
		if info, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
			return nil, fmt.Errorf("%s is no state directory: name the stateDir of the network's configuration", dir)
		}
	}
	return network.Open(ctx, cfg)
}

// Repair repairs the host, and compares the differences before and after. It returns the causes that are gone and those
// that are left. The error describes failed repairs, whose causes may also be in left, or a failed inspection.
func Repair(ctx context.Context, node *network.Node) (done, left []Line, _ error) {
	before, err := node.Inspect(ctx)
	if err != nil {
		return nil, nil, err
	}

	err = node.Repair(ctx)
	after, afterErr := node.Inspect(ctx)
	if afterErr != nil {
		return nil, nil, errors.Join(err, afterErr)
	}

	remaining := findings(after)
	gone := slices.DeleteFunc(findings(before), func(f finding) bool { return slices.Contains(remaining, f) })
	return causes(gone), causes(remaining), err
}

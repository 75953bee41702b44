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

// Selection says which attachments are meant. The zero Selection is all.
type Selection struct {
	Pod     string // as Meant has it
	Network string
}

// None says that there is no attachment, or none that was selected.
func (s Selection) None() string {
	if s == (Selection{}) {
		return "no pod is on record\n"
	}
	return "no pod on record is meant by that\n"
}

// PodName is what to call a pod, whose name may not be known. Of the container's ID it has what ls shows.
func PodName(pod, containerID string) string {
	return cmp.Or(pod, fmt.Sprintf("container %.12s", containerID))
}

// Meant says whether name means an attachment: it is the pod's name, with or without its
// namespace, in which * stands for any characters but /, or the beginning of its container's ID, or its port or interface, or
// one of its addresses. An empty one means all.
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

// Inspect inspects a node, and leaves in what was selected. An empty result of a filter is an answer; a name that
// means no pod, and a network that is not on record, are errors.
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
	in, err := node.Inspect(ctx)
	if err != nil || s == (Selection{}) {
		return in, err
	}
	pods := slices.DeleteFunc(in.Attachments, func(r network.Report) bool { return !Meant(r.Attachment, s.Pod) })
	if s.Pod != "" && len(pods) == 0 && !strings.ContainsAny(s.Pod, "*?[") {
		return nil, fmt.Errorf("no pod %q: tombolo ls lists those that there are", s.Pod)
	}
	pods = slices.DeleteFunc(pods, func(r network.Report) bool { return s.Network != "" && r.Network != s.Network })
	networks := slices.DeleteFunc(in.Networks, func(n network.NetworkReport) bool {
		return n.Network != s.Network && !slices.ContainsFunc(pods, func(r network.Report) bool { return r.Network == n.Network })
	})
	return &network.Inspection{Attachments: pods, Networks: networks, Others: in.Others}, nil
}

// Open opens a node to look at it. A state directory that was named has to be there; none in
// the usual place only says that nothing was ever attached.
func Open(ctx context.Context, cfg *network.Config) (*network.Node, error) {
	if dir := cfg.StateDir; filepath.IsAbs(dir) && dir != network.DefaultStateDir {
		if info, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
			return nil, fmt.Errorf("%s is no state directory: name the stateDir of the network's configuration", dir)
		}
	}
	return network.Open(ctx, cfg)
}

// Repaired is what a repair came to.
type Repaired struct {
	Done []Line // what differed, and does no more
	Left []Line // what differs still
}

// Repair repairs the host and the pods, and compares what was before with what is then. An
// error is about what could not be done; Left may name it too. Without a Repaired, nothing is
// known of it.
func Repair(ctx context.Context, node *network.Node) (*Repaired, error) {
	before, err := node.Inspect(ctx)
	if err != nil {
		return nil, err
	}
	err = node.Repair(ctx)
	after, afterErr := node.Inspect(ctx)
	if afterErr != nil {
		return nil, errors.Join(err, afterErr)
	}
	left := findings(after)
	done := slices.DeleteFunc(findings(before), func(f finding) bool { return slices.Contains(left, f) })
	return &Repaired{causes(done), causes(left)}, err
}

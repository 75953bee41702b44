package report

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/network"
)

// Selection says which attachments are meant. The zero Selection is all.
type Selection struct {
	Name    string // as Meant has it
	Network string
	Pod     string // "NAMESPACE/NAME" or "NAME"; * stands for any characters but /
}

// Meant says whether name means an attachment: it is the pod's name, with or without its
// namespace, or the beginning of its container's ID. An empty one means all.
func Meant(a *network.Attachment, name string) bool {
	return name == "" || a.Pod == name || strings.HasSuffix(a.Pod, "/"+name) || strings.HasPrefix(a.ContainerID, name)
}

// Inspect inspects a node, and leaves in what was selected. That a filter lets nothing pass is an
// answer; a name that means no pod, and a network that is not on record, are errors.
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
			return nil, Unknown(names, s.Network)
		}
	}
	in, err := node.Inspect(ctx)
	if err != nil || s == (Selection{}) {
		return in, err
	}
	found := &network.Inspection{Attachments: []network.Report{}}
	named, networks := false, map[string]bool{s.Network: true}
	for _, r := range in.Attachments {
		if !Meant(r.Attachment, s.Name) {
			continue
		}
		named = true
		if (s.Network == "" || r.Network == s.Network) && (s.Pod == "" || matches(s.Pod, r.Pod)) {
			found.Attachments, networks[r.Network] = append(found.Attachments, r), true
		}
	}
	for _, n := range in.Networks {
		if networks[n.Network] {
			found.Networks = append(found.Networks, n)
		}
	}
	if s.Name != "" && !named {
		return nil, fmt.Errorf("no pod %q: tombolo ls lists those that there are", s.Name)
	}
	return found, nil
}

// matches compares a pod's name with a pattern, which may be of its last part.
func matches(pattern, pod string) bool {
	if !strings.Contains(pattern, "/") {
		pod = pod[strings.LastIndexByte(pod, '/')+1:]
	}
	ok, err := filepath.Match(pattern, pod)
	return ok && err == nil
}

package report

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/network"
)

// Remove takes a network down. One that is not on record, and of which the kernel has nothing
// either, is an error, which names those that are: the name was mistyped.
func Remove(ctx context.Context, node *network.Node, name string) error {
	names, err := node.Networks(ctx)
	if err != nil {
		return err
	}
	known := slices.Contains(names, name)
	if !known {
		if known, err = node.HasRules(ctx, name); err != nil {
			return err
		}
	}
	if !known {
		in, err := node.Inspect(ctx)
		if err != nil {
			return err
		}
		known = slices.ContainsFunc(in.Stray, func(d tombolo.Difference) bool { return strings.Contains(d.Text+" ", " of network "+name+" ") })
	}
	if !known {
		return Unknown(names, name)
	}
	return node.Remove(ctx, name)
}

// Unknown is the error about a network that is not there; names are those on record.
func Unknown(names []string, name string) error {
	if len(names) == 0 {
		return fmt.Errorf("there is no network %q: none is on record", name)
	}
	return fmt.Errorf("there is no network %q: those on record are %s", name, strings.Join(names, ", "))
}

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
		in, err := node.Inspect(ctx)
		if err != nil {
			return err
		}
		known = slices.ContainsFunc(in.Others, func(text string) bool { return strings.Contains(text, " of network "+name+" ") }) ||
			slices.ContainsFunc(in.Stray, func(d tombolo.Difference) bool { return strings.Contains(d.Text+" ", " of network "+name+" ") })
	}
	// It says what no name of a network is.
	if err := node.Remove(ctx, name); err != nil || known {
		return err
	}
	if len(names) == 0 {
		return fmt.Errorf("there is no network %q: none is on record", name)
	}
	return fmt.Errorf("there is no network %q: those on record are %s", name, strings.Join(names, ", "))
}

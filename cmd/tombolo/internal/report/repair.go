package report

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/tombolo-cni/tombolo/network"
)

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

package state_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/tombolo-cni/tombolo/internal/state"
)

// An ADD, as far as its state goes.
func Example() {
	parent, err := os.MkdirTemp("", "tombolo")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(parent)
	if err := add(context.Background(), filepath.Join(parent, "state")); err != nil {
		fmt.Println(err)
	}
	// Output:
	// the first of its epoch
	// build cbr0
	// ready
}

func add(ctx context.Context, path string) error {
	dir, err := state.Open(path)
	if err != nil {
		return err
	}
	lock, epoch, err := dir.Enter(ctx, func(start state.EpochStart) error {
		fmt.Println("the first of its epoch")
		return nil
	})
	if err != nil {
		return err
	}
	defer lock.Close()

	a := &state.Attachment{Epoch: epoch.Token(), Network: "cbr0", ContainerID: "c1", IfName: "eth0"}
	pending, err := dir.Create(a)
	if err != nil {
		return err
	}
	defer pending.Close()

	built := func() (bool, error) {
		n, err := dir.LoadNetwork("cbr0")
		return err == nil && n.ConfigHash == "f00", nil
	}
	build := func() error {
		fmt.Println("build cbr0")
		return dir.SaveNetwork(&state.Network{Epoch: epoch.Token(), Name: "cbr0", ConfigHash: "f00"})
	}
	if err := lock.Ensure(ctx, built, build); err != nil {
		return err
	}

	if err := pending.Commit(a); err != nil {
		return err
	}
	saved, err := dir.Load("cbr0", a.Hash())
	if err != nil {
		return err
	}
	fmt.Println(saved.State)
	return nil
}

//go:debug updatemaxprocs=0

// Command tombolo is a CNI plugin when a container runtime calls it, which sets
// CNI_COMMAND, and an operator's tool otherwise: see tombolo help. Called by the name of one of the
// reference's plugins, such as loopback, it does what that does.
package main

import (
	"os"
	"path/filepath"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/install"
	"github.com/tombolo-cni/tombolo/nft"
)

func main() {
	prepare()
	path, args := calledAs(os.Args)
	name := filepath.Base(path)
	plugin := &cni.Plugin{
		Getenv:     os.Getenv,
		Stdin:      os.Stdin,
		Stdout:     os.Stdout,
		Name:       name,
		Kept:       install.Kept(path),
		DialBridge: func() (*bridge.Conn, error) { return bridge.Dial(nil) },
		DialNFT:    nft.Dial,
		Exit:       os.Exit,
	}
	if os.Getenv("CNI_COMMAND") != "" {
		os.Exit(plugin.Run())
	}
	if len(args) == 0 && slices.Contains(cni.Names(), name) {
		os.Exit(introduce(os.Stderr, name))
	}
	os.Exit(operator(args))
}

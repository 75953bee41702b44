// Command tombolo is a CNI plugin when a container runtime calls it, which sets
// CNI_COMMAND, and an operator's tool otherwise: see tombolo help. Called by the name of one of the
// reference's plugins, such as loopback, it does what that does.
package main

import (
	"os"
	"path/filepath"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/nft"
)

func main() {
	prepare()
	plugin := &cni.Plugin{
		Getenv:     os.Getenv,
		Stdin:      os.Stdin,
		Stdout:     os.Stdout,
		Name:       filepath.Base(os.Args[0]),
		DialBridge: func() (*bridge.Conn, error) { return bridge.Dial(nil) },
		DialNFT:    nft.Dial,
		Exit:       os.Exit,
	}
	if os.Getenv("CNI_COMMAND") != "" {
		os.Exit(plugin.Run())
	}
	os.Exit(operator(os.Args[1:]))
}

// Command tombolo is a CNI plugin when a container runtime calls it, which sets
// CNI_COMMAND, and an operator's tool otherwise: see tombolo help. Called by the name loopback it
// is the plugin that sets a pod's lo up, which older containerd looks for.
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
		Loopback:   filepath.Base(os.Args[0]) == "loopback",
		DialBridge: func() (*bridge.Conn, error) { return bridge.Dial(nil) },
		DialNFT:    nft.Dial,
		Exit:       os.Exit,
	}
	if os.Getenv("CNI_COMMAND") != "" {
		os.Exit(plugin.Run())
	}
	os.Exit(operator(os.Args[1:]))
}

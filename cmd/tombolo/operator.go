package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/network"
)

// onNode does something with the node's networks.
func onNode(ctx context.Context, stateDir, leaseDir string, do func(*network.Node) error) error {
	node, err := network.Open(ctx, &network.Config{StateDir: stateDir, LeaseDir: leaseDir})
	if err != nil {
		return err
	}
	return do(node)
}

func printVersion(out io.Writer, asJSON bool) error {
	v := struct {
		Version string   `json:"version"`
		Commit  string   `json:"commit"`
		Go      string   `json:"go"`
		CNI     []string `json:"cni"`
	}{"unknown", "unknown", runtime.Version(), cni.SupportedVersions()}
	// The go command stamps both from git.
	if info, ok := debug.ReadBuildInfo(); ok {
		v.Version = info.Main.Version
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Commit = s.Value
			}
		}
	}
	if asJSON {
		return json.NewEncoder(out).Encode(v)
	}
	_, err := fmt.Fprintf(out, "tombolo %s (commit %s, %s, %s/%s)\nCNI %s\n",
		v.Version, v.Commit, v.Go, runtime.GOOS, runtime.GOARCH, strings.Join(v.CNI, ", "))
	return err
}

package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/demo"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/install"
	"github.com/tombolo-cni/tombolo/internal/cni"
)

// version is what a build was made of.
type version struct {
	Version string   `json:"version"`
	Commit  string   `json:"commit"`
	Go      string   `json:"go"`
	CNI     []string `json:"cni"`
}

// thisVersion is what the go command stamps from git.
func thisVersion() version {
	v := version{"unknown", "unknown", runtime.Version(), cni.SupportedVersions()}
	if info, ok := debug.ReadBuildInfo(); ok {
		v.Version = info.Main.Version
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Commit = s.Value
			}
		}
	}
	return v
}

func (o *options) versionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "print the version, the commit, the Go release and the supported CNI versions",
		Args:  takes(0, 0),
		RunE: func(*cobra.Command, []string) error {
			v := thisVersion()
			return o.print(fmt.Sprintf("tombolo %s (commit %s, %s, %s/%s)\nCNI %s\n",
				v.Version, v.Commit, v.Go, runtime.GOOS, runtime.GOARCH, strings.Join(v.CNI, ", ")), v)
		},
	}
	o.jsonFlag(cmd)
	return cmd
}

func (o *options) demoCommand() *cobra.Command {
	pods := 0
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "set up pods in a sandbox and show that they reach each other",
		Long:  "Set up pods in a sandbox and show that they reach each other; this takes a few seconds and leaves nothing.",
		Args:  takes(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			plugin, err := install.Plugin()
			if err != nil {
				return err
			}
			return demo.Run(cmd.Context(), o.out, plugin, pods)
		},
	}
	cmd.Flags().IntVar(&pods, "pods", 5, "run this `NUMBER` of pods")
	return cmd
}

package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/conflist"
	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/file"
)

// firstNetwork describes the network that `tombolo init` sets up.
type firstNetwork struct {
	name    string
	plugin  string // the plugin's configuration, as JSON
	options string // the same settings as options of Docker and podman 5
	note    string // further advice for the operator
	docker  string // flags of docker network create: the subnet, or no IPAM
	podman  string // flags of podman network create
}

func (o *options) initCommand() *cobra.Command {
	return group("init", "make a first network for the installed container runtimes",
		"Show a first network for each installed container runtime: the file for those that speak CNI (containerd,\n"+
			"CRI-O, nerdctl, podman 4), and the commands for Docker and podman 5. With --yes, write the file.",
		o.initLAN(), o.initPods())
}

func (o *options) initLAN() *cobra.Command {
	uplink := ""
	cmd := o.initSubcommand("lan", "containers on the host's LAN, with addresses of its DHCP server", "home",
		func() (*firstNetwork, error) {
			if uplink == "" {
				return nil, fmt.Errorf("%w: --uplink is missing: the NIC that connects this host to the LAN; "+
					"ip route show default names it", errUsage)
			}

			if _, err := net.InterfaceByName(uplink); err != nil {
				return nil, fmt.Errorf("uplink %s: the host has no such link (ip link lists its links)",
					uplink)
			}

			return &firstNetwork{
				plugin: fmt.Sprintf(`{ "type": "tombolo", "mode": "lan", "uplink": %q, "ipam": { "type": "dhcp" },
      "capabilities": { "portMappings": true, "bandwidth": true, "ips": true, "mac": true } }`, uplink),
				options: "-o mode=lan -o uplink=" + uplink, docker: "--ipam-driver null",
			}, nil
		})

	cmd.Flags().StringVar(&uplink, "uplink", "",
		"share this `NIC`, which connects the host to the LAN; it stays the host's")
	_ = cmd.RegisterFlagCompletionFunc("uplink", completeLinks)
	return cmd
}

func (o *options) initPods() *cobra.Command {
	subnet := ""
	const short = "containers on a network of this host's own, with masquerade and host ports"
	cmd := o.initSubcommand("pods", short, "pods",
		func() (*firstNetwork, error) {
			return &firstNetwork{
				plugin: fmt.Sprintf(`{ "type": "tombolo", `+
					`"capabilities": { "portMappings": true, "bandwidth": true, "ips": true, "mac": true }, `+
					`"ipam": { "type": "host-local", "ranges": [[{ "subnet": %q }]] } }`, subnet),
				docker: "--subnet " + subnet, podman: "--subnet " + subnet,
				note: "For a second runtime on this host, choose another --name and --subnet.\n\n",
			}, nil
		})

	cmd.Flags().StringVar(&subnet, "subnet", "10.22.0.0/16", "give addresses of this `SUBNET`")
	return cmd
}

// initSubcommand returns a subcommand of init. The parameter network is a function that returns the network for the
// flags, without its name. name is the default of the flag --name.
func (o *options) initSubcommand(use, short, name string, network func() (*firstNetwork, error)) *cobra.Command {
	dir, yes := "", false
	cmd := command(use, short, "", func(ctx context.Context, _ []string) error {
		f, err := network()
		if err != nil {
			return err
		}
		f.name = name
		return o.begin(ctx, f, filepath.Join(dir, "10-"+name+".conflist"), yes)
	})

	cmd.Flags().StringVar(&name, "name", name, "call the network `NAME`")
	cmd.Flags().StringVar(&dir, "dir", "/etc/cni/net.d", "the runtimes' `DIR` of CNI networks")
	cmd.Flags().BoolVar(&yes, "yes", false, "write the file")
	return cmd
}

// begin prints, for each installed runtime, the file or the commands that configure the network. If yes is set, it also
// writes the file at path, for runtimes that use CNI.
func (o *options) begin(ctx context.Context, f *firstNetwork, path string, yes bool) error {
	list := fmt.Appendf(nil, `{
  "cniVersion": "1.0.0",
  "cniVersions": ["1.0.0", "1.1.0"],
  "name": %q,
  "plugins": [
    %s
  ]
}
`, f.name, f.plugin)
	r := conflist.Examine(list)
	if len(r.Problems) > 0 {
		return errors.New(strings.Join(r.Problems, "; "))
	}

	speakers, others := f.runtimes(isFile)
	if len(speakers) > 0 || others == "" {
		fmt.Fprintf(o.out, "%s: the file %s\n\n%s\n",
			strings.Join(append(speakers, "other runtimes that speak CNI"), ", "), path, list)
	}

	fmt.Fprint(o.out, others, f.note)
	if !yes {
		_, err := fmt.Fprintf(o.out, "Nothing is written: --yes writes %s.\n", path)
		return err
	}

	return o.writeList(ctx, path, list)
}

// runtimes returns the names of the installed runtimes that use CNI. The result others is text for the operator, with
// the commands that create the network in Docker and podman 5. It leaves out commands for runtimes that are not
// installed.
func (f *firstNetwork) runtimes(isFile func(path string) bool) (speakers []string, others string) {
	has := func(program string) bool {
		return slices.ContainsFunc(filepath.SplitList(os.Getenv("PATH")),
			func(dir string) bool { return isFile(filepath.Join(dir, program)) })
	}
	for _, name := range []string{"containerd", "crio"} {
		if has(name) {
			speakers = append(speakers, name)
		}
	}

	netavark := slices.ContainsFunc([]string{"/usr/lib/podman/netavark", "/usr/libexec/podman/netavark"}, isFile)
	if has("podman") && !netavark {
		speakers = append(speakers, "podman 4")
	}

	if has("dockerd") {
		others += f.commands("Docker", "systemctl stop tombolod\n  systemctl enable --now tombolo-docker.socket "+
			"tombolod", "docker", f.docker, "-o name="+f.name+" "+f.name)
	}

	if has("podman") && netavark {
		others += f.commands("podman 5", "systemctl enable --now tombolod", "podman", f.podman, f.name)
	}

	return speakers, others
}

// commands returns the text with the commands that set up the network in a runtime.
func (f *firstNetwork) commands(runtime, units, command, flags, name string) string {
	words := strings.Fields(command + " network create -d tombolo " + flags + " " + f.options + " " + name)
	return runtime + ":\n\n  " + units + "\n  " + strings.Join(words, " ") + "\n\n"
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// writeList writes list to the file at path. It returns an error if the file exists with another content.
func (o *options) writeList(ctx context.Context, path string, list []byte) error {
	existing, err := file.ReadNamed(ctx, path, cni.MaxStdin, 0)
	switch {
	case err == nil && bytes.Equal(existing, list):
		return o.print(path+" is there already\n", nil)
	case err == nil:
		return fmt.Errorf("%s exists with other content: edit it, or choose another --name", path)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}

	err = cmp.Or(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, list, 0o644))
	return o.done(err, path+" is written\n")
}

package cni

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	// The plugin is a program that the go command does not see: so that it does not
	// take an old run's result for that of a changed plugin.
	_ "github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
)

// Where the programs under test are. Unset, they are built.
const (
	binVar   = "TOMBOLO_BIN"   // a directory: the plugin tombolo-cni, the command tombolo, the keeper tombolod
	peersVar = "TOMBOLO_PEERS" // a directory with the reference's programs
)

// built is where our programs are.
var built string

// cniPath is the directory that CNI_PATH names in all tests: links to the plugin, to
// the reference's programs, and to this test program as an IPAM plugin.
var cniPath string

func TestMain(m *testing.M) {
	fault.Main()
	if filepath.Base(os.Args[0]) == fakeIPAM {
		os.Exit(runFakeIPAM())
	}
	if filepath.Base(os.Args[0]) == monitorName {
		os.Exit(runMonitor())
	}
	if filepath.Base(os.Args[0]) == lookerName {
		os.Exit(runLooker())
	}
	flag.Parse()
	dir, err := os.MkdirTemp("", "tombolo-test-")
	if err == nil {
		cniPath = dir
		err = fillPath(dir)
	}
	code := 1
	if err == nil {
		code = m.Run()
	}
	if err := errors.Join(err, os.RemoveAll(dir)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// The reference's programs that tests run.
func peers() []string { return []string{"bridge", "host-local", "cnitool"} }

func fillPath(dir string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if built, err = findPrograms(dir); err != nil {
		return err
	}
	reference, err := findPeers(dir)
	if err != nil {
		return err
	}
	links := map[string]string{fakeIPAM: self, "tombolo": filepath.Join(built, "tombolo-cni")}
	for _, name := range peers() {
		links[name] = filepath.Join(reference, name)
	}
	for name, target := range links {
		if _, err := os.Stat(target); err != nil {
			return err
		}
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

func findPrograms(dir string) (string, error) {
	if path := os.Getenv(binVar); path != "" {
		return filepath.Abs(path)
	}
	path := filepath.Join(dir, "built")
	return path, build("make", "-C", "../..", "-s", "build", "BIN="+path)
}

func findPeers(dir string) (string, error) {
	if path := os.Getenv(peersVar); path != "" {
		return filepath.Abs(path)
	}
	path := filepath.Join(dir, "peers")
	return path, build("go", "build", "-C", "../../bench/peers", "-o", path+"/",
		"github.com/containernetworking/plugins/plugins/main/bridge",
		"github.com/containernetworking/plugins/plugins/ipam/host-local",
		"github.com/containernetworking/plugins/plugins/meta/portmap",
		"github.com/containernetworking/plugins/plugins/meta/firewall",
		"github.com/containernetworking/plugins/plugins/meta/bandwidth",
		"github.com/containernetworking/cni/cnitool")
}

func build(name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return nil
}

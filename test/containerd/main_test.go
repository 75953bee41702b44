package containerd

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
)

// Where the programs under test are. Unset, they are built.
const (
	binVar   = "TOMBOLO_BIN"   // a directory: the plugin tombolo-cni, the keeper tombolod
	peersVar = "TOMBOLO_PEERS" // a directory with the reference's programs
)

// Where nodes find what TestMain builds for them.
var (
	binDir     string // the CNI plugins
	keeper     string // tombolod
	pauseImage string // an archive with the image of the pods
)

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == initName {
		os.Exit(runInit(os.Args[1:]))
	}
	flag.Parse()
	dir, err := os.MkdirTemp("", "tombolo-test-")
	if err == nil {
		err = build(dir)
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

func build(dir string) error {
	binDir = filepath.Join(dir, "bin")
	if err := os.Mkdir(binDir, 0o755); err != nil {
		return err
	}
	built := os.Getenv(binVar)
	if built == "" {
		built = filepath.Join(dir, "built")
		if out, err := exec.Command("make", "-C", "../..", "-s", "build", "BIN="+built).CombinedOutput(); err != nil {
			return fmt.Errorf("make build: %w\n%s", err, out)
		}
	}
	keeper = filepath.Join(built, "tombolod")
	if err := provide("tombolo", filepath.Join(built, "tombolo-cni")); err != nil {
		return err
	}
	// containerd before 2.0 has no other way to set a pod's loopback interface up.
	loopback := filepath.Join(os.Getenv(peersVar), "loopback")
	if os.Getenv(peersVar) == "" {
		loopback = filepath.Join(dir, "loopback")
		if err := goBuild("-C", "../../bench/peers", "-o", loopback, "github.com/containernetworking/plugins/plugins/main/loopback"); err != nil {
			return err
		}
	}
	if err := provide("loopback", loopback); err != nil {
		return err
	}
	pause := filepath.Join(dir, "pause")
	if err := goBuild("-o", pause, "./pause"); err != nil {
		return err
	}
	pauseImage = pause + ".tar"
	return writeImage(pauseImage, pause)
}

func provide(name, built string) error {
	path, err := filepath.Abs(built)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		return err
	}
	return os.Symlink(path, filepath.Join(binDir, name))
}

// goBuild builds a static program, as it is shipped.
func goBuild(args ...string) error {
	var chdir []string
	if args[0] == "-C" { // which has to be the first flag
		chdir, args = args[:2], args[2:]
	}
	args = append([]string{"-trimpath", "-ldflags", "-s -w"}, args...)
	cmd := exec.Command("go", append(append([]string{"build"}, chdir...), args...)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return nil
}

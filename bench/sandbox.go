package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/netns"
)

// inSandbox is the first argument of the process that measures, a directory on a disk
// the second. Its parent only starts it, in a network and a mount namespace of its
// own, passes its exit status on, and removes the directory.
const inSandbox = "in-sandbox"

// enterSandbox runs this program again in namespaces of its own and returns its
// exit status. Whatever happens in there, a kill included, ends with the namespaces.
func enterSandbox(records string, args []string) (int, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, fmt.Errorf("find own executable: %w", err)
	}
	child := exec.Command(self, append([]string{inSandbox, records}, args...)...)
	child.Stdin, child.Stdout, child.Stderr = os.Stdin, os.Stdout, os.Stderr
	child.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS}
	// A signal from the terminal reaches both processes; this one has to tidy up.
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, unix.SIGINT, unix.SIGTERM)
	if err = child.Start(); err == nil {
		go func() {
			<-interrupted
			_ = child.Process.Kill()
		}()
		err = child.Wait()
	}
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return max(exit.ExitCode(), 1), nil
	}
	if errors.Is(err, unix.EPERM) {
		return 0, fmt.Errorf("enter namespaces of its own: %w (run it as root)", err)
	}
	return 0, err
}

// prepareSandbox gives the process a /run of its own, where namespaces, state and
// the locks of iptables go, and returns the directory to work in.
func prepareSandbox() (string, error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return "", fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("tombolo-bench", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
		return "", fmt.Errorf("mount /run: %w", err)
	}
	return "/run", nil
}

// namedNS is a network namespace with a path, as runtimes give pods.
type namedNS struct {
	*netns.NS
	path string
}

func newNS(path string) (namedNS, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return namedNS{}, err
	}
	ns, err := netns.New()
	if err != nil {
		return namedNS{}, err
	}
	err = os.WriteFile(path, nil, 0o444)
	if err == nil {
		err = unix.Mount("/proc/self/fd/"+strconv.Itoa(ns.FD()), path, "", unix.MS_BIND, "")
	}
	if err != nil {
		return namedNS{}, errors.Join(fmt.Errorf("name namespace %s: %w", path, err), ns.Close())
	}
	return namedNS{NS: ns, path: path}, nil
}

// links lists the names of a namespace's interfaces, sorted.
func (n namedNS) links() ([]string, error) {
	var names []string
	err := n.Do(func() error {
		interfaces, err := net.Interfaces()
		for _, i := range interfaces {
			names = append(names, i.Name)
		}
		return err
	})
	slices.Sort(names)
	return names, err
}

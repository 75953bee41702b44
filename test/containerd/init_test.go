package containerd

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// initName is the name by which the test program is a node's first process: that of
// its process namespace, with which all others end.
const initName = "tombolo-node-init"

// What a node's first process is told to do, each by a line on its standard input.
// It answers with a line: done, or why not. When the input ends, as it does with the
// test however that ends, so does the node.
const (
	startContainerd = "start"
	killContainerd  = "kill" // with SIGKILL
	done            = "done"
)

// nodeInit is the first process of a node. All of it runs in one goroutine, so that
// children are waited for in one place at a time.
type nodeInit struct {
	dir    string // the node's, see node
	daemon int    // containerd's process ID; 0: it does not run
}

func runInit(args []string) int {
	p := &nodeInit{dir: args[0]}
	exited := make(chan os.Signal, 1)
	signal.Notify(exited, unix.SIGCHLD)
	lines := readLines()
	answer(p.isolate())
	for {
		select {
		case <-exited:
			p.reap()
		case line, ok := <-lines:
			if !ok {
				return p.end()
			}
			answer(p.obey(line))
		}
	}
}

func readLines() <-chan string {
	lines := make(chan string)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(os.Stdin); s.Scan(); {
			lines <- s.Text()
		}
	}()
	return lines
}

func answer(err error) {
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(done)
}

// isolate hides the real machine's directories that containerd, its shims and the
// plugins write to, whatever their configuration says.
func (p *nodeInit) isolate() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	for _, m := range []struct{ kind, path string }{
		{"proc", "/proc"},
		{"tmpfs", "/run"},     // the plugin's state, names of namespaces, the shims' sockets
		{"tmpfs", "/var/lib"}, // what libcni remembers
	} {
		if err := unix.Mount(m.kind, m.path, m.kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s at %s: %w", m.kind, m.path, err)
		}
	}
	return nil
}

func (p *nodeInit) obey(line string) error {
	switch {
	case line == startContainerd && p.daemon == 0:
		return p.start()
	case line == killContainerd && p.daemon != 0:
		return p.kill()
	}
	return fmt.Errorf("cannot %s: containerd is process %d", line, p.daemon)
}

func (p *nodeInit) start() error {
	path, err := exec.LookPath("containerd")
	if err != nil {
		return err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	log, err := os.OpenFile(filepath.Join(p.dir, logName), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	// Not by package os, which would wait for its children on its own.
	p.daemon, err = syscall.ForkExec(path, []string{"containerd", "--config", filepath.Join(p.dir, configName)}, &syscall.ProcAttr{
		Env:   append(os.Environ(), "TMPDIR="+filepath.Join(p.dir, tempName)),
		Files: []uintptr{null.Fd(), log.Fd(), log.Fd()},
	})
	return err
}

func (p *nodeInit) kill() error {
	if err := unix.Kill(p.daemon, unix.SIGKILL); err != nil {
		return err
	}
	_, err := unix.Wait4(p.daemon, nil, 0, nil)
	p.daemon = 0
	return err
}

// reap waits for the children that have ended, most of which are orphans.
func (p *nodeInit) reap() {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		if pid <= 0 || err != nil {
			return
		}
		if pid == p.daemon {
			p.daemon = 0
		}
	}
}

// end ends all other processes, which then hold no control group any more.
func (p *nodeInit) end() int {
	err := unix.Kill(-1, unix.SIGKILL) // all but the caller
	for {
		if _, waitErr := unix.Wait4(-1, nil, 0, nil); waitErr == unix.ECHILD {
			break
		}
	}
	if err == unix.ESRCH {
		err = nil
	}
	if err := errors.Join(err, removeCgroups(cgroupOf(p.dir))); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func cgroupOf(dir string) string { return "/" + filepath.Base(dir) }

// removeCgroups removes a control group and those below it in all hierarchies.
func removeCgroups(name string) error {
	const root = "/sys/fs/cgroup"
	hierarchies, err := filepath.Glob(root + "/*" + name)
	var all []error
	for _, top := range append(hierarchies, root+name) {
		var dirs []string
		err = errors.Join(err, filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // another name of a hierarchy that is done, or one without it
			}
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return err
		}))
		for i := len(dirs) - 1; i >= 0; i-- { // those below come first
			all = append(all, os.Remove(dirs[i]))
		}
	}
	return errors.Join(append(all, err)...)
}

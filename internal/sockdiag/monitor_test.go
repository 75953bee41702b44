package sockdiag

import (
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// monitorVar has this program wait for the end of its standard input, in the place of
// conmon.
const monitorVar = "TOMBOLO_TEST_MONITOR"

// monitor runs that under another name, with the socket as descriptor 3 if there is one, and gives the process.
func monitor(t *testing.T, program string, socket *os.File, name string, change func(*exec.Cmd), args ...string) int {
	t.Helper()
	dir := filepath.Join(filepath.Dir(program), strings.ReplaceAll(t.Name(), "/", "-"))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, name)
	if err := os.Link(program, path); err != nil {
		t.Fatal(err)
	}
	cmd := &exec.Cmd{Path: path, Args: append([]string{name}, args...), Env: append(os.Environ(), monitorVar+"=1")}
	if socket != nil {
		cmd.ExtraFiles = []*os.File{socket}
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(cmd)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	// It runs, and has the socket.
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid
}

// copySelf puts a copy of this program where everybody can run it.
func copySelf(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "monitor")
	if err == nil {
		t.Cleanup(func() { os.RemoveAll(dir) })
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		syscall.ForkLock.RLock() // a child would have it open for writing (ETXTBSY)
		err = os.WriteFile(filepath.Join(dir, "program"), data, 0o755)
		syscall.ForkLock.RUnlock()
	}
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "program")
}

const containerID = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func TestASocketOfTheContainersMonitorIsKnown(t *testing.T) {
	nstest.RequireRoot(t)
	program := copySelf(t)
	for _, tt := range []struct {
		name, program string
		args          []string
		change        func(*exec.Cmd)
		shared        bool   // another process has the socket too
		starter       bool   // this process, which started it, has the socket too
		without       bool   // the process itself has not
		pidFile       string // names the process, in this directory of nerdctl's
		id            string // instead of containerID
		want          bool
	}{
		{name: "the monitor", program: "conmon", args: []string{"--api-version", "1", "-c", containerID, "-u", containerID}, want: true},
		{name: "another container's", program: "conmon", args: []string{"-c", strings.Repeat("f", 64), "-u", containerID}},
		{name: "a short ID", program: "conmon", args: []string{"-c", containerID[:12]}},
		{name: "a longer one", program: "conmon", args: []string{"-c", containerID + "0"}},
		{name: "the ID elsewhere", program: "conmon", args: []string{"-u", containerID}},
		{name: "another program", program: "nginx", args: []string{"-c", containerID}},
		{name: "a name that begins so", program: "conmonitor", args: []string{"-c", containerID}},
		{name: "not root's", program: "conmon", args: []string{"-c", containerID}, change: func(cmd *exec.Cmd) {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		}},
		{name: "in a PID namespace of its own", program: "conmon", args: []string{"-c", containerID}, change: func(cmd *exec.Cmd) {
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
		}},
		{name: "in a user namespace of its own", program: "conmon", args: []string{"-c", containerID}, change: func(cmd *exec.Cmd) {
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, Credential: &syscall.Credential{},
				UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 1}},
				GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 1}}, GidMappingsEnableSetgroups: true}
		}},
		{name: "the host's root in another user namespace", program: "conmon", args: []string{"-c", containerID}, change: func(cmd *exec.Cmd) {
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER,
				UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}}}
		}},
		{name: "another has it too", program: "conmon", args: []string{"-c", containerID}, shared: true},
		{name: "what started conmon has it too", program: "conmon", args: []string{"-c", containerID}, starter: true},
		{name: "nerdctl's", program: "sleep", pidFile: "my-space/" + containerID, id: "my-space-" + containerID, want: true},
		{name: "nerdctl's, while its starter has it too", program: "sleep", pidFile: "default/" + containerID, id: "default-" + containerID, starter: true, want: true},
		{name: "the starter's alone", program: "sleep", pidFile: "default/" + containerID, id: "default-" + containerID, starter: true, without: true},
		{name: "another container's of nerdctl's", program: "sleep", pidFile: "default/" + strings.Repeat("f", 64), id: "default-" + containerID},
		{name: "another namespace's", program: "sleep", pidFile: "other/" + containerID, id: "default-" + containerID},
		{name: "nerdctl's, and another's", program: "sleep", pidFile: "default/" + containerID, id: "default-" + containerID, starter: true, shared: true},
		{name: "nerdctl's in a PID namespace", program: "sleep", pidFile: "default/" + containerID, id: "default-" + containerID, change: func(cmd *exec.Cmd) {
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				t.Fatal(err)
			}
			file, err := l.File()
			if err != nil {
				t.Fatal(err)
			}
			var st unix.Stat_t
			if err := unix.Fstat(int(file.Fd()), &st); err != nil {
				t.Fatal(err)
			}
			has := file
			if tt.without {
				has = nil
			}
			pid := monitor(t, program, has, tt.program, tt.change, tt.args...)
			if tt.shared {
				monitor(t, program, file, "nginx", nil)
			}
			nerdctl := t.TempDir()
			if tt.pidFile != "" {
				path := filepath.Join(nerdctl, tt.pidFile, "port-reserver.pid")
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(strconv.Itoa(pid)), 0o644)); err != nil {
					t.Fatal(err)
				}
			}
			// Ours are not to be in its hands, unless this process stands for the one that started it.
			if !tt.starter {
				file.Close()
				l.Close()
			} else {
				defer file.Close()
				defer l.Close()
			}
			if _, _, found := Process(uint32(st.Ino)); !found {
				t.Fatal("nobody has the socket")
			}
			id := containerID
			if tt.id != "" {
				id = tt.id
			}
			inode := uint32(st.Ino)
			if got := heldByMonitor("/proc", nerdctl, []Socket{{Inode: inode}, {Inode: 1}}, id); got[inode] != tt.want || got[1] {
				t.Errorf("got %v of %d, want %t", got, inode, tt.want)
			}
			for _, got := range []map[uint32]bool{HeldByMonitor([]Socket{{UID: 1000, Inode: inode}}, id), HeldByMonitor([]Socket{{Inode: inode}}, ""), HeldByMonitor([]Socket{{}}, id)} {
				if len(got) != 0 {
					t.Errorf("what cannot be a monitor's is taken for one's: %v", got)
				}
			}
		})
	}
}

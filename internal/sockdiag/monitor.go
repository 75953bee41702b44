package sockdiag

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// HeldByMonitor says whether a container's own monitor has the socket, and no other
// process: podman has conmon keep a container's ports for as long as it runs, so
// that no other program gets them. Such a process is root's, runs an executable
// named conmon, has the container's full ID as its argument -c, and is in our PID and
// user namespaces, so that no container can pass for one. It reads all of /proc.
func (s Socket) HeldByMonitor(containerID string) bool {
	return s.UID == 0 && containerID != "" && heldByMonitor("/proc", s.Inode, containerID)
}

func heldByMonitor(root string, inode uint32, containerID string) bool {
	if inode == 0 {
		return false
	}
	want := fmt.Sprintf("socket:[%d]", inode)
	held := false
	for _, pid := range pids(root) {
		dir := filepath.Join(root, strconv.Itoa(pid))
		if !hasOpen(filepath.Join(dir, "fd"), want) {
			continue
		}
		if !isMonitor(root, dir, containerID) {
			return false
		}
		held = true
	}
	return held
}

func isMonitor(root, dir, containerID string) bool {
	exe, err := os.Readlink(filepath.Join(dir, "exe"))
	if err != nil || filepath.Base(exe) != "conmon" {
		return false
	}
	// Root of a container's own user namespace has another number here.
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil || st.Uid != 0 {
		return false
	}
	for _, kind := range []string{"pid", "user"} {
		own, ownErr := os.Readlink(filepath.Join(root, "self", "ns", kind))
		theirs, err := os.Readlink(filepath.Join(dir, "ns", kind))
		if err != nil || ownErr != nil || own != theirs {
			return false
		}
	}
	line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	return err == nil && argument(line, "-c") == containerID
}

// argument gives what follows an option on a command line for the first time.
func argument(line []byte, option string) string {
	args := strings.Split(string(bytes.TrimSuffix(line, []byte{0})), "\x00")
	for i := 1; i+1 < len(args); i++ {
		if args[i] == option {
			return args[i+1]
		}
	}
	return ""
}

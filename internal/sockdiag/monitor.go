package sockdiag

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// HeldByMonitor gives, by their inodes, those of the sockets that a container's own monitor has,
// and no other process. A monitor keeps a container's ports for as long as it runs, so that no
// other program gets them, and serves nothing there:
//   - podman's is conmon: it has the container's full ID as its argument -c.
//   - nerdctl's since version 2.1.6 is a sleep, whose number is in a file of the container's in /run/nerdctl. The
//     process that started it and calls the plugin meanwhile has the sockets too.
//
// Such a process is root's and in our PID and user namespaces, so that no container can pass for
// one. All of /proc is read, once.
func HeldByMonitor(sockets []Socket, containerID string) map[uint32]bool {
	return heldByMonitor("/proc", "/run/nerdctl", sockets, containerID)
}

func heldByMonitor(proc, nerdctl string, sockets []Socket, containerID string) map[uint32]bool {
	held := map[uint32]bool{} // false: nobody has it so far
	for _, s := range sockets {
		if s.UID == 0 && s.Inode != 0 {
			held[s.Inode] = false
		}
	}
	if containerID == "" || len(held) == 0 {
		return nil
	}
	reserver, starter := portReserver(proc, nerdctl, containerID)
	for _, pid := range pids(proc) {
		dir := filepath.Join(proc, strconv.Itoa(pid))
		has := openSockets(dir, held)
		if len(has) == 0 {
			continue
		}
		isMonitor := isRootHere(proc, dir) && (pid == reserver || isConmonOf(dir, containerID))
		mayShare := pid == starter && isRootHere(proc, dir)
		for _, inode := range has {
			if isMonitor {
				held[inode] = true
			} else if !mayShare {
				delete(held, inode)
			}
		}
	}
	maps.DeleteFunc(held, func(_ uint32, is bool) bool { return !is })
	return held
}

// openSockets gives the inodes of those of the wanted sockets that a process has open.
func openSockets(dir string, wanted map[uint32]bool) []uint32 {
	fds := filepath.Join(dir, "fd")
	entries, err := os.ReadDir(fds)
	if err != nil {
		return nil // the process has ended, or its files cannot be read
	}
	var list []uint32
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(fds, e.Name()))
		if err != nil {
			continue
		}
		text, isSocket := strings.CutPrefix(target, "socket:[")
		inode, err := strconv.ParseUint(strings.TrimSuffix(text, "]"), 10, 32)
		if _, is := wanted[uint32(inode)]; isSocket && err == nil && is {
			list = append(list, uint32(inode))
		}
	}
	return list
}

// portReserver gives the process that keeps the ports of a container of nerdctl's, and the one that
// started it, or 0. The container's ID is NAMESPACE-ID then, where the latter has no hyphen.
func portReserver(proc, nerdctl, containerID string) (pid, parent int) {
	i := strings.LastIndexByte(containerID, '-')
	if i < 0 {
		return 0, 0
	}
	text, err := os.ReadFile(filepath.Join(nerdctl, containerID[:i], containerID[i+1:], "port-reserver.pid"))
	if err != nil {
		return 0, 0
	}
	if pid, err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil || pid <= 0 {
		return 0, 0
	}
	// The process's name, in parentheses, may have any character, ')' too: the fields follow the last one.
	stat, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, 0
	}
	if fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])); len(fields) > 1 {
		parent, _ = strconv.Atoi(fields[1])
	}
	return pid, parent
}

// isRootHere says whether a process is root's in our PID and user namespaces.
func isRootHere(proc, dir string) bool {
	// Root of a container's own user namespace has another number here.
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil || st.Uid != 0 {
		return false
	}
	for _, kind := range []string{"pid", "user"} {
		own, ownErr := os.Readlink(filepath.Join(proc, "self", "ns", kind))
		theirs, err := os.Readlink(filepath.Join(dir, "ns", kind))
		if err != nil || ownErr != nil || own != theirs {
			return false
		}
	}
	return true
}

func isConmonOf(dir, containerID string) bool {
	exe, err := os.Readlink(filepath.Join(dir, "exe"))
	if err != nil || filepath.Base(exe) != "conmon" {
		return false
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

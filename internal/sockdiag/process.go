package sockdiag

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// InUse names the program that has the socket, in a line for the operator: "127.0.0.1:8080/tcp is in
// use by nginx (pid 4711)", or "by conmon (pid 4711) for container 0123456789ab" where the port is that
// container's. It is as expensive as Process.
func (s Socket) InUse() string {
	if pid, name, ok := Process(s.Inode); ok {
		return fmt.Sprintf("%s is in use by %s (pid %d)%s", s, name, pid, publishedFor(pid, name))
	}
	return fmt.Sprintf("%s is in use by the kernel, or by a process that cannot be seen from here (user %d, socket %d)", s, s.UID, s.Inode)
}

// publishedFor says for whom a program has a port that does so for containers.
func publishedFor(pid int, name string) string {
	switch name {
	case "conmon":
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if id := argument(line, "-c"); err == nil && id != "" {
			return " for container " + printable(id[:min(len(id), 12)])
		}
	case "docker-proxy", "rootlessport", "rootlesskit", "slirp4netns", "pasta":
		return " for a container"
	}
	return ""
}

// Process finds a process that has a socket open, by the socket's inode. Of several,
// it is the one with the lowest number, which in general started the others. It is
// for messages: it reads all of /proc, and finds nothing without the right to
// (CAP_SYS_PTRACE), of processes outside of our PID namespace, and of sockets that
// only the kernel has.
func Process(inode uint32) (pid int, name string, ok bool) { return process("/proc", inode) }

func process(root string, inode uint32) (pid int, name string, ok bool) {
	if inode == 0 {
		return 0, "", false
	}
	want := fmt.Sprintf("socket:[%d]", inode)
	for _, pid := range pids(root) {
		dir := filepath.Join(root, strconv.Itoa(pid))
		if !hasOpen(filepath.Join(dir, "fd"), want) {
			continue
		}
		// One that has ended meanwhile has no name, and the socket no longer.
		if comm, err := os.ReadFile(filepath.Join(dir, "comm")); err == nil {
			return pid, printable(strings.TrimSuffix(string(comm), "\n")), true
		}
	}
	return 0, "", false
}

// pids gives the processes in order.
func pids(root string) []int {
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil
	}
	var list []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && pid > 0 {
			list = append(list, pid)
		}
	}
	sort.Slice(list, func(i, j int) bool { return list[i] < list[j] })
	return list
}

func hasOpen(dir, want string) bool {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false // not ours to read, or gone
	}
	return slices.ContainsFunc(entries, func(e os.DirEntry) bool {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		return err == nil && target == want
	})
}

// printable quotes a name that a process gave itself to confuse a terminal.
func printable(name string) string {
	if quoted := strconv.Quote(name); quoted != `"`+name+`"` || name == "" {
		return quoted
	}
	return name
}

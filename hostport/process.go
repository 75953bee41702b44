package hostport

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// String returns a line for the operator with the socket's address, link and program. Examples:
//
//	127.0.0.1:8080/tcp is in use by nginx (pid 4711)
//	0.0.0.0:67/udp on virbr0 is in use by dnsmasq (pid 4711)
//	0.0.0.0:80/tcp is in use by conmon (pid 4711) for container 0123456789ab
//
// String searches all of /proc for the program. For programs of other users, it needs CAP_SYS_PTRACE. It finds no
// program if the process is outside of our PID namespace, or if the kernel itself has opened the socket.
func (l Listener) String() string {
	text := l.Local.String() + "/" + l.Protocol.String()
	if l.Link != "" {
		text += " on " + l.Link
	}

	text += " is in use by "
	for _, pid := range processes() {
		if !slices.Contains(openFiles(pid), l.file()) {
			continue
		}

		// Skip a process that has just ended. It has no name, and no longer has the socket.
		if name, err := os.ReadFile(filepath.Join(procDir, pid, "comm")); err == nil {
			text += fmt.Sprintf("%s (pid %s)", strings.TrimSuffix(string(name), "\n"), pid)
			if id := conmonsContainer(pid); id != "" {
				text += " for container " + id[:min(len(id), 12)]
			}
			return text
		}
	}

	return text + fmt.Sprintf("the kernel, or by a process that cannot be seen from here (socket %d)", l.inode)
}

// NotHeldFor returns the listeners except those that only reserve a container's ports for its runtime. These are:
//   - sockets of podman's conmon, whose argument -c is the container's full ID
//   - sockets of podman 5, if podman called netavark, and netavark called this process. Podman passes the sockets to
//     conmon later.
//   - sockets of nerdctl since version 2.1.6. A sleep process holds them. Its PID is in a file of the container in
//     /run/nerdctl.
func NotHeldFor(containerID string, listeners []Listener) []Listener {
	if containerID == "" || len(listeners) == 0 {
		return listeners
	}

	// Nerdctl's container IDs have the form NAMESPACE-ID. The ID has no hyphen.
	namespace, id := "", containerID
	if i := strings.LastIndexByte(containerID, '-'); i >= 0 {
		namespace, id = containerID[:i], containerID[i+1:]
	}

	text, _ := os.ReadFile(filepath.Join("/run/nerdctl", namespace, id, "port-reserver.pid"))
	reserver, podman := strings.TrimSpace(string(text)), callingPodman()

	reserved := map[string]bool{}
	for _, pid := range processes() {
		if pid == reserver || pid == podman || conmonsContainer(pid) == containerID {
			for _, file := range openFiles(pid) {
				reserved[file] = true
			}
		}
	}

	return slices.DeleteFunc(slices.Clone(listeners), func(l Listener) bool { return reserved[l.file()] })
}

const procDir = "/proc"

// file returns the name of the socket in /proc/PID/fd.
func (l Listener) file() string { return fmt.Sprintf("socket:[%d]", l.inode) }

// processes returns the PIDs of all processes in ascending order. A parent usually has a lower PID than its children,
// so it comes first.
func processes() []string {
	list, _ := filepath.Glob(procDir + "/[0-9]*")
	for i, dir := range list {
		list[i] = filepath.Base(dir)
	}
	slices.SortFunc(list, func(a, b string) int { return cmp.Or(len(a)-len(b), strings.Compare(a, b)) })
	return list
}

// openFiles returns the names of the files that a process has open, as in /proc/PID/fd.
func openFiles(pid string) []string {
	dir := filepath.Join(procDir, pid, "fd")
	entries, _ := os.ReadDir(dir)
	var list []string
	for _, e := range entries {
		if target, err := os.Readlink(dir + "/" + e.Name()); err == nil {
			list = append(list, target)
		}
	}
	return list
}

// callingPodman returns the PID of the podman process that started our parent process, or "" if there is none.
func callingPodman() string {
	stat, _ := os.ReadFile(filepath.Join(procDir, strconv.Itoa(os.Getppid()), "stat")) // PID (COMMAND) STATE PARENT
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 2 {
		return ""
	}
	if exe, err := os.Readlink(filepath.Join(procDir, fields[1], "exe")); err != nil || filepath.Base(exe) != "podman" {
		return ""
	}
	return fields[1]
}

// conmonsContainer returns the container ID on the command line of a conmon process. For other programs, it returns
// "".
func conmonsContainer(pid string) string {
	exe, err := os.Readlink(filepath.Join(procDir, pid, "exe"))
	if err != nil || filepath.Base(exe) != "conmon" {
		return ""
	}
	line, _ := os.ReadFile(filepath.Join(procDir, pid, "cmdline"))
	args := strings.Split(string(bytes.TrimSuffix(line, []byte{0})), "\x00")
	if i := slices.Index(args, "-c"); i >= 0 && i+1 < len(args) {
		return args[i+1]
	}
	return ""
}

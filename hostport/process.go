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

// String names the address, the link that the socket is bound to, and the program, in a line for the operator:
// "127.0.0.1:8080/tcp is in use by nginx (pid 4711)", "0.0.0.0:67/udp on virbr0 is in use by dnsmasq (pid 4711)", or "…
// by conmon (pid 4711) for container 0123456789ab". It reads all of /proc, and finds nothing without the right to
// (CAP_SYS_PTRACE), of processes outside of our PID namespace, and of sockets that only the kernel has.
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
		// One that has ended meanwhile has no name, and the socket no longer.
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

// NotHeldFor leaves out the sockets by which a runtime reserves a container's ports without serving them:
//   - podman's conmon: it has the container's full ID as its argument -c.
//   - podman 5 itself, which has called netavark, and that this process: it hands the sockets over to conmon later.
//   - nerdctl's since version 2.1.6: a sleep, whose number is in a file of the container's in /run/nerdctl.
func NotHeldFor(containerID string, listeners []Listener) []Listener {
	if containerID == "" || len(listeners) == 0 {
		return listeners
	}
	// The container's ID is NAMESPACE-ID with nerdctl, where the latter has no hyphen.
	namespace, id := "", containerID
	if i := strings.LastIndexByte(containerID, '-'); i >= 0 {
		namespace, id = containerID[:i], containerID[i+1:]
	}
	text, _ := os.ReadFile(filepath.Join("/run/nerdctl", namespace, id, "port-reserver.pid"))
	reserver, podman := strings.TrimSpace(string(text)), callingPodman()

	held := map[string]bool{}
	for _, pid := range processes() {
		if pid == reserver || pid == podman || conmonsContainer(pid) == containerID {
			for _, file := range openFiles(pid) {
				held[file] = true
			}
		}
	}
	return slices.DeleteFunc(slices.Clone(listeners), func(l Listener) bool { return held[l.file()] })
}

const procDir = "/proc"

// file is the socket as /proc names the files that a process has open.
func (l Listener) file() string { return fmt.Sprintf("socket:[%d]", l.inode) }

// processes lists the numbers of all processes, low ones first: these in general started the others.
func processes() []string {
	list, _ := filepath.Glob(procDir + "/[0-9]*")
	for i, dir := range list {
		list[i] = filepath.Base(dir)
	}
	slices.SortFunc(list, func(a, b string) int { return cmp.Or(len(a)-len(b), strings.Compare(a, b)) })
	return list
}

// openFiles lists the files that a process has open.
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

// callingPodman returns the number of the podman that called the program that called this one, or "".
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

// conmonsContainer is the container's ID on the command line of a conmon; empty for another program.
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

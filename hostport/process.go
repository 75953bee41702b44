package hostport

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tombolo-cni/tombolo/nft"
)

// String names the program that has the port, in a line for the operator: "127.0.0.1:8080/tcp is in use by nginx
// (pid 4711)", or "by conmon (pid 4711) for container 0123456789ab". It reads all of /proc, and finds nothing without
// the right to (CAP_SYS_PTRACE), of processes outside of our PID namespace, and of sockets that only the kernel has.
func (l Listener) String() string {
	text := nft.Port{Protocol: l.Protocol, HostAddr: l.Local.Addr(), HostPort: l.Local.Port()}.String() + " is in use by "
	for _, pid := range holders(l.inode) {
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
	// The container's ID is NAMESPACE-ID with nerdctl, where the latter has no hyphen.
	namespace, id := "", containerID
	if i := strings.LastIndexByte(containerID, '-'); i >= 0 {
		namespace, id = containerID[:i], containerID[i+1:]
	}
	text, _ := os.ReadFile(filepath.Join("/run/nerdctl", namespace, id, "port-reserver.pid"))
	reserver := strings.TrimSpace(string(text))
	return slices.DeleteFunc(slices.Clone(listeners), func(l Listener) bool {
		return containerID != "" && slices.ContainsFunc(holders(l.inode), func(pid string) bool {
			return pid == reserver || conmonsContainer(pid) == containerID || isCallingPodman(pid)
		})
	})
}

const procDir = "/proc"

// holders are the processes that have a socket open, those with low numbers first: these in general started the others.
func holders(inode uint32) []string {
	if inode == 0 {
		return nil
	}
	processes, _ := filepath.Glob(procDir + "/[0-9]*")
	var list []string
	for _, dir := range processes {
		if hasOpen(filepath.Join(dir, "fd"), fmt.Sprintf("socket:[%d]", inode)) {
			list = append(list, filepath.Base(dir))
		}
	}
	number := func(pid string) int { n, _ := strconv.Atoi(pid); return n }
	slices.SortFunc(list, func(a, b string) int { return number(a) - number(b) })
	return list
}

func hasOpen(dir, want string) bool {
	entries, _ := os.ReadDir(dir)
	return slices.ContainsFunc(entries, func(e os.DirEntry) bool {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		return err == nil && target == want
	})
}

// isCallingPodman says whether a process is the podman that had this one called.
func isCallingPodman(pid string) bool {
	exe, err := os.Readlink(filepath.Join(procDir, pid, "exe"))
	stat, _ := os.ReadFile(filepath.Join(procDir, strconv.Itoa(os.Getppid()), "stat")) // PID (COMMAND) STATE PARENT
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	return err == nil && filepath.Base(exe) == "podman" && len(fields) > 1 && fields[1] == pid
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

package hostport

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// podman 5 binds a container's ports, and then calls netavark, which calls the plugin.
func TestThePodmanThatCallsHoldsItsContainersPorts(t *testing.T) {
	t.Parallel()
	program := must.Of(os.Executable()).Get(t)
	for name, left := range map[string]string{"podman": "0", "nginx": "1"} {
		path := filepath.Join(t.TempDir(), name)
		// By another process: a child of a test beside this one would inherit what it is written by, and nothing can be
		// started that is open for writing (ETXTBSY).
		must.Succeed(t, exec.Command("install", "-m", "755", program, path).Run())
		cmd := exec.Command(path, "-test.run", "^TestAPodmanAndItsPlugin$")
		cmd.Env = append(os.Environ(), role+"=podman")
		out, err := cmd.CombinedOutput()
		must.That(t, err == nil, "%v: %s", err, out)
		expect.Contains(t, string(out), "conflicts: "+left+"\n", "%s", name)
	}
}

// role is what the program of TestAPodmanAndItsPlugin is: podman, or a plugin that is told the inode of podman's socket.
const role = "HOSTPORT_ROLE"

func TestAPodmanAndItsPlugin(t *testing.T) {
	switch is := os.Getenv(role); is {
	case "":
	case "podman":
		listener := must.Of(net.Listen("tcp", "127.0.0.1:0")).Get(t)
		defer listener.Close()
		file := must.Of(listener.(*net.TCPListener).File()).Get(t)
		defer file.Close()
		target := must.Of(os.Readlink(fmt.Sprintf("/proc/self/fd/%d", file.Fd()))).Get(t)
		netavark := exec.Command("sh", "-c", `"$0" "$@"; exit $?`, "/proc/"+strconv.Itoa(os.Getpid())+"/exe", "-test.run", "^TestAPodmanAndItsPlugin$")
		netavark.Env = append(os.Environ(), role+"="+strings.Trim(target, "socket:[]"))
		out, err := netavark.CombinedOutput()
		must.That(t, err == nil, "%v: %s", err, out)
		fmt.Printf("%s", out)
	default:
		inode := must.Of(strconv.ParseUint(is, 10, 32)).Get(t)
		fmt.Printf("conflicts: %d\n", len(NotHeldFor("c1", []Listener{{inode: uint32(inode)}})))
	}
}

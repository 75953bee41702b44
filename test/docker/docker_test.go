package docker

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 3 && filepath.IsAbs(os.Args[1]):
		fmt.Fprintln(os.Stderr, proxy(os.Args[1], os.Args[2]))
		os.Exit(1)
	case len(os.Args) > 3 && os.Args[1] == "activate":
		fmt.Fprintln(os.Stderr, activate(os.Args[2], os.Args[3:]))
		os.Exit(1)
	case len(os.Args) > 2 && os.Args[1] == "activated":
		os.Setenv("LISTEN_PID", strconv.Itoa(os.Getpid()))
		fmt.Fprintln(os.Stderr, unix.Exec(os.Args[2], os.Args[2:], os.Environ()))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func TestContainerIsAMachineOfTheLAN(t *testing.T)        { lab(t, "lan") }
func TestNamesAndMACsKeepTheirLease(t *testing.T)         { lab(t, "names") }
func TestGatewayNetworksAndPorts(t *testing.T)            { lab(t, "gateway") }
func TestContainersOnTheLANAndOnTheNode(t *testing.T)     { lab(t, "several") }
func TestIPv6ByTheRoutersOfTheLAN(t *testing.T)           { lab(t, "six") }
func TestDocsCommands(t *testing.T)                       { lab(t, "docs") }
func TestSystemdHasTheSocket(t *testing.T)                { lab(t, "socket") }
func TestContainersComeBackWhateverRestarts(t *testing.T) { lab(t, "restarts") }

func TestAContainerFollowsItsLease(t *testing.T)             { long(t); lab(t, "moves") }
func TestFiftyContainersAtOnce(t *testing.T)                 { long(t); lab(t, "crowd") }
func TestDockerdAndTombolodAreKilledAtEachCall(t *testing.T) { long(t); lab(t, "kills") }
func TestPortsBesideDocker(t *testing.T)                     { long(t); lab(t, "ports") } // make bench keeps its lines

// long keeps a test for test/long.sh.
func long(t *testing.T) {
	t.Helper()
	if os.Getenv("TOMBOLO_LONG") == "" {
		t.Skip("test/long.sh has it")
	}
}

// lab runs a script of testdata. TOMBOLO_DOCKER_ROOT is a root of another distribution's, with its Docker, to run it in;
// TOMBOLO_DOCKERD another dockerd.
func lab(t *testing.T, name string) {
	t.Parallel()
	nstest.RequireRoot(t)
	bin := must.Of(programs()).Get(t)
	root := os.Getenv("TOMBOLO_DOCKER_ROOT")
	data := must.Of(os.MkdirTemp(root+"/var/tmp", "tombolo-docker-")).Get(t)
	t.Cleanup(func() { os.RemoveAll(data) })
	for _, from := range []string{must.Of(os.Executable()).Get(t), bin + "/tombolo", bin + "/tombolod", bin + "/tombolo-cni", "testdata/lab.sh", "testdata/" + name + ".sh",
		"../../README.md", "../../docs/lan.md", "../../docs/getting-started.md", "../../docs/coming-from.md", "../../deploy/release/archive.sh"} {
		// Read here, they count for the go command's cache of results.
		must.Succeed(t, os.WriteFile(filepath.Join(data, filepath.Base(from)), must.Of(os.ReadFile(from)).Get(t), 0o700))
	}
	inside := strings.TrimPrefix(data, root)
	must.Succeed(t, os.Mkdir(data+"/data", 0o700))
	args := []string{"--mount", "--pid", "--net", "--uts", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"}
	shell := fmt.Sprintf("exec bash %s/lab.sh %s/%s.sh", inside, inside, name)
	if root != "" {
		// Docker's runtime leaves a chroot.
		shell = fmt.Sprintf("cd %s && mount --bind . . && cd %s && for d in proc sys dev; do mount --rbind /$d $d; done; pivot_root . mnt && umount -l /mnt && exec bash %s/lab.sh %s/%s.sh", root, root, inside, inside, name)
	}
	cmd := exec.Command("unshare", append(args, "bash", "-c", shell)...)
	cmd.Env = append(os.Environ(), "BIN="+inside, "DATA="+inside+"/data", "PROXY="+inside+"/"+filepath.Base(os.Args[0]), "DOCKERD="+os.Getenv("TOMBOLO_DOCKERD"))
	out, err := cmd.CombinedOutput()
	must.That(t, err == nil, "%v\n%s", err, out)
	t.Logf("\n%s", out)
}

// programs is the directory of the programs under test.
func programs() (string, error) {
	if path := os.Getenv("TOMBOLO_BIN"); path != "" {
		return filepath.Abs(path)
	}
	dir, err := filepath.Abs("../../bin")
	if err == nil {
		err = exec.Command("make", "-C", "../..", "-s", "build").Run()
	}
	return dir, err
}

// activate is a service manager: it has a socket, and starts a program with it as often as that ends.
func activate(socket string, program []string) error {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	if err != nil {
		return err
	}
	handed, err := l.File()
	if err != nil {
		return err
	}
	for {
		cmd := exec.Command(os.Args[0], append([]string{"activated"}, program...)...)
		cmd.Env = append(os.Environ(), "LISTEN_FDS=1", "LISTEN_FDNAMES=tombolo-docker.socket")
		cmd.ExtraFiles, cmd.Stderr = []*os.File{handed}, os.Stderr
		if err := cmd.Start(); err != nil {
			return err
		}
		_ = os.WriteFile("/run/tombolod.pid", []byte(strconv.Itoa(cmd.Process.Pid)), 0o600)
		_ = cmd.Wait()
		time.Sleep(time.Second)
	}
}

// proxy passes Docker's requests on to the driver. Where /run/kill names a moment ("before", "amid", "after"), a method
// and a file with a process, it kills that process at that moment of such a request, once.
func proxy(listen, driver string) error {
	l, err := net.Listen("unix", listen)
	if err != nil {
		return err
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", driver)
	}
	to := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: "driver"})
	to.Transport = &http.Transport{DialContext: dial, DisableKeepAlives: true}
	to.ErrorHandler = func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) } // as without a proxy
	to.ModifyResponse = func(r *http.Response) error {
		killAt("after", r.Request)
		return nil
	}
	return http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		killAt("before", r)
		go func() {
			time.Sleep(rand.N(60 * time.Millisecond))
			killAt("amid", r)
		}()
		to.ServeHTTP(w, r)
	}))
}

func killAt(moment string, r *http.Request) {
	text, _ := os.ReadFile("/run/kill")
	words := strings.Fields(string(text))
	if len(words) != 3 || words[0] != moment || r.URL.Path != "/NetworkDriver."+words[1] {
		return
	}
	text, _ = os.ReadFile(words[2])
	if pid, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	_ = os.Remove("/run/kill")
}

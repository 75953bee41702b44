package cni

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// withPlugin is a node whose ipam.type is the shell script body, which finds the verb in $CNI_COMMAND and its log of verbs
// is what verbs returns.
func withPlugin(t *testing.T, body string) (n *ipamNode, request *ipamRequest, verbs func() string) {
	t.Helper()
	n = newIPAMNode(t, `{"cniVersion":"1.1.0","name":"lan","ipam":{"type":"fake","own":"field"}}`)
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	script := "#!/bin/sh\necho $CNI_COMMAND >>" + log + "\n" + body
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "fake"), []byte(script), 0o755))
	request = n.request("a")
	request.Path, request.Environ, request.NetNS = dir, os.Environ(), "/run/netns/a"
	return n, request, func() string {
		data, err := os.ReadFile(log)
		must.That(t, err == nil || errors.Is(err, os.ErrNotExist), "%v", err)
		return strings.Join(strings.Fields(string(data)), " ")
	}
}

func TestADelegatedResultIsReducedToAddresses(t *testing.T) {
	t.Parallel()
	n, r, verbs := withPlugin(t, `cat >$0.stdin
echo '{"cniVersion":"0.4.0","interfaces":[{"name":"x"}],"ips":[{"version":"6","address":"fd00::5/64","interface":0},
{"version":"4","address":"10.1.0.5/24","gateway":"10.1.0.1"}],"routes":[{"dst":"0.0.0.0/0"}],"dns":{"domain":"lan"}}'`)
	result, err := n.tryAdd(r)
	must.Succeed(t, err)
	got := addressesOf(result)
	expect.That(t, got == "fd00::5,10.1.0.5" && len(result.Interfaces) == 0 && result.IPs[0].Interface == nil, "got %s, %+v", got, result)
	expect.That(t, result.CNIVersion == "1.1.0" && len(result.Routes) == 1 && result.DNS.Domain == "lan",
		"got %+v", result)
	stdin, err := os.ReadFile(filepath.Join(r.Path, "fake.stdin"))
	expect.That(t, err == nil && string(stdin) == n.conf, "stdin %s, %v", stdin, err)
	expect.Equal(t, verbs(), "ADD", "ran")
}

func TestEveryVerbIsDelegated(t *testing.T) {
	t.Parallel()
	n, r, verbs := withPlugin(t, "exit 0")
	a := n.allocator(r)
	expect.That(t, a.Slow(), "Slow takes one kind for another")
	ctx := context.Background()
	expect.Success(t, errors.Join(a.Del(ctx, nstest.Addrs("10.1.0.5")), a.Check(ctx, nil), a.GC(ctx, nil), a.Status(ctx)))
	expect.Equal(t, verbs(), "DEL CHECK GC STATUS", "ran")
}

func TestAFailedDelegatedAddIsUndone(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		body string
		code uint
		want string
	}{
		"its own error":        {`[ $CNI_COMMAND = DEL ] || { echo '{"code":11,"msg":"busy"}'; exit 1; }`, 11, "busy"},
		"no error object":      {`[ $CNI_COMMAND = DEL ] || { echo "oops" >&2; exit 1; }`, codePluginFailed, `network "lan": ipam.type: run plugin fake: exit status 1; stderr: "oops"`},
		"no result":            {`echo hello`, 6, `result of plugin fake: plugin printed no valid CNI result`},
		"a DEL that fails too": {`[ $CNI_COMMAND = DEL ] && { echo '{"code":7,"msg":"nor that"}'; exit 1; }; exit 1`, codePluginFailed, "exit status 1"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n, r, verbs := withPlugin(t, tt.body)
			_, err := n.tryAdd(r)
			wantError(t, err, tt.code, nil, tt.want)
			expect.Equal(t, verbs(), "ADD DEL", "ran")
			expect.That(t, name != "a DEL that fails too" || strings.Contains(err.Error(), "undo the failed ADD: nor that"),
				"what failed in the undoing is lost: %v", err)
		})
	}
}

func TestADelegatedAddThatIsCutOffIsUndone(t *testing.T) {
	t.Parallel()
	fifo := filepath.Join(t.TempDir(), "started")
	must.Succeed(t, unix.Mkfifo(fifo, 0o600))
	n, r, verbs := withPlugin(t, "[ $CNI_COMMAND = DEL ] && exit 0\necho x >"+fifo+"\nexec sleep 600")
	ctx, cancel := context.WithCancel(context.Background())
	a := n.allocator(r)
	failed := make(chan error, 1)
	go func() {
		_, err := a.Add(ctx)
		failed <- err
	}()
	must.Succeed(t, expect.Err(os.ReadFile(fifo)))
	cancel()
	err := <-failed
	wantError(t, err, 11, context.Canceled, `network "lan": ipam.type: run plugin fake: killed: context canceled`)
	expect.Equal(t, verbs(), "ADD DEL", "ran")
}

func TestAMissingPluginIsNamed(t *testing.T) {
	t.Parallel()
	n := newIPAMNode(t, `{"ipam":{"type":"missing"}}`)
	r := n.request("a")
	r.Path = "/opt/none"
	a := n.allocator(r)
	ctx := context.Background()
	const want = `network "lan": ipam.type: find plugin "missing": no such executable in CNI_PATH (/opt/none)`
	wantError(t, expect.Err(a.Add(ctx)), codePluginMissing, delegate.ErrNotFound, want)
	wantError(t, a.Del(ctx, nil), codePluginMissing, delegate.ErrNotFound, want)
	wantError(t, a.Status(ctx), 50, delegate.ErrNotFound, want)
}

func TestTheStatusOfAPluginPassesThrough(t *testing.T) {
	t.Parallel()
	n, r, _ := withPlugin(t, `echo '{"code":51,"msg":"limited"}'; exit 1`)
	wantError(t, n.allocator(r).Status(context.Background()), 51, nil, "limited")
	n, r, _ = withPlugin(t, `exit 3`)
	wantError(t, n.allocator(r).Status(context.Background()), 50, nil, "exit status 3")
	var own *types.Error
	n, r, _ = withPlugin(t, `echo '{"code":4,"msg":"unknown CNI_COMMAND: STATUS"}'; exit 1`)
	err := n.allocator(r).Status(context.Background())
	expect.That(t, !errors.As(err, &own) && err == nil, "a plugin too old for STATUS: %v", err)
}

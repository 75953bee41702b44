package containerd

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// TestTombolodTakesNoPodsForAnotherProgram has a runtime's pods come and go at once, while tombolod hears again and again
// that the bridge has lost an address, which is nobody's, and looks at links. TOMBOLO_LONG has sixty do so five times.
func TestTombolodTakesNoPodsForAnotherProgram(t *testing.T) {
	t.Parallel()
	rounds, count := 1, 8
	if os.Getenv("TOMBOLO_LONG") != "" {
		rounds, count = 5, 60
	}
	n := newNodeOf(t, clusterTemplate)
	n.setPodCIDRs("10.182.9.0/24,fd18:9::/64")
	stays := n.runPod("stays")
	log := n.keep()
	stop := n.keepLooking()
	for range rounds {
		pods := make([]*pod, count)
		inParallel(count, func(i int) error {
			var err error
			pods[i], err = n.tryPod(fmt.Sprintf("pod-%d", i))
			return err
		}).wantNone(t)
		inParallel(count, func(i int) error { return pods[i].tryRemove() }).wantNone(t)
	}
	stop()
	stays.remove()
	text, err := os.ReadFile(log)
	must.That(t, err == nil && bytes.Contains(text, []byte("keeping leases")), "tombolod's log: %s, %v", text, err)
	for line := range strings.Lines(string(text)) {
		expect.That(t, !strings.Contains(line, "level=WARN") && !strings.Contains(line, "level=ERROR"), "%v", line)
	}
}

// keep runs tombolod until the node ends, and gives its log.
func (n *node) keep() (log string) {
	n.Helper()
	log = filepath.Join(n.dir, "tombolod.log")
	out := must.Of(os.Create(log)).Get(n)
	defer out.Close()
	program := must.Of(filepath.EvalSymlinks(keeper)).Get(n)
	cmd := exec.Command("nsenter", "--target", strconv.Itoa(n.init.Process.Pid), "--mount", "--net", "--pid", program)
	cmd.Stdout, cmd.Stderr = out, out
	must.Succeed(n, cmd.Start())
	n.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	await(n, "tombolod", func() error {
		if text, err := os.ReadFile(log); err != nil || !bytes.Contains(text, []byte("keeping leases")) {
			return fmt.Errorf("its log: %s, %w", text, err)
		}
		return nil
	})
	return log
}

// keepLooking has the kernel announce changes of the bridge without an end.
func (n *node) keepLooking() (stop func()) {
	done := make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				n.run("ip", "address", "add", "192.0.2.1/32", "dev", "cbr0")
				n.run("ip", "address", "delete", "192.0.2.1/32", "dev", "cbr0")
			}
		}
	})
	return func() { close(done); ended.Wait() }
}

package cni

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A pod may have any number of routes. What looks for those that it should have keeps none of them in memory: a repair of all
// pods would end for want of it.
func TestManyRoutesOfAPodTakeNoMemory(t *testing.T) {
	t.Parallel()
	const most = 64 << 10 // KiB
	s := newSide(t, referenceDir(t), byName())
	s.chain("ADD", "a", []string{attackedBridge})
	var commands strings.Builder
	for i := range 100_000 {
		fmt.Fprintf(&commands, "route add 20.%d.%d.%d dev eth0\n", i>>16, i>>8&0xff, i&0xff)
	}
	dir := t.TempDir()
	nstest.PutFile(t, dir, "routes", commands.String())
	pod := s.of("a").NS
	nstest.Run(t, pod, "ip", "-batch", filepath.Join(dir, "routes"))
	nstest.Run(t, pod, "ip", "route", "del", "default")
	for _, verb := range []string{"repair", "check"} {
		cmd := exec.Command(command(), verb, "--state", s.state)
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		must.Succeed(t, s.ns.Do(cmd.Start))
		used := peakOf(cmd.Process.Pid)
		err := cmd.Wait()
		expect.That(t, err == nil, "%s: %v: %s", verb, err, &out)
		expect.That(t, used != 0 && used <= most, "%s took %d KiB", verb, used)
	}
	expect.Equal(t, nstest.Run(t, pod, "ip", "route", "show", "default"), "", "the default route, which is the pod's own matter, after repair")
}

// peakOf is how much memory a process took that has begun its program, in KiB, once it has ended. What wait4(2) tells
// is not less than what the test itself took when it began the process.
func peakOf(pid int) (peak int) {
	for ; ; time.Sleep(time.Millisecond) {
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		_, line, found := strings.Cut(string(status), "\nVmHWM:")
		if !found {
			return peak
		}
		if _, err := fmt.Sscan(line, &peak); err != nil {
			return 0
		}
	}
}

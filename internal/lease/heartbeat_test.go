package lease

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func keep(t *testing.T, d *Store) *Heartbeat {
	t.Helper()
	p := must.Of(d.Keep()).Get(t)
	t.Cleanup(func() { p.Close() })
	return p
}

func TestWithoutAKeeperNobodyIsAlive(t *testing.T) {
	t.Parallel()
	d := open(t)
	for range 2 {
		if err := d.CheckKeeper(); !errors.Is(err, ErrNoKeeper) || !strings.Contains(err.Error(), "systemctl start tombolod") {
			t.Errorf("CheckKeeper: %v, want %v and what to do", err, ErrNoKeeper)
		}
		// The same after one that has ended, however that came.
		p := must.Of(d.Keep()).Get(t)
		p.Close()
	}
}

func TestAKeeperIsAliveAsLongAsItBeats(t *testing.T) {
	t.Parallel()
	d := open(t)
	p := keep(t, d)
	expect.Success(t, d.CheckKeeper())
	must.Succeed(t, p.beatAt(uptime()-Silence-time.Second))
	if err := d.CheckKeeper(); !errors.Is(err, ErrSilent) || !strings.Contains(err.Error(), "restart tombolod") {
		t.Errorf("CheckKeeper: %v, want %v and what to do", err, ErrSilent)
	}
	must.Succeed(t, p.Beat())
	expect.Success(t, d.CheckKeeper(), "after another beat")
}

func TestThereIsOneKeeper(t *testing.T) {
	t.Parallel()
	d := open(t)
	p := keep(t, d)
	expect.Is(t, expect.Err(d.Keep()), ErrOtherKeeper, "second Keep")
	p.Close()
	keep(t, d)
}

func TestAKeeperNoticesThatItsDirectoryWasRemoved(t *testing.T) {
	t.Parallel()
	d := open(t)
	p := keep(t, d)
	must.Succeed(t, os.RemoveAll(d.Path()))
	expect.Is(t, p.Beat(), os.ErrNotExist, "Beat")
}

// A process of its own, since the point is what the kernel does when one dies.
func TestAKilledKeeperIsNotAlive(t *testing.T) {
	t.Parallel()
	if dir := os.Getenv("TOMBOLO_TEST_KEEP"); dir != "" {
		d := must.Of(Open(dir)).Get(t)
		keep(t, d)
		os.Stdout.WriteString("kept\n")
		select {}
	}
	d := open(t)
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.timeout", "10m")
	cmd.Env = append(os.Environ(), "TOMBOLO_TEST_KEEP="+d.Path())
	out := must.Of(cmd.StdoutPipe()).Get(t)
	must.Succeed(t, cmd.Start())
	expect.Success(t, expect.Err(out.Read(make([]byte, 16))))
	// Whether it has beaten lately is a matter of the machine's speed, and of another test.
	runs, _, err := d.heartbeat()
	expect.That(t, runs && err == nil, "while it runs: %t, %v", runs, err)
	// Stopped, it holds its lock and beats no more: that is for its last beat to tell.
	expect.Success(t, cmd.Process.Signal(unix.SIGSTOP))
	runs, _, err = d.heartbeat()
	expect.That(t, runs && err == nil, "stopped: runs %t, %v", runs, err)
	expect.Success(t, cmd.Process.Kill())
	_ = cmd.Wait() // killed: that is what it will say
	expect.Is(t, d.CheckKeeper(), ErrNoKeeper, "after it was killed")
}

func TestADirectoryThatOthersWriteToIsNotKept(t *testing.T) {
	t.Parallel()
	for _, mode := range []os.FileMode{0o777, 0o770, 0o702, 0o755, 0o700} {
		d := open(t)
		must.Succeed(t, os.MkdirAll(d.Path(), 0o700))
		must.Succeed(t, os.Chmod(d.Path(), mode))
		p, err := d.Keep()
		expect.Equal(t, err != nil && strings.Contains(err.Error(), "chmod 700"), mode&0o022 != 0,
			"mode %o: %v", mode, err)
		if p != nil {
			p.Close()
		}
	}
	d := open(t)
	must.Succeed(t, os.MkdirAll(d.Path(), 0o700))
	must.Succeed(t, os.Chown(d.Path(), 65534, -1))
	if p, err := d.Keep(); err == nil {
		p.Close()
		t.Error("of another user: no error")
	}
}

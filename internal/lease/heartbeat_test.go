package lease

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func keep(t *testing.T, d *Dir) *Heartbeat {
	t.Helper()
	p, err := d.Keep()
	if err != nil {
		t.Fatal(err)
	}
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
		p, err := d.Keep()
		if err != nil {
			t.Fatal(err)
		}
		p.Close()
	}
}

func TestAKeeperIsAliveAsLongAsItBeats(t *testing.T) {
	t.Parallel()
	d := open(t)
	p := keep(t, d)
	if err := d.CheckKeeper(); err != nil {
		t.Error(err)
	}
	if err := p.beatAt(uptime() - Silence - time.Second); err != nil {
		t.Fatal(err)
	}
	if err := d.CheckKeeper(); !errors.Is(err, ErrSilent) || !strings.Contains(err.Error(), "restart tombolod") {
		t.Errorf("CheckKeeper: %v, want %v and what to do", err, ErrSilent)
	}
	if err := p.Beat(); err != nil {
		t.Fatal(err)
	}
	if err := d.CheckKeeper(); err != nil {
		t.Errorf("after another beat: %v", err)
	}
}

func TestThereIsOneKeeper(t *testing.T) {
	t.Parallel()
	d := open(t)
	p := keep(t, d)
	if _, err := d.Keep(); !errors.Is(err, ErrOtherKeeper) {
		t.Errorf("second Keep: %v, want %v", err, ErrOtherKeeper)
	}
	p.Close()
	keep(t, d)
}

func TestAKeeperNoticesThatItsDirectoryWasRemoved(t *testing.T) {
	t.Parallel()
	d := open(t)
	p := keep(t, d)
	if err := os.RemoveAll(d.Path()); err != nil {
		t.Fatal(err)
	}
	if err := p.Beat(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Beat: %v, want %v", err, os.ErrNotExist)
	}
}

// A process of its own, since the point is what the kernel does when one dies.
func TestAKilledKeeperIsNotAlive(t *testing.T) {
	t.Parallel()
	if dir := os.Getenv("TOMBOLO_TEST_KEEP"); dir != "" {
		d, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		keep(t, d)
		os.Stdout.WriteString("kept\n")
		select {}
	}
	d := open(t)
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.timeout", "10m")
	cmd.Env = append(os.Environ(), "TOMBOLO_TEST_KEEP="+d.Path())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 16)); err != nil {
		t.Error(err)
	}
	// Whether it has beaten lately is a matter of the machine's speed, and of another test.
	if runs, _, err := d.heartbeat(); !runs || err != nil {
		t.Errorf("while it runs: %t, %v", runs, err)
	}
	// Stopped, it holds its lock and beats no more: that is for its last beat to tell.
	if err := cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Error(err)
	}
	if runs, _, err := d.heartbeat(); !runs || err != nil {
		t.Errorf("stopped: runs %t, %v", runs, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait() // killed: that is what it will say
	if err := d.CheckKeeper(); !errors.Is(err, ErrNoKeeper) {
		t.Errorf("after it was killed: %v, want %v", err, ErrNoKeeper)
	}
}

func TestADirectoryThatOthersWriteToIsNotKept(t *testing.T) {
	t.Parallel()
	for _, mode := range []os.FileMode{0o777, 0o770, 0o702, 0o755, 0o700} {
		d := open(t)
		if err := d.Make(); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(d.Path(), mode); err != nil {
			t.Fatal(err)
		}
		p, err := d.Keep()
		if refused := err != nil && strings.Contains(err.Error(), "chmod 700"); refused != (mode&0o022 != 0) {
			t.Errorf("mode %o: %v", mode, err)
		}
		if p != nil {
			p.Close()
		}
	}
	d := open(t)
	if err := d.Make(); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(d.Path(), 65534, -1); err != nil {
		t.Fatal(err)
	}
	if p, err := d.Keep(); err == nil {
		p.Close()
		t.Error("of another user: no error")
	}
}

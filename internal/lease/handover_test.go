package lease

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pipe gives two ends; reading from r ends when the last w is closed.
func pipe(t *testing.T) (r *os.File, w int) {
	t.Helper()
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	r = os.NewFile(uintptr(p[0]), "pipe")
	t.Cleanup(func() { r.Close() })
	return r, p[1]
}

func ended(t *testing.T, r *os.File) {
	t.Helper()
	if n, err := r.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("read %d, %v; want the end", n, err)
	}
}

func TestTheKeeperClosesWhatItIsHanded(t *testing.T) {
	t.Parallel()
	d := open(t)
	p := keep(t, d)
	c, err := p.Closer()
	if err != nil {
		t.Fatal(err)
	}
	for range 30 {
		r, w := pipe(t)
		if err := d.HandOver(w); err != nil {
			t.Error(err)
		}
		if _, err := unix.FcntlInt(uintptr(w), unix.F_GETFD, 0); err == nil {
			// Another test may have the number by now, but not for this pipe.
			t.Log("the number is in use again")
		}
		ended(t, r)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(filepath.Join(d.Path(), keeperSocket)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its socket: %v, want none", err)
	}
}

func TestADescriptorIsSentAndNotJustClosed(t *testing.T) {
	t.Parallel()
	d := open(t)
	keep(t, d)
	// A receiver that does not read: the descriptor stays open in its queue.
	dir, addr, err := d.socketAddr()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(dir)
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(s, &unix.SockaddrUnix{Name: addr}); err != nil {
		t.Fatal(err)
	}
	r, w := pipe(t)
	if err := d.HandOver(w); err != nil {
		t.Fatal(err)
	}
	if err := r.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v, want it open still", err)
	}
	unix.Close(s)
	if err := r.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	ended(t, r)
}

func TestWithoutAKeeperTheCallerClosesItself(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(*testing.T, *Dir){
		"no directory": func(*testing.T, *Dir) {},
		"no socket":    func(t *testing.T, d *Dir) { keep(t, d) },
		"a socket that a killed keeper left": func(t *testing.T, d *Dir) {
			c, err := keep(t, d).Closer()
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(d.Path(), keeperSocket)
			if err := os.Rename(path, path+".kept"); err != nil {
				t.Fatal(err)
			}
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(path+".kept", path); err != nil {
				t.Fatal(err)
			}
		},
		"a silent keeper": func(t *testing.T, d *Dir) {
			p := keep(t, d)
			c, err := p.Closer()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			now, err := uptime()
			if err != nil {
				t.Fatal(err)
			}
			if err := p.beatAt(now - 2*Silence); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := open(t)
			prepare(t, d)
			r, w := pipe(t)
			if err := d.HandOver(w); err != nil {
				t.Error(err)
			}
			ended(t, r)
		})
	}
}

func TestTheNextKeeperTakesTheSocketOver(t *testing.T) {
	t.Parallel()
	// Longer than a socket's address has room for.
	d, err := Open(filepath.Join(t.TempDir(), strings.Repeat("x", 120)))
	if err != nil {
		t.Fatal(err)
	}
	p := keep(t, d)
	if err := os.WriteFile(filepath.Join(d.Path(), keeperSocket), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := p.Closer()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r, w := pipe(t)
	if err := d.HandOver(w); err != nil {
		t.Error(err)
	}
	ended(t, r)
}

func TestMessagesWithoutDescriptorsAreNothing(t *testing.T) {
	t.Parallel()
	for _, oob := range [][]byte{nil, {1}, make([]byte, 64)} {
		if _, fds := rights(oob); len(fds) > 0 {
			t.Errorf("rights(%v) = %v", oob, fds)
		}
	}
}

func TestNobodyElseHandsTheKeeperAnything(t *testing.T) {
	t.Parallel()
	d := open(t)
	c, err := keep(t, d).Closer()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	path := filepath.Join(d.Path(), keeperSocket)
	st, err := os.Lstat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("its socket: %v, %v, want mode 600", st.Mode(), err)
	}
	// Should somebody have the socket all the same, say by a descriptor that was passed on.
	_, w := pipe(t)
	defer unix.Close(w)
	for _, uid := range []uint32{0, 65534} {
		creds := unix.UnixCredentials(&unix.Ucred{Pid: int32(os.Getpid()), Uid: uid})
		if own, fds := rights(creds); own != (uid == 0) || len(fds) != 0 {
			t.Errorf("of user %d: taken for our own: %t", uid, own)
		}
	}
	if own, _ := rights(nil); own {
		t.Error("of nobody: taken for our own")
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

package lan

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// gate has processes that open files in a directory wait for leave (fanotify(7)), and
// kills the one that opens a file of a name for the nth time.
type gate struct {
	testing.TB
	file *os.File
	name string
	nth  int
	done chan bool // whether somebody was killed
}

// killAt kills the process that is about to write the NIC's journal for the nth time, while
// something runs, and says whether anybody was.
func (n *network) killAt(nth int, run func()) bool {
	n.Helper()
	must.Succeed(n, os.MkdirAll(n.state, 0o700))
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_CLOEXEC)
	must.Succeed(n, err, "fanotify_init")
	g := &gate{TB: n, file: os.NewFile(uintptr(fd), "fanotify"), name: ".tmp-" + ident.Hash(filepath.Join(n.state, "uplinks", nic+".json"), "", ""), nth: nth, done: make(chan bool)}
	err = unix.FanotifyMark(fd, unix.FAN_MARK_ADD, unix.FAN_OPEN_PERM|unix.FAN_EVENT_ON_CHILD, unix.AT_FDCWD, n.state)
	must.That(n, err == nil, "fanotify_mark: %v", err)
	go g.keep()
	run()
	g.file.Close()
	return <-g.done
}

// keep answers until the gate is closed.
func (g *gate) keep() {
	killed := false
	defer func() { g.done <- killed }()
	buf := make([]byte, 4096)
	for {
		size, err := g.file.Read(buf)
		if err != nil {
			expect.Is(g, err, os.ErrClosed)
			return
		}
		// struct fanotify_event_metadata, each with its length.
		for b := buf[:size]; len(b) >= unix.FAN_EVENT_METADATA_LEN; b = b[binary.NativeEndian.Uint32(b):] {
			fd, pid := int(int32(binary.NativeEndian.Uint32(b[16:]))), int(int32(binary.NativeEndian.Uint32(b[20:])))
			killed = g.answer(fd, pid) || killed
		}
	}
}

// answer lets a process have its file, unless it is the one to be killed.
func (g *gate) answer(fd, pid int) (killed bool) {
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err == nil && filepath.Base(path) == g.name {
		g.nth--
		killed = g.nth == 0
	}
	response := make([]byte, 8) // struct fanotify_response
	binary.NativeEndian.PutUint32(response, uint32(fd))
	binary.NativeEndian.PutUint32(response[4:], unix.FAN_ALLOW)
	if killed {
		binary.NativeEndian.PutUint32(response[4:], unix.FAN_DENY)
		err = errors.Join(err, unix.Kill(pid, unix.SIGKILL))
	}
	// The killed process does not wait for it any more.
	if _, writeErr := g.file.Write(response); !killed {
		err = errors.Join(err, writeErr)
	}
	expect.Success(g, errors.Join(err, unix.Close(fd)))
	return killed
}

// An ADD that is killed at any step of the takeover leaves a host that is reached, and
// the next process finishes it, forward or back.
func TestADDIsKilledInTheTakeover(t *testing.T) {
	finishers := []struct {
		name   string
		finish func(n *network, killed *pod)
	}{
		{"the keeper finishes", finishByKeeper},
		{"the next ADD finishes", finishByADD},
		{"uplink restore finishes", finishByRestore},
	}
	for i, f := range finishers {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			l, _ := newLab(t)
			n := l.network(nil)
			first := l.moved(nic)
			// Each has every third step, so that all are had together.
			for nth := 1 + i; ; nth += len(finishers) {
				p := l.newPod(fmt.Sprintf("killed-%d", nth))
				var err error
				if !n.killAt(nth, func() { _, err = n.verb("ADD", p) }) {
					expect.That(t, err == nil && nth >= 8,
						"there are fewer than %d steps, and the ADD says %v", nth, err)
					n.del(p)
					n.operate("uplink restore", nic)
					wantSame(t, "the host in the end", first, l.moved(nic))
					return
				}
				must.That(t, err != nil && strings.Contains(err.Error(), "signal: killed"),
					"the ADD that was killed: %v", err)
				l.hostTalks()
				f.finish(n, p)
				l.hostTalks()
				l.wantNoLink(bridge)
				wantSame(t, fmt.Sprintf("the host after a kill before step %d", nth), first, l.moved(nic))
				expect.Is(t, expect.Err(os.Stat(filepath.Join(n.state, "uplinks", nic+".json"))), os.ErrNotExist,
					"the journal is there")
				if t.Failed() {
					return
				}
			}
		})
	}
}

// A return that is killed at any step is finished by the keeper.
func TestRestoreIsKilledAndTheKeeperFinishes(t *testing.T) {
	t.Parallel()
	l, _ := newLab(t)
	n := l.network(nil)
	first := l.moved(nic)
	for nth := 1; ; nth++ {
		n.operate("uplink take", nic, bridge)
		var err error
		if !n.killAt(nth, func() {
			_, err = n.exec("tombolo", nil, nil, "uplink", "restore", "--state", n.state, "--leases", n.leases, nic)
		}) {
			expect.That(t, err == nil && nth >= 4, "there are fewer than %d steps, and restore says %v", nth, err)
			wantSame(t, "the host in the end", first, l.moved(nic))
			return
		}
		l.hostTalks()
		k := n.keeper()
		must.Until(n, "the keeper finishes the return", func() bool {
			out, fine := n.uplinkStatus()
			return fine && strings.Contains(out, ": taken") || strings.Contains(out, "is not taken over")
		})
		k.kill()
		l.hostTalks()
		if out, _ := n.uplinkStatus(); strings.Contains(out, ": taken") {
			n.operate("uplink restore", nic)
		}
		l.wantNoLink(bridge)
		wantSame(t, fmt.Sprintf("the host after a kill before step %d", nth), first, l.moved(nic))
		if t.Failed() {
			return
		}
	}
}

// uplinkStatus gives what `tombolo uplink status` says, and whether nothing differs.
func (n *network) uplinkStatus() (string, bool) {
	n.Helper()
	out, err := n.exec("tombolo", nil, nil, "uplink", "status", "--state", n.state, "--leases", n.leases, nic)
	return out, err == nil
}

func finishByKeeper(n *network, killed *pod) {
	n.Helper()
	k := n.keeper()
	must.Until(n, "the keeper finishes the takeover", func() bool { _, fine := n.uplinkStatus(); return fine })
	k.kill()
	n.del(killed)
	if out, _ := n.uplinkStatus(); !strings.Contains(out, "is not taken over") {
		n.hostTalks()
		n.operate("uplink restore", nic)
	}
}

func finishByADD(n *network, killed *pod) {
	n.Helper()
	p := n.add(n.newPod("next"))
	n.ask(p.place, n.internet.ip4, servicePort, p.ip4)
	n.hostTalks()
	n.check(p)
	n.del(killed)
	n.del(p)
	n.operate("uplink restore", nic)
}

func finishByRestore(n *network, killed *pod) {
	n.Helper()
	// A NIC that is taken over is not given back before its pods.
	if out, _ := n.uplinkStatus(); strings.Contains(out, ": taken") {
		n.del(killed)
	}
	n.operate("uplink restore", nic)
	n.del(killed)
}

package lan

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// spacing is the time between two datagrams of a flood: far less than the kernel
// takes to make a link a bridge's port.
const spacing = 10 * time.Microsecond

// flood counts what is lost of one flow, as fast as one sender can be, while
// something is done. It shows gaps that are too short for flows of a moderate pace to
// fall into more than now and then.
func (l *lan) flood(family int, from, to place, do func()) (sent, lost int) {
	l.Helper()
	out, in, err := datagrams(from, to, family)
	if err != nil {
		l.Fatal(err)
	}
	outRaw, err1 := out.SyscallConn()
	inRaw, err2 := in.SyscallConn()
	roomErr := inRaw.Control(func(fd uintptr) {
		// A reader that does not run for a second loses nothing either.
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8*room)
	})
	if err := errors.Join(err, err1, err2, roomErr); err != nil {
		l.Fatal(err)
	}
	var came atomic.Int64
	var stop atomic.Bool
	var sender, receiver sync.WaitGroup
	receiver.Go(func() {
		buf := make([]byte, messageLen)
		for {
			if _, err := in.Read(buf); err != nil {
				return
			}
			came.Add(1)
		}
	})
	sender.Go(func() {
		buf := make([]byte, messageLen)
		for last := time.Now(); !stop.Load(); {
			if time.Since(last) < spacing {
				continue // a timer would be a hundred times as slow
			}
			last = time.Now()
			sent++
			outRaw.Write(func(fd uintptr) bool {
				_, err := unix.Write(int(fd), buf)
				return err != unix.EAGAIN
			})
		}
	})
	l.eventually("the flood flows", func() bool { return came.Load() > 1000 })
	do()
	for after := came.Load() + 1000; came.Load() < after; {
		time.Sleep(time.Millisecond)
	}
	stop.Store(true)
	sender.Wait()
	for seen, since := int64(-1), time.Now(); came.Load() < int64(sent) && time.Since(since) < time.Second; {
		if now := came.Load(); now != seen {
			seen, since = now, time.Now()
		}
		time.Sleep(time.Millisecond)
	}
	in.Close()
	receiver.Wait()
	out.Close()
	return sent, sent - int(came.Load())
}

func TestTakeoverLosesNothingOfAFlood(t *testing.T) {
	l := newHost(t)
	l.meet(both(), [2]place{l.other, l.host})
	k := l.taker()
	for i := range 2 * runs(t) {
		family := both()[i%2]
		for _, step := range []struct {
			name string
			do   func()
		}{{"nothing", func() {}}, {"take", k.take}, {"restore", k.restore}} {
			sent, lost := l.flood(family, l.other, l.host, step.do)
			t.Logf("%s, IPv%d: %d of %d lost", step.name, family, lost, sent)
			if lost > 0 {
				t.Errorf("%s, IPv%d: %d of %d lost, want none", step.name, family, lost, sent)
			}
		}
	}
}

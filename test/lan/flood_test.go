package lan

import (
	"testing"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// flood counts what is lost of one flow, as fast as one sender can be, while
// something is done. It shows gaps that are too short for flows of a moderate pace to
// fall into more than now and then.
func (l *lan) flood(family int, from, to place, do func()) (sent, lost int) {
	l.Helper()
	out, in, err := datagrams(from, to, family)
	if err != nil {
		l.Fatal(err)
	}
	defer out.Close()
	defer in.Close()
	return nstest.Flood(l, int(out.Fd()), int(in.Fd()), do, l.namespaces()...)
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

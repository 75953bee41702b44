package network

import (
	"errors"
	"io/fs"
	"testing"
	"time"
)

// Collect lists first, and gives others their turn before it looks at each.
func TestCollectLeavesAloneWhatCameSinceItsList(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	made := b.add(t)
	hash := made.Port[len("veth"):]
	began := time.Now()
	collect := func(r *remains) {
		t.Helper()
		b.inside(t, func(s *session) error { return b.node.teardown(s, b.nw.Name, nil).collect(t.Context(), r, began) })
	}
	list := func() (found map[string]*remains) {
		t.Helper()
		b.inside(t, func(s *session) error {
			defer s.Leave()
			in, err := s.inventory(t.Context(), b.nw.Name, nil)
			found = in.all
			return errors.Join(s.Enter(t.Context()), err)
		})
		return found
	}
	listed := list()
	if listed[hash] == nil {
		t.Fatalf("listed %v", listed)
	}
	b.do(t, func() error { return b.node.Del(t.Context(), made.Key, nil) })
	b.add(t)
	collect(listed[hash])
	b.mustBeAsMade(t)
	// What had no record then has one now.
	collect(&remains{hash: hash})
	b.mustBeAsMade(t)
	// And what it listed as it is, goes.
	collect(list()[hash])
	b.inside(t, func(s *session) error {
		if _, err := s.Links.Link(t.Context(), made.Port); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("its port is left: %v", err)
		}
		return nil
	})
}

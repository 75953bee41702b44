package cni

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// inside gives a verb's host, without the lock.
func (n *node) inside(t *testing.T, verb string, do func(*host) error) {
	t.Helper()
	err := n.host.Do(func() error {
		c := &call{Plugin: n.plugin(), verb: verb, network: "pods"}
		h, err := c.openHost(settings{Network: "pods", StateDir: n.stateDir})
		if err != nil {
			return err
		}
		defer h.Close()
		return do(h)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// GC lists first, and gives others their turn before it looks at each.
func TestGCLeavesAloneWhatCameSinceItsList(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.run(t, n.plugin(), "ADD", nil).must(t)
	hash := ident.Hash("pods", "c1", "eth0")
	var listed map[string]*remains
	n.inside(t, "GC", func(h *host) error {
		var err error
		listed, err = h.listAttachments(t.Context())
		return err
	})
	if listed[hash] == nil {
		t.Fatalf("listed %v", listed)
	}
	n.run(t, n.plugin(), "DEL", nil).must(t)
	prev := n.run(t, n.plugin(), "ADD", nil).must(t).stdout
	n.inside(t, "GC", func(h *host) error { return h.collect(t.Context(), &NetConf{}, listed[hash]) })
	n.run(t, n.plugin(), "CHECK", map[string]any{"prevResult": json.RawMessage(prev)}).must(t)
	// What had no record then has one now.
	n.inside(t, "GC", func(h *host) error {
		return h.collect(t.Context(), &NetConf{}, &remains{hash: hash, port: "veth" + hash})
	})
	n.run(t, n.plugin(), "CHECK", map[string]any{"prevResult": json.RawMessage(prev)}).must(t)
	// And what it listed as it is, goes.
	n.inside(t, "GC", func(h *host) error {
		now, err := h.listAttachments(t.Context())
		if err != nil {
			return err
		}
		return h.collect(t.Context(), &NetConf{}, now[hash])
	})
	if hasLink(t, n.host, "veth"+hash) {
		t.Error("its port is left")
	}
}

// A pod that is being taken down has its record locked, and needs no route.
func TestARouteIsNotChangedWhileADELIsAtWork(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.run(t, n.plugin(), "ADD", nil).must(t)
	n.inside(t, "repair", func(h *host) error {
		rec, err := h.dir.Load("pods", ident.Hash("pods", "c1", "eth0"))
		if err != nil {
			return err
		}
		lock, err := h.dir.LockAttachment("pods", rec.Hash())
		if err != nil {
			return err
		}
		if err := h.reroute(t.Context(), rec); !errors.Is(err, state.ErrBusy) {
			t.Errorf("reroute: %v, want ErrBusy", err)
		}
		if err := lock.Close(); err != nil {
			return err
		}
		return h.reroute(t.Context(), rec)
	})
}

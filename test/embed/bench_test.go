package main

import (
	"fmt"
	"testing"
)

// BenchmarkPod is what a pod costs this program: addresses, a port, the firewall's elements,
// and all of it gone again. docs/embedding.md shows how to profile it.
func BenchmarkPod(b *testing.B) {
	w, err := newWorld(2)
	if err != nil {
		b.Fatal(err)
	}
	defer w.close()
	n, err := open(w.spaces[0], b.TempDir(), "bench", "pods0", prefix("10.20.0.1/16"))
	if err != nil {
		b.Fatal(err)
	}
	defer n.Close()
	if err := n.build(b.Context(), w.spaces[0]); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		id := fmt.Sprintf("pod%d", i)
		given, err := n.attach(b.Context(), w.spaces[1], id)
		if err == nil {
			err = n.detach(b.Context(), id, given)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

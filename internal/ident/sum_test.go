package ident

import (
	"crypto/sha256"
	"testing"
)

func TestSum256IsSHA256(t *testing.T) {
	t.Parallel()
	data := make([]byte, 300)
	for i := range data {
		data[i] = byte(i * 7)
	}
	// All lengths around one, two and four blocks, with room for the length and without.
	for n := range data {
		if got, want := Sum256(data[:n]), sha256.Sum256(data[:n]); got != want {
			t.Errorf("of %d bytes: %x, and crypto/sha256 has %x", n, got, want)
		}
	}
}

package ident_test

import (
	"bytes"
	"crypto/sha256"
	"crypto/sha512"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/ident"
)

func TestChecksumsAreThoseOfTheLibrary(t *testing.T) {
	t.Parallel()
	text := bytes.Repeat([]byte("a\x00\xffz%"), 110)
	for n := range text { // each length up to four blocks of the longer kind, eight of the other
		if got, want := ident.Sum256(text[:n]), sha256.Sum256(text[:n]); got != want {
			t.Fatalf("SHA-256 of %d bytes: %x, want %x", n, got, want)
		}
		if got, want := ident.Sum512(text[:n]), sha512.Sum512(text[:n]); got != want {
			t.Fatalf("SHA-512 of %d bytes: %x, want %x", n, got, want)
		}
	}
}

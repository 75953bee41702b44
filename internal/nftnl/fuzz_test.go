package nftnl

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

// The corpora in testdata hold what a kernel answered, without struct nfgenmsg.

func FuzzGeneration(f *testing.F) {
	f.Fuzz(func(_ *testing.T, b []byte) { Number(Find(b, unix.NFTA_GEN_ID)) })
}

func FuzzTable(f *testing.F) { f.Fuzz(func(_ *testing.T, b []byte) { DecodeTable(b) }) }

func FuzzComment(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 200, 'x'})
	f.Add([]byte{7, 2, 1, 1, 0, 2, 'x', 0})
	f.Add(Comment("tombolo:1:0123456789a:podnet"))
	const maxComment = 128 // of nft
	f.Fuzz(func(t *testing.T, b []byte) {
		comment := CommentOf(b)
		again := CommentOf(Comment(comment))
		expect.That(t, len(comment) > maxComment || again == comment, "%q became %q", comment, again)
	})
}

func TestAttributeThatIsTooLongIsRefused(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0xffff - 4, 0xffff - 3, 0x10000, 0x20000} {
		tr := Begin(nil)
		tr.Add("add", nil, 1, 2, 0, Nest(1, Nest(2, Bytes(3, bytes.Repeat([]byte{1}, n)))))
		expect.That(t, tr.b.Err(1) != nil, "%d bytes are taken", n)
	}
	tr := Begin(nil)
	tr.Add("add", nil, 1, 2, 0, Bytes(3, make([]byte, 0xffff-4)))
	expect.Success(t, tr.b.Err(1))
}

package state

import (
	"bytes"
	"errors"
	"os"
	"reflect"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// The committed corpora in testdata/fuzz hold what nodes have on disk, cut short and
// spoilt; these seeds are what the code writes now.

// fuzzDecoder holds a decoder to its word: an error is one of the two, and what is
// read is written and read again the same.
func fuzzDecoder[T any](t *testing.T, data []byte, decoded T, err error, encoded func(T) []byte, decode func([]byte) (T, error)) {
	t.Helper()
	if err != nil {
		expect.That(t, errors.Is(err, ErrDamaged) || errors.Is(err, ErrVersion), "decode of %q: %v", data, err)
		return
	}
	line := encoded(decoded)
	back := must.Of(decode(line)).Get(t, "decode of our own %q", line)
	expect.NoDiff(t, diff(decoded, back), "%q comes back as another", line)
}

func FuzzDecodeAttachment(f *testing.F) {
	line := lineOf(f, sample("c1"))
	f.Add(line)
	f.Add(append(line, line[:100]...))
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := decodeAttachment(data)
		fuzzDecoder(t, data, a, err, func(a *Attachment) []byte {
			line := lineOf(t, a)
			expect.Equal(t, bytes.IndexByte(line, '\n'), len(line)-1, "%q is more than one line", line)
			return line
		}, decodeAttachment)
	})
}

func FuzzDecodeNetwork(f *testing.F) {
	f.Add(lineOf(f, sampleNetwork("cbr0")))
	f.Fuzz(func(t *testing.T, data []byte) {
		n, err := decodeNetwork(data)
		fuzzDecoder(t, data, n, err, func(n *Network) []byte { return lineOf(t, n) }, decodeNetwork)
	})
}

func FuzzDecodeEpoch(f *testing.F) {
	epoch := Epoch{Boot: "b", ID: "i", Init: 1, Made: time.Hour, NetNS: 1}
	f.Add(lineOf(f, &epoch))
	f.Fuzz(func(t *testing.T, data []byte) {
		e, err := decodeEpoch(data)
		fuzzDecoder(t, data, e, err, func(e Epoch) []byte { return lineOf(t, &e) }, decodeEpoch)
	})
}

// FuzzLoad is the whole way from a file in place of a record to its answer.
func FuzzLoad(f *testing.F) {
	f.Add(lineOf(f, sample("c1")))
	d := newDir(f)
	hash := sample("c1").Hash()
	path := recordPath(f, d, sample("c1"))
	f.Fuzz(func(t *testing.T, data []byte) {
		writeFile(t, path, string(data))
		a, err := d.Load("cbr0", hash)
		found, bad, listErr := d.List("cbr0")
		must.That(t, listErr == nil && len(found)+len(bad) == 1 && (err == nil) == (len(found) == 1),
			"Load says %v, List %v, %v and %v", err, found, bad, listErr)
		expect.That(t, err != nil || a.Hash() == hash, "Load gives %+v for %s", a, hash)
		must.Succeed(t, os.Remove(path))
	})
}

func FuzzParseStart(f *testing.F) {
	f.Add([]byte("1 (init) S 0 1 1 0 -1 4194560 30166 285737 0 148 37 188 452 268 10 -10 13 0 25 43233280"))
	f.Fuzz(func(t *testing.T, data []byte) {
		start, err := parseStart(data)
		expect.That(t, start >= 0 && (err == nil || start == 0), "parseStart(%q) = %v, %v", data, start, err)
	})
}

func lineOf(t testing.TB, record any) []byte {
	t.Helper()
	return Encode(reflect.ValueOf(record).Elem().FieldByName("Version").Addr().Interface().(*int), record)
}

package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"testing"
	"time"
)

// The committed corpora in testdata/fuzz hold what nodes have on disk, cut short and
// spoilt; these seeds are what the code writes now.

// fuzzDecoder holds a decoder to its word: an error is one of the two, and what is
// read is written and read again the same.
func fuzzDecoder[T any](t *testing.T, data []byte, decoded T, err error, encoded func(T) []byte, decode func([]byte) (T, error)) {
	t.Helper()
	if err != nil {
		if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrVersion) {
			t.Errorf("decode of %q: %v", data, err)
		}
		return
	}
	line := encoded(decoded)
	back, err := decode(line)
	if err != nil {
		t.Fatalf("decode of our own %q: %v", line, err)
	}
	if d := diff(decoded, back); d != "" {
		t.Errorf("%q comes back as another (-want +got):\n%s", line, d)
	}
}

func FuzzDecodeAttachment(f *testing.F) {
	line := encode(sample("c1").fields)
	f.Add(line)
	f.Add(append(line, line[:100]...))
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := decodeAttachment(data)
		fuzzDecoder(t, data, a, err, func(a *Attachment) []byte {
			line := encode(a.fields)
			if bytes.IndexByte(line, '\n') != len(line)-1 {
				t.Errorf("%q is more than one line", line)
			}
			return line
		}, decodeAttachment)
	})
}

func FuzzDecodeNetwork(f *testing.F) {
	f.Add(encode(sampleNetwork("cbr0").fields))
	f.Fuzz(func(t *testing.T, data []byte) {
		n, err := decodeNetwork(data)
		fuzzDecoder(t, data, n, err,
			func(n *Network) []byte { return encode(n.fields) }, decodeNetwork)
	})
}

func FuzzDecodeEpoch(f *testing.F) {
	epoch := Epoch{Boot: "b", ID: "i", Started: time.Unix(1, 0), Made: time.Hour, NetNS: 1}
	f.Add(encode(epoch.fields))
	f.Fuzz(func(t *testing.T, data []byte) {
		e, err := decodeEpoch(data)
		fuzzDecoder(t, data, e, err, func(e Epoch) []byte { return encode(e.fields) }, decodeEpoch)
	})
}

// FuzzLoad is the whole way from a file in place of a record to its answer.
func FuzzLoad(f *testing.F) {
	f.Add(encode(sample("c1").fields))
	d := newDir(f)
	hash := sample("c1").Hash()
	path := recordPath(f, d, sample("c1"))
	f.Fuzz(func(t *testing.T, data []byte) {
		writeFile(t, path, string(data))
		a, err := d.Load("cbr0", hash)
		found, bad, listErr := d.List("cbr0")
		if listErr != nil || len(found)+len(bad) != 1 || (err == nil) != (len(found) == 1) {
			t.Fatalf("Load says %v, List %v, %v and %v", err, found, bad, listErr)
		}
		if err == nil && a.Hash() != hash {
			t.Errorf("Load gives %+v for %s", a, hash)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	})
}

func FuzzParseStart(f *testing.F) {
	f.Add([]byte("1 (init) S 0 1 1 0 -1 4194560 30166 285737 0 148 37 188 452 268 10 -10 13 0 25 43233280"))
	f.Fuzz(func(t *testing.T, data []byte) {
		start, err := parseStart(data)
		if start < 0 || err != nil && start != 0 {
			t.Errorf("parseStart(%q) = %v, %v", data, start, err)
		}
	})
}

// FuzzSplit holds our taking apart of JSON to encoding/json's.
func FuzzSplit(f *testing.F) {
	f.Add([]byte(`{"a":[1,{"b":"]}\""}],"c":null, "\u0061" : -1.5e3}`))
	f.Add([]byte(`[ 1 , "a" , {} ]`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if data = bytes.TrimSpace(data); !json.Valid(data) {
			return
		}
		var object map[string]json.RawMessage
		if data[0] == '{' && json.Unmarshal(data, &object) == nil {
			members, err := membersOf(data)
			if tooDeep(data) {
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			ours := make(map[string]json.RawMessage)
			for _, m := range members {
				ours[string(m.name)] = m.raw
			}
			if d := diff(object, ours); d != "" {
				t.Errorf("members of %q (-want +got):\n%s", data, d)
			}
		}
		var items []json.RawMessage
		if data[0] == '[' && json.Unmarshal(data, &items) == nil {
			var ours []json.RawMessage
			err := eachOf(data, func(item []byte) error { ours = append(ours, item); return nil })
			if tooDeep(data) {
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if len(ours) != len(items) || len(ours) > 0 && diff(items, ours) != "" {
				t.Errorf("items of %q: %q, want %q", data, ours, items)
			}
		}
	})
}

// tooDeep says whether there may be more levels than ours, which are bounded.
func tooDeep(data []byte) bool {
	return bytes.Count(data, []byte("["))+bytes.Count(data, []byte("{")) > 100
}

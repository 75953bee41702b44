package lease

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestTheFormatOfRecordsStaysWhatItIs(t *testing.T) {
	t.Parallel()
	// An upgraded keeper reads what the last one wrote.
	line, err := encode(sample())
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := json.Indent(&text, line, "", "  "); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "record.json", text.Bytes())
	got, err := decode(text.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	same(t, sample(), got)
}

func TestTheSampleHasEveryFieldSet(t *testing.T) {
	t.Parallel()
	var unset []string
	var walk func(string, reflect.Value)
	walk = func(name string, v reflect.Value) {
		if v.Kind() == reflect.Pointer {
			v = v.Elem()
		}
		// Those of dhcpc.Lease are that package's matter.
		if v.Kind() == reflect.Struct && strings.HasPrefix(v.Type().PkgPath(), reflect.TypeFor[Record]().PkgPath()) {
			for i := range v.NumField() {
				walk(name+"."+v.Type().Field(i).Name, v.Field(i))
			}
			return
		}
		if v.IsZero() {
			unset = append(unset, name)
		}
	}
	r := sample()
	r.Host, r.Version = sampleHost().Host, 1
	walk("Record", reflect.ValueOf(r))
	if unset != nil {
		t.Errorf("not set: %v", unset)
	}
}

func TestClientKeepsItsConfiguration(t *testing.T) {
	t.Parallel()
	c := sample().Client
	c.Sticky = false // no matter of the protocol's
	same(t, c, ClientOf(c.Config(nil)))
	if got := c.Config(sampleLease()).Address; got != netip.MustParseAddr("192.0.2.9") {
		t.Errorf("asks for %s, want the last lease's address", got)
	}
}

func TestRecordsThatCannotBeUsedAreRefused(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*Record){
		"no network":             func(r *Record) { r.Network = "" },
		"container not UTF-8":    func(r *Record) { r.ContainerID = "\xff" },
		"no interface":           func(r *Record) { r.IfName = "" },
		"no token":               func(r *Record) { r.Token = "" },
		"no state":               func(r *Record) { r.State = "" },
		"bound without a lease":  func(r *Record) { r.Lease = nil },
		"sticky without an id":   func(r *Record) { r.State, r.Client.ClientID = Sticky, nil },
		"lease without a server": func(r *Record) { r.Lease.Server = netip.Addr{} },
		"no MAC":                 func(r *Record) { r.Client.MAC = nil },
		"too long":               func(r *Record) { r.Error = strings.Repeat("x", file.MaxRecord) },
	} {
		t.Run(name, func(t *testing.T) {
			r := sample()
			spoil(r)
			if line, err := encode(r); err == nil {
				t.Errorf("encoded as %s", line)
			}
			if _, err := decode(state.Encode(&r.Version, r)); name != "too long" && name != "container not UTF-8" && !errors.Is(err, file.ErrDamaged) {
				t.Errorf("decoded with %v, want %v", err, file.ErrDamaged)
			}
		})
	}
}

func TestLoadTellsWhatIsWrong(t *testing.T) {
	t.Parallel()
	line, err := encode(sample())
	if err != nil {
		t.Fatal(err)
	}
	hash := sample().Hash()
	for _, tt := range []struct {
		name string
		make func(path string) error
		want error
	}{
		{"nothing", func(string) error { return nil }, os.ErrNotExist},
		{"empty", write(nil), file.ErrDamaged},
		{"cut short", write(line[:len(line)/2]), file.ErrDamaged},
		{"zeroes", write(make([]byte, 512)), file.ErrDamaged},
		{"another's", write(bytes.Replace(line, []byte("abc123"), []byte("abc124"), 1)), file.ErrDamaged},
		{"no version", write(bytes.Replace(line, []byte(`"version":1,`), nil, 1)), file.ErrDamaged},
		{"a newer version", write([]byte(`{"version":4,"state":{"new":"shape"}}`)), state.ErrVersion},
		{"too large", write(append(bytes.Repeat([]byte(" "), file.MaxRecord), line...)), file.ErrDamaged},
		{"a symbolic link", func(path string) error { return os.Symlink("/etc/passwd", path) }, unix.ELOOP},
		{"a FIFO", func(path string) error { return unix.Mkfifo(path, 0o600) }, file.ErrDamaged},
		{"a directory", func(path string) error { return os.Mkdir(path, 0o700) }, unix.EISDIR},
		{"whole", write(line), nil},
		{"whole, with unknown members", write(bytes.Replace(line, []byte(`{`), []byte(`{"colour":"red",`), 1)), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := open(t)
			if err := d.Make(); err != nil {
				t.Fatal(err)
			}
			if err := tt.make(d.recordPath(hash)); err != nil {
				t.Fatal(err)
			}
			r, err := d.Load(hash)
			if !errors.Is(err, tt.want) {
				t.Fatalf("Load: %v, want %v", err, tt.want)
			}
			if tt.want == nil {
				same(t, sample(), r)
			}
			var bad *state.RecordError
			if err != nil && tt.want != os.ErrNotExist && (!errors.As(err, &bad) || bad.Hash != hash) {
				t.Errorf("%v is not a state.RecordError about %s", err, hash)
			}
		})
	}
}

func write(data []byte) func(string) error {
	return func(path string) error { return os.WriteFile(path, data, 0o600) }
}

func TestOnlyRecordsHaveTheirFileNames(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"0123456789a.json": "0123456789a", "0123456789a.lock": "", "0123456789a.json.damaged": "",
		".tmp-0123456789a": "", keeperLock: "", "x.json": "", ".json": "",
	} {
		if got, ok := RecordHash(name); got != want || ok != (want != "") {
			t.Errorf("RecordHash(%s) = %q, %t; want %q", name, got, ok, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	line, err := encode(sample())
	if err != nil {
		f.Fatal(err)
	}
	minimal := &Record{State: Adding, Token: "1", Network: "n", ContainerID: "c", IfName: "e", Client: Client{MAC: dhcpc.Hex{2, 0, 0, 0, 0, 1}}}
	small, err := encode(minimal)
	if err != nil {
		f.Fatal(err)
	}
	host, err := encode(sampleHost())
	if err != nil {
		f.Fatal(err)
	}
	seeds := map[string][]byte{
		"whole": line, "minimal": small, "host": host, "cut": line[:100], "null": []byte("null"), "newer": []byte(`{"version":9}`),
		"null-lease": bytes.Replace(line, []byte(`"lease":{`), []byte(`"lease":null,"x":{`), 1),
	}
	for name, data := range seeds {
		f.Add(data)
		if golden.Updates() {
			nstest.SaveCorpus(f, "FuzzDecode", name, data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decode(data)
		if err != nil {
			if !errors.Is(err, file.ErrDamaged) && !errors.Is(err, state.ErrVersion) {
				t.Errorf("%v is neither damage nor a version", err)
			}
			return
		}
		// What is good once stays so, and can be worked with.
		again, err := encode(r)
		if err != nil && len(data) < file.MaxRecord/8 {
			t.Fatalf("decoded, but does not encode: %v", err)
		}
		if err == nil {
			got, err := decode(again)
			if err != nil {
				t.Fatalf("encoded as %s, but does not decode: %v", again, err)
			}
			if got.Hash() != r.Hash() || fmt.Sprint(got.Applied) != fmt.Sprint(r.Applied) {
				t.Errorf("%+v became %+v", r, got)
			}
		}
		if r.Lease != nil {
			r.Policy.Apply(r.Lease)
			left(r, at(0))
			EntryOf(r, at(0))
		}
	})
}

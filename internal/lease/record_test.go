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
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestTheFormatOfRecordsStaysWhatItIs(t *testing.T) {
	t.Parallel()
	// An upgraded keeper reads what the last one wrote.
	line := must.Of(encode(sample())).Get(t)
	var text bytes.Buffer
	must.Succeed(t, json.Indent(&text, line, "", "  "))
	golden.Compare(t, "record.json", text.Bytes())
	got := must.Of(decode(text.Bytes())).Get(t)
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
	r.Version = 1
	walk("Record", reflect.ValueOf(r))
	expect.That(t, unset == nil, "not set: %v", unset)
}

func TestClientKeepsItsConfiguration(t *testing.T) {
	t.Parallel()
	c := sample().Client
	c.Sticky = false // no matter of the protocol's
	same(t, c, ClientOf(c.DHCPConfig(nil)))
	expect.Equal(t, c.DHCPConfig(sampleLease()).Address, netip.MustParseAddr("192.0.2.9"), "asks for")
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
			line, err := encode(r)
			expect.That(t, err != nil, "encoded as %s", line)
			if _, err := decode(state.Encode(&r.Version, r)); name != "too long" && name != "container not UTF-8" && !errors.Is(err, file.ErrDamaged) {
				t.Errorf("decoded with %v, want %v", err, file.ErrDamaged)
			}
		})
	}
}

func TestLoadTellsWhatIsWrong(t *testing.T) {
	t.Parallel()
	line, err := encode(sample())
	must.Succeed(t, err)
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
			must.Succeed(t, os.MkdirAll(d.Path(), 0o700))
			must.Succeed(t, tt.make(d.recordPath(hash)))
			r, err := d.Load(hash)
			must.That(t, errors.Is(err, tt.want), "Load: %v, want %v", err, tt.want)
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
		got, ok := RecordHash(name)
		expect.That(t, (got == want || !ok) && ok == (want != ""), "RecordHash(%s) = %q, %t; want %q", name, got, ok, want)
	}
}

func FuzzDecode(f *testing.F) {
	line := must.Of(encode(sample())).Get(f)
	minimal := &Record{State: Adding, Token: "1", Network: "n", ContainerID: "c", IfName: "e", Client: Client{MAC: dhcpc.Hex{2, 0, 0, 0, 0, 1}}}
	small := must.Of(encode(minimal)).Get(f)
	seeds := map[string][]byte{
		"whole": line, "minimal": small, "cut": line[:100], "null": []byte("null"), "newer": []byte(`{"version":9}`),
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
			expect.That(t, errors.Is(err, file.ErrDamaged) || errors.Is(err, state.ErrVersion),
				"%v is neither damage nor a version", err)
			return
		}
		// What is good once stays so, and can be worked with.
		again, err := encode(r)
		must.That(t, err == nil || len(data) >= file.MaxRecord/8, "decoded, but does not encode: %v", err)
		if err == nil {
			got := must.Of(decode(again)).Get(t, "encoded as %s, but does not decode", again)
			expect.That(t, got.Hash() == r.Hash() && fmt.Sprint(got.Applied) == fmt.Sprint(r.Applied),
				"%+v became %+v", r, got)
		}
		if r.Lease != nil {
			r.Policy.Apply(r.Lease)
		}
	})
}

// boot is a Clock that tests change.
type boot struct {
	id string
	up time.Duration
}

func (b *boot) now() (string, time.Duration, error) { return b.id, b.up, nil }

func TestALeasesTimesAreFromTheBootWithinABootAndByTheWallClockInAnother(t *testing.T) {
	t.Parallel()
	const elapsed = 10 * time.Minute
	for name, c := range map[string]struct {
		now  boot
		left time.Duration // of an hour
	}{
		"at once":                       {boot{"a", 100 * time.Hour}, time.Hour},
		"later, or after a sleep":       {boot{"a", 100*time.Hour + elapsed}, time.Hour - elapsed},
		"after its end":                 {boot{"a", 102 * time.Hour}, 0},
		"in another boot":               {boot{"b", time.Second}, time.Hour},
		"in another that is up as long": {boot{"b", 100*time.Hour + elapsed}, time.Hour},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			d, clock := open(t), &boot{"a", 100 * time.Hour}
			d.Clock = clock.now
			r := sample()
			now := time.Now()
			r.Boot = "a"
			r.Lease.Obtained, r.Lease.Renew, r.Lease.Rebind, r.Lease.Expire = now, now.Add(30*time.Minute), now.Add(40*time.Minute), now.Add(time.Hour)
			r.Six.Lease.Obtained, r.Six.Lease.Renew, r.Six.Lease.Rebind, r.Six.Lease.Expire = now, now.Add(30*time.Minute), now.Add(40*time.Minute), now.Add(time.Hour)
			create(t, d, r)
			*clock = c.now
			got := must.Of(d.Load(r.Hash())).Get(t)
			for what, l := range map[string]interface{ Left(time.Time) time.Duration }{"lease": got.Lease, "DHCPv6 lease": got.Six.Lease} {
				left := l.Left(time.Now())
				expect.That(t, (left-c.left).Abs() <= time.Minute, "the %s has %v left, want %v", what, left, c.left)
			}
			expect.That(t, got.Lease.Renew.Sub(got.Lease.Obtained) == 30*time.Minute && r.Lease.Expire == now.Add(time.Hour),
				"it became %+v", got.Lease)
		})
	}
}

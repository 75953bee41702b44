package state

import (
	"encoding/json"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"

	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/nft"
)

// compare lets go-cmp look at netip's values.
var compare = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

var comparePrefix = cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })

// ignoreVersion leaves out what is set when a record is written.
var ignoreVersion = cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".Version" }, cmp.Ignore())

func diff(want, got any) string { return cmp.Diff(want, got, compare, comparePrefix, ignoreVersion) }

// fill sets every field of a record to something that is not its zero value, so that
// a field which somebody forgets to list in the codec shows.
func fill(t *testing.T, v reflect.Value, name string) {
	t.Helper()
	switch p := v.Addr().Interface().(type) {
	case *time.Time:
		*p = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
		return
	case *netip.Addr:
		*p = netip.MustParseAddr("fe80::1%eth0")
		return
	case *netip.Prefix:
		*p = netip.MustParsePrefix("192.0.2.7/24")
		return
	case *json.RawMessage:
		*p = json.RawMessage(`{"a":[1,"]}"]}`)
		return
	case *State:
		*p = Ready
		return
	case *MAC:
		*p = MAC{2, 0, 0, 0, 0, 1}
		return
	case *nft.Protocol:
		*p = 17
		return
	case *nft.Policy:
		*p = nft.Isolated
		return
	case *vlan.Ranges:
		*p = vlan.Ranges{{First: 2, Last: 4}, {First: 100, Last: 100}}
		return
	case *map[netip.Prefix]netip.Addr:
		*p = map[netip.Prefix]netip.Addr{netip.MustParsePrefix("192.0.2.7/24"): netip.MustParseAddr("192.0.2.1"), netip.MustParsePrefix("fd00::7/64"): netip.MustParseAddr("fd00::1")}
		return
	case *[]netlink.Attribute:
		return // those of routes of others
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString("a " + name + " of \"ü\\\x01")
	case reflect.Int, reflect.Int64:
		v.SetInt(-int64(len(name)))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(1<<v.Type().Bits() - 1)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem())) // to false: set, and yet zero
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(t, v.Index(0), name)
		fill(t, v.Index(1), name)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).Tag.Get("json") == "-" {
				continue // it is not on record
			}
			fill(t, v.Field(i), v.Type().Field(i).Name)
		}
	default:
		t.Fatalf("%s: fill knows no %s", name, v.Kind())
	}
}

func TestRecordsComeBackAsTheyAre(t *testing.T) {
	t.Parallel()
	for name, record := range map[string]any{"attachment": new(Attachment), "network": new(Network), "epoch": new(Epoch), "contested": new(Contested)} {
		v := reflect.ValueOf(record).Elem()
		fill(t, v, name)
		at := v.FieldByName("Version").Addr().Interface().(*int)
		ours := Encode(at, record)
		theirs := must.Of(json.Marshal(record)).Get(t)
		expect.NoDiff(t, cmp.Diff(string(theirs)+"\n", string(ours)), "encode differs from json.Marshal")
		back := reflect.New(v.Type())
		must.Succeed(t, strict.Unmarshal(ours, back.Interface(), strict.Everything).First())
		expect.NoDiff(t, diff(record, back.Interface()), "decode of what encode wrote")
	}
}

// The golden files are what nodes in the field have on disk.
func TestRecordsKeepTheirFormat(t *testing.T) {
	t.Parallel()
	d, _ := newDirOn(t)
	l, epoch, err := d.Enter(t.Context())
	must.Succeed(t, err)
	epoch.ID = "00112233445566778899aabbccddeeff"
	must.Succeed(t, l.Close())
	a := sample("0123456789abcdef")
	p := pending(t, d, a)
	must.Succeed(t, p.Commit(a))
	n := sampleNetwork("cbr0")
	must.Succeed(t, d.SaveNetwork(n))
	networkPath := must.Of(d.networkPath("cbr0")).Get(t)
	golden.Compare(t, "attachment.json", mustRead(t, recordPath(t, d, a)))
	golden.Compare(t, "network.json", mustRead(t, networkPath))
	golden.Compare(t, "epoch.json", string(Encode(&epoch.Version, &epoch)))
}

func TestDecodeSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		text string
		is   error
		says string
	}{
		"nothing":             {"", ErrDamaged, "it ends too early"},
		"NUL bytes":           {"\x00\x00\x00\x00", ErrDamaged, "not valid JSON"},
		"cut short":           {`{"version":1,"name":"cb`, ErrDamaged, "it ends too early"},
		"two documents":       {`{"version":1}{"version":1}`, ErrDamaged, "more after its end"},
		"not an object":       {`[1]`, ErrDamaged, "expected an object"},
		"no version":          {`{"name":"cbr0"}`, ErrDamaged, "no version"},
		"negative version":    {`{"version":-1,"name":"cbr0"}`, ErrDamaged, "no version"},
		"version in words":    {`{"version":"one","name":"cbr0"}`, ErrDamaged, `"version"`},
		"newer version":       {`{"version":2,"name":{"an":"object now"}}`, ErrVersion, "version 2, and this tombolo reads up to 1"},
		"no name":             {`{"version":1}`, ErrDamaged, "it is empty"},
		"odd name":            {`{"version":1,"name":"../x"}`, ErrDamaged, "bad name"},
		"number for a string": {`{"version":1,"name":7}`, ErrDamaged, `"name": expected a string`},
		"object for a list":   {`{"version":1,"name":"n","subnets":{}}`, ErrDamaged, `"subnets": expected a list`},
		"no prefix":           {`{"version":1,"name":"n","subnets":["10.1.0.0"]}`, ErrDamaged, `"subnets[0]"`},
		"no policy":           {`{"version":1,"name":"n","policy":"none"}`, ErrDamaged, `"policy"`},
		"null in a list":      {`{"version":1,"name":"n","subnets":[null]}`, ErrDamaged, "not a valid prefix"},
	}
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			_, err := decodeNetwork([]byte(test.text))
			expect.That(t, errors.Is(err, test.is) && strings.Contains(err.Error(), test.says),
				"got %v, want %v that says %q", err, test.is, test.says)
		})
	}
}

func TestAttachmentsThatCannotBeUsedAreDamaged(t *testing.T) {
	t.Parallel()
	good := `"version":1,"state":"ready","network":"n","containerID":"c","ifName":"eth0"`
	tests := map[string]string{
		`"bandwidth":{"ingress":{"rate":"8 bit"}}`: `"bandwidth.ingress.rate": expected a whole number`,
		`"addresses":[{}]`:                         "no valid prefix",
		`"created":"yesterday"`:                    `"created"`,
		`"state":"done"`:                           "twice",
		`"hairpin":"yes"`:                          `"hairpin": expected true or false`,
		`"mac":"02:00:00:00:00"`:                   `"mac"`,
		`"hostMAC":"02:00:00:00:00:00:00:01"`:      "8 bytes",
		`"vlan":{"id":65536}`:                      `"vlan.id"`,
		`"vlan":{"trunk":"4-2"}`:                   `"4-2" names no VLANs`,
		`"routes":[{"dst":"10.0.0.0"}]`:            `"routes[0].dst"`,
		`"portSNAT":"some"`:                        `"portSNAT"`,
		`"published":[{"protocol":"icmp","hostPort":1,"podPort":1}]`:    `"published[0].protocol"`,
		`"published":[{"protocol":"tcp","hostPort":65536,"podPort":1}]`: `"published[0].hostPort"`,
		`"published":[{"protocol":"tcp","hostPort":1}]`:                 "publishes port 0 as 1/tcp",
	}
	must.Succeed(t, expect.Err(decodeAttachment([]byte("{"+good+"}"))), "the record that the cases spoil")
	for member, says := range tests {
		_, err := decodeAttachment([]byte("{" + good + "," + member + "}"))
		expect.That(t, errors.Is(err, ErrDamaged) && strings.Contains(err.Error(), says),
			"%s: got %v, want ErrDamaged that says %q", member, err, says)
	}
}

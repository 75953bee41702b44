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

	"github.com/tombolo-cni/tombolo/internal/golden"
)

// compare lets go-cmp look at netip's values.
var compare = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

var comparePrefix = cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })

func diff(want, got any) string { return cmp.Diff(want, got, compare, comparePrefix) }

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
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString("a " + name + " of \"ü\\\x01")
	case reflect.Int, reflect.Int64:
		v.SetInt(-int64(len(name)))
	case reflect.Uint64:
		v.SetUint(1<<64 - 1)
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

// A recordType is a type of record with what moves it.
type recordType struct {
	value  any // pointer to the zero record
	fields func(any) func(*codec)
}

func recordTypes() map[string]recordType {
	return map[string]recordType{
		"attachment": {new(Attachment), func(v any) func(*codec) { return v.(*Attachment).fields }},
		"network":    {new(Network), func(v any) func(*codec) { return v.(*Network).fields }},
		"epoch":      {new(Epoch), func(v any) func(*codec) { return v.(*Epoch).fields }},
	}
}

type addressOnRecord struct {
	Prefix    netip.Prefix `json:"prefix"`
	Gateway   netip.Addr   `json:"gateway,omitzero"`
	Host      netip.Addr   `json:"through,omitzero"`
	HostAtADD netip.Addr   `json:"throughAtADD,omitzero"`
}

// asOnRecord gives a record as a value that encoding/json writes by its tags alone: of an
// attachment, a struct with the addresses as they are on record.
func asOnRecord(record any) any {
	a, ok := record.(*Attachment)
	if !ok {
		return record
	}
	from := reflect.ValueOf(a).Elem()
	fields := make([]reflect.StructField, from.NumField())
	for i := range fields {
		fields[i] = from.Type().Field(i)
		if fields[i].Name == "Addresses" {
			fields[i].Type = reflect.TypeFor[[]addressOnRecord]()
		}
	}
	to := reflect.New(reflect.StructOf(fields)).Elem()
	for i := range fields {
		if fields[i].Name == "Addresses" {
			var list []addressOnRecord
			for _, one := range a.Addresses {
				host := a.HostGateways.Of(one.Prefix)
				list = append(list, addressOnRecord{one.Prefix, one.Gateway, host.Host, host.HostAtADD})
			}
			to.Field(i).Set(reflect.ValueOf(list))
			continue
		}
		to.Field(i).Set(from.Field(i))
	}
	return to.Interface()
}

func TestCodecAgreesWithEncodingJSON(t *testing.T) {
	t.Parallel()
	for name, r := range recordTypes() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fill(t, reflect.ValueOf(r.value).Elem(), name)
			if a, ok := r.value.(*Attachment); ok {
				a.Addresses[1].Prefix = netip.MustParsePrefix("2001:db8::7/64")
				a.HostGateways = HostGateways{
					{a.Addresses[0].Prefix, netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")},
					{a.Addresses[1].Prefix, netip.MustParseAddr("2001:db8::1"), netip.Addr{}},
				}
			}
			ours := encode(r.fields(r.value))
			theirs, err := json.Marshal(asOnRecord(r.value))
			if err != nil {
				t.Fatal(err)
			}
			want := `{"version":1,` + string(theirs[1:]) + "\n"
			if d := cmp.Diff(want, string(ours)); d != "" {
				t.Errorf("encode differs from json.Marshal (-want +got):\n%s", d)
			}
			back := reflect.New(reflect.TypeOf(r.value).Elem()).Interface()
			if err := decode(ours, r.fields(back)); err != nil {
				t.Fatal(err)
			}
			if d := diff(r.value, back); d != "" {
				t.Errorf("decode of what encode wrote (-want +got):\n%s", d)
			}
		})
	}
}

func TestCodecLeavesOutWhatIsZero(t *testing.T) {
	t.Parallel()
	for name, r := range recordTypes() {
		if got := string(encode(r.fields(r.value))); got != "{\"version\":1}\n" {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// The golden files are what nodes in the field have on disk.
func TestRecordsKeepTheirFormat(t *testing.T) {
	t.Parallel()
	d, _ := newDirOn(t)
	l, epoch, err := d.Enter(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	epoch.ID = "00112233445566778899aabbccddeeff"
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	a := sample("0123456789abcdef")
	p := pending(t, d, a)
	if err := p.Commit(a); err != nil {
		t.Fatal(err)
	}
	n := sampleNetwork("cbr0")
	if err := d.SaveNetwork(n); err != nil {
		t.Fatal(err)
	}
	networkPath, err := d.networkPath("cbr0")
	if err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "attachment.json", mustRead(t, recordPath(t, d, a)))
	golden.Compare(t, "network.json", mustRead(t, networkPath))
	golden.Compare(t, "epoch.json", string(encode(epoch.fields)))
}

func TestDecodeReadsJSONAsPeopleWriteIt(t *testing.T) {
	t.Parallel()
	text := " {\n\t\"version\" : 1 ,\r\n \"unknown\": {\"a\": [1, {\"}\": \"]\"}], \"b\": null},\n" +
		"\"n\\u0061me\": \"first\", \"name\" :\"\\u0063br0\" , \"mtu\": null, \"gateways\": [ \"10.1.0.1/24\" , \"fd00::1/64\"] ,\"held\": [ {\"gateway\":\"10.1.0.1/24\" , \"attachment\": \"a\"}, { } ] ,\"admissions\": [ {\"ipv6\":true , \"handle\": 7}, { } ] }\n"
	n, err := decodeNetwork([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	want := &Network{
		Name:     "cbr0",
		Gateways: []netip.Prefix{netip.MustParsePrefix("10.1.0.1/24"), netip.MustParsePrefix("fd00::1/64")},
		Held:     []Held{{Gateway: netip.MustParsePrefix("10.1.0.1/24"), Attachment: "a"}, {}},
	}
	if d := diff(want, n); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestDecodeSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		text string
		is   error
		says string
	}{
		"nothing":                  {"", ErrDamaged, "not whole JSON"},
		"blanks":                   {" \n\n", ErrDamaged, "not whole JSON"},
		"NUL bytes":                {"\x00\x00\x00\x00", ErrDamaged, "not whole JSON"},
		"cut short":                {`{"version":1,"name":"cb`, ErrDamaged, "not whole JSON"},
		"two documents":            {`{"version":1}{"version":1}`, ErrDamaged, "not whole JSON"},
		"not an object":            {`[1]`, ErrDamaged, "want an object"},
		"a bare word":              {`null`, ErrDamaged, "want an object"},
		"no version":               {`{"name":"cbr0"}`, ErrDamaged, "no version"},
		"version zero":             {`{"version":0,"name":"cbr0"}`, ErrDamaged, "no version"},
		"negative version":         {`{"version":-1,"name":"cbr0"}`, ErrDamaged, "no version"},
		"version in words":         {`{"version":"one","name":"cbr0"}`, ErrDamaged, "version:"},
		"version with a point":     {`{"version":1.5}`, ErrDamaged, "version:"},
		"newer version":            {`{"version":2,"name":{"an":"object now"}}`, ErrVersion, "version 2, and this tombolo reads up to 1"},
		"version out of range":     {`{"version":99999999999999999999}`, ErrDamaged, "version:"},
		"no name":                  {`{"version":1}`, ErrDamaged, "it is empty"},
		"odd name":                 {`{"version":1,"name":"../x"}`, ErrDamaged, "bad name"},
		"number for a string":      {`{"version":1,"name":7}`, ErrDamaged, "name: want a string"},
		"string for a number":      {`{"version":1,"name":"n","mtu":"1500"}`, ErrDamaged, "mtu:"},
		"object for a list":        {`{"version":1,"name":"n","subnets":{}}`, ErrDamaged, "subnets: want a list"},
		"no address":               {`{"version":1,"name":"n","subnets":["10.1.0.0"]}`, ErrDamaged, "subnets:"},
		"null in a list":           {`{"version":1,"name":"n","subnets":[null]}`, ErrDamaged, "subnets: want a string"},
		"prefix longer than an IP": {`{"version":1,"name":"n","gateways":["10.1.0.1/33"]}`, ErrDamaged, "gateways:"},
	}
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			_, err := decodeNetwork([]byte(test.text))
			if !errors.Is(err, test.is) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want %v that says %q", err, test.is, test.says)
			}
		})
	}
}

func TestDecodeRefusesWrongKindsInAnAttachment(t *testing.T) {
	t.Parallel()
	good := `"version":1,"state":"ready","network":"n","containerID":"c","ifName":"eth0"`
	tests := map[string]string{
		`"up":1`:                                     "up: want true or false",
		`"port":[]`:                                  "port: want an object",
		`"port":{"hairpin":"yes"}`:                   "port: hairpin: want true or false",
		`"addresses":[{"prefix":"x"}]`:               "addresses: prefix:",
		`"addresses":[{}]`:                           "no valid prefix",
		`"addresses":[7]`:                            "addresses: want an object",
		`"created":"yesterday"`:                      "created:",
		`"created":"0000-01-01T00:00:00+23:59"`:      "beyond RFC 3339",
		`"netnsCookie":-1`:                           "netnsCookie:",
		`"state":"done"`:                             `its state is "done"`,
		`"containerID":""`:                           "container ID: bad name",
		`"addresses":[{"prefix":"10.0.0.1/8"},null]`: "addresses: want an object",
	}
	if _, err := decodeAttachment([]byte("{" + good + "}")); err != nil {
		t.Fatalf("the record that the cases spoil: %v", err)
	}
	for member, says := range tests {
		_, err := decodeAttachment([]byte("{" + good + "," + member + "}"))
		if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: got %v, want ErrDamaged that says %q", member, err, says)
		}
	}
}

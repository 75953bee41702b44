package strict_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// netconf has every kind of field that our configs use.
type netconf struct {
	Name      string          `json:"name"`
	Bridge    string          `json:"bridge,omitempty"`
	IsGateway *bool           `json:"isGateway"`
	MTU       uint16          `json:"mtu"`
	Metric    int             `json:"metric"`
	Small     int8            `json:"small"`
	Hidden    string          `json:"-"`
	Untagged  string          // takes "Untagged"
	Timeout   seconds         `json:"timeout"`
	MAC       macAddress      `json:"mac"`
	IPAM      ipamConf        `json:"ipam"`
	Raw       json.RawMessage `json:"raw"`
	Labels    map[string]int  `json:"labels"`
	Any       any             `json:"any"`
	Pair      [2]int          `json:"pair"`
	Foreign   *reference      `json:"foreign"`
}

type ipamConf struct {
	Inline
	Type   string         `json:"type"`
	Ranges [][]inlineConf `json:"ranges"`
	Names  []string       `json:"names"`
}

// Inline is exported so that a pointer to it can be made.
type Inline struct {
	Subnet     netip.Prefix `json:"subnet"`
	RangeStart netip.Addr   `json:"rangeStart"`
}

type inlineConf struct {
	Subnet     netip.Prefix `json:"subnet"`
	RangeStart netip.Addr   `json:"rangeStart"`
	RangeEnd   netip.Addr   `json:"rangeEnd"`
}

// seconds words its own expectation.
type seconds string

func (s *seconds) UnmarshalText(text []byte) error {
	if !strings.HasSuffix(string(text), "s") {
		return errors.New("not a duration")
	}
	*s = seconds(text)
	return nil
}

func (s *seconds) JSONExpects() string { return `a duration like "5s"` }

var errMAC = errors.New("invalid MAC")

// macAddress leaves the wording to its error.
type macAddress string

func (m *macAddress) UnmarshalText(text []byte) error {
	if _, err := net.ParseMAC(string(text)); err != nil {
		return errMAC
	}
	*m = macAddress(text)
	return nil
}

// reference is a type that decodes itself with encoding/json, as those of the CNI library do.
type reference struct{ Number int }

func (r *reference) UnmarshalJSON(data []byte) error {
	var inner struct {
		Number int `json:"number"`
	}
	if err := json.Unmarshal(data, &inner); err != nil {
		return err
	}
	r.Number = inner.Number
	return nil
}

func TestUnmarshalStoresWhatEncodingJSONStores(t *testing.T) {
	t.Parallel()
	tests := map[string]string{
		"empty object":                 `{}`,
		"white space":                  " \t\r\n{ \"name\" : \"a\" , \"mtu\" : 1 } \n",
		"scalars":                      `{"name":"a","bridge":"b","isGateway":true,"mtu":65535,"metric":-3,"small":-128,"Untagged":"u"}`,
		"false":                        `{"isGateway":false}`,
		"escapes and unicode":          `{"name":"\u0041\n\"\\\/\b\f\r\té\ud83d\ude00","bridge":"日本"}`,
		"invalid UTF-8":                "{\"name\":\"a\xffb\"}",
		"lone surrogate":               `{"name":"\ud800"}`,
		"escaped key":                  `{"n\u0061me":"a"}`,
		"nested lists":                 `{"ipam":{"type":"x","ranges":[[{"subnet":"10.0.0.0/8"}],[{"subnet":"fd00::/64"},{}],[]],"names":[]}}`,
		"embedded struct":              `{"ipam":{"subnet":"10.0.0.0/8","rangeStart":"10.0.0.9"}}`,
		"null everywhere":              `{"name":null,"isGateway":null,"mtu":null,"timeout":null,"ipam":null,"raw":null,"labels":null,"any":null,"pair":null,"foreign":null}`,
		"null inside":                  `{"ipam":{"ranges":[null,[null]],"names":null,"subnet":null}}`,
		"opaque values":                `{"raw":{"a":[1, 2]},"labels":{"x":1},"any":{"a":[true,null,"s",1.5]},"pair":[1,2]}`,
		"self-unmarshalling":           `{"timeout":"5s","mac":"02:00:00:00:00:01","foreign":{"number":3,"other":4}}`,
		"numbers with signs and zeros": `{"metric":-0,"small":0}`,
	}
	for name, data := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got, want netconf
			must.Succeed(t, json.Unmarshal([]byte(data), &want), "encoding/json")
			must.Succeed(t, unmarshal([]byte(data), &got, nil), "Unmarshal")
			diff := cmp.Diff(want, got, compareAddrs()...)
			expect.That(t, diff == "", "(-encoding/json +strict)\n%s", diff)
		})
	}
}

func compareAddrs() []cmp.Option {
	return []cmp.Option{
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
		cmp.AllowUnexported(ipamConf{}),
		cmpopts.EquateEmpty(),
	}
}

func TestUnmarshalExplainsWhatIsWrong(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ data, want string }{
		"unknown field": {
			`{"name":"a","isGatway":true}`,
			`unknown field "isGatway": true (did you mean "isGateway"?)`,
		},
		"wrong case": {
			`{"isgateway":true}`,
			`unknown field "isgateway": true (did you mean "isGateway"?)`,
		},
		"untagged field in lower case": {
			`{"untagged":"x"}`,
			`unknown field "untagged": "x" (did you mean "Untagged"?)`,
		},
		"nothing near": {
			`{"frobnicate":{"a": [1, 2]}}`,
			`unknown field "frobnicate": {"a":[1,2]}`,
		},
		"short key has no neighbours": {
			`{"x":1}`,
			`unknown field "x": 1`,
		},
		"field that is switched off": {
			`{"Hidden":"x"}`,
			`unknown field "Hidden": "x"`,
		},
		"nested in lists": {
			`{"ipam":{"ranges":[[{"subnet":"10.0.0.0/8"},{"rangeStrat":"10.0.0.2"}]]}}`,
			`unknown field "ipam.ranges[0][1].rangeStrat": "10.0.0.2" (did you mean "rangeStart"?)`,
		},
		"promoted field is a candidate": {
			`{"ipam":{"subent":"10.0.0.0/8"}}`,
			`unknown field "ipam.subent": "10.0.0.0/8" (did you mean "subnet"?)`,
		},
		"long value is cut at a rune": {
			`{"frobnicate":"` + strings.Repeat("é", 60) + `"}`,
			`unknown field "frobnicate": "` + strings.Repeat("é", 31) + `…`,
		},
		"first of several, in the document's order": {
			`{"mtu":1,"zzz":1,"isGatway":2}`,
			`unknown field "zzz": 1`,
		},
		"duplicate": {
			`{"name":"a","mtu":1,"name":"a"}`,
			`field "name" is given twice`,
		},
		"duplicate by escapes": {
			`{"name":"a","n\u0061me":"b"}`,
			`field "name" is given twice`,
		},
		"nested duplicate": {
			`{"ipam":{"type":"a","type":"b"}}`,
			`field "ipam.type" is given twice`,
		},
		"string for a number": {
			`{"mtu":"1500"}`,
			`field "mtu": expected a whole number from 0 to 65535, got the string "1500"`,
		},
		"number out of range": {
			`{"mtu":70000}`,
			`field "mtu": expected a whole number from 0 to 65535, got the number 70000`,
		},
		"negative number out of range": {
			`{"small":-129}`,
			`field "small": expected a whole number from -128 to 127, got the number -129`,
		},
		"fraction for a whole number": {
			`{"metric":1.5}`,
			`field "metric": expected a whole number, got the number 1.5`,
		},
		"string for a boolean": {
			`{"isGateway":"true"}`,
			`field "isGateway": expected true or false, got the string "true"`,
		},
		"number for a string": {
			`{"name":1}`,
			`field "name": expected a string, got the number 1`,
		},
		"string for an object": {
			`{"ipam":"host-local"}`,
			`field "ipam": expected an object, got the string "host-local"`,
		},
		"object for a list": {
			`{"ipam":{"ranges":{}}}`,
			`field "ipam.ranges": expected a list, got an object`,
		},
		"element of a wrong type": {
			`{"ipam":{"names":["a",true]}}`,
			`field "ipam.names[1]": expected a string, got true`,
		},
		"bad address": {
			`{"ipam":{"rangeStart":"10.0.0.256"}}`,
			`field "ipam.rangeStart": expected an IP address, got the string "10.0.0.256"`,
		},
		"number for an address": {
			`{"ipam":{"rangeStart":10}}`,
			`field "ipam.rangeStart": expected an IP address, got the number 10`,
		},
		"bad prefix": {
			`{"ipam":{"subnet":"10.0.0.0"}}`,
			`field "ipam.subnet": expected an address with a prefix length, like "10.1.0.0/16", got the string "10.0.0.0"`,
		},
		"a type with words of its own": {
			`{"timeout":"5"}`,
			`field "timeout": expected a duration like "5s", got the string "5"`,
		},
		"a type with an error of its own": {
			`{"mac":"02:00"}`,
			`field "mac" does not take the string "02:00": invalid MAC`,
		},
		"a number for a type that takes text": {
			`{"mac":2}`,
			`field "mac": expected a string, got the number 2`,
		},
		"a type that decodes with encoding/json": {
			`{"foreign":"x"}`,
			`field "foreign": expected an object, got the string "x"`,
		},
		"a map's element": {
			`{"labels":{"a":"b"}}`,
			`field "labels": expected an object, got an object: json: cannot unmarshal string into Go value of type int`,
		},
		"top level is a list":   {`[1]`, `the document: expected an object, got a list`},
		"top level is a string": {`"x"`, `the document: expected an object, got the string "x"`},
		"top level is null":     {`null`, `the document: expected an object, got null`},
		"nothing":               {``, `not valid JSON at line 1, column 1: it ends too early`},
		"rubbish":               {`ö`, `not valid JSON at line 1, column 1: invalid character 'ö' at start of value`},
		"trailing garbage":      {`{} x`, `not valid JSON at line 1, column 4: there is more after its end`},
		"second object":         {`{}{}`, `not valid JSON at line 1, column 3: there is more after its end`},
		"line and column":       {"{\n \"name\": \"a\",\n \"mtu\" 1}", `not valid JSON at line 3, column 8: invalid character '1' after object name (expecting ':')`},
		"cut short":             {`{"name":"a`, `not valid JSON at line 1, column 11: it ends too early`},
		"cut before a value":    {`{"ipam":`, `not valid JSON at line 1, column 9: it ends too early`},
		"cut in an escape":      {`{"name":"a\`, `not valid JSON at line 1, column 11: it ends too early`},
		"bad escape":            {`{"name":"\x"}`, "not valid JSON at line 1, column 10: invalid escape sequence `\\x` in string"},
		"bad unicode escape":    {`{"name":"\u00g0"}`, "not valid JSON at line 1, column 10: invalid escape sequence `\\u00g0` in string"},
		"newline in a string":   {"{\"name\":\"a\nb\"}", `not valid JSON at line 1, column 11: invalid character '\n' in string (expecting non-control character)`},
		"trailing comma":        {`{"mtu":1,}`, `not valid JSON at line 1, column 9: a comma with no value before or after it`},
		"trailing comma, list":  {`{"ipam":{"names":["a",]}}`, `not valid JSON at line 1, column 22: a comma with no value before or after it`},
		"missing comma":         {`{"mtu":1 "name":"a"}`, `not valid JSON at line 1, column 10: invalid character '"' after object value (expecting ',' or '}')`},
		"missing comma, list":   {`{"ipam":{"names":["a" "b"]}}`, `not valid JSON at line 1, column 23: invalid character '"' after array element (expecting ',' or ']')`},
		"leading zero":          {`{"mtu":01}`, `not valid JSON at line 1, column 9: invalid character '1' after object value (expecting ',' or '}')`},
		"bare point":            {`{"metric":1.}`, `not valid JSON at line 1, column 13: invalid character '}' in number (expecting digit)`},
		"bare exponent":         {`{"metric":1e+}`, `not valid JSON at line 1, column 14: invalid character '}' in number (expecting digit)`},
		"bare minus":            {`{"metric":-}`, `not valid JSON at line 1, column 12: invalid character '}' in number (expecting digit)`},
		"misspelt literal":      {`{"isGateway":True}`, `not valid JSON at line 1, column 14: invalid character 'T' at start of value`},
		"cut literal":           {`{"isGateway":tru}`, `not valid JSON at line 1, column 17: invalid character '}' in literal true (expecting 'e')`},
		"cut null":              {`{"name":nul}`, `not valid JSON at line 1, column 12: invalid character '}' in literal null (expecting 'l')`},
		"a comment":             {`{"mtu":1 /* x */}`, `not valid JSON at line 1, column 10: invalid character '/' after object value (expecting ',' or '}')`},
		"nested too deeply": {
			`{"raw":` + strings.Repeat("[", 200000),
			`not valid JSON at line 1, column 10007: exceeded max depth`,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var v netconf
			err := unmarshal([]byte(tt.data), &v, nil)
			got := fmt.Sprint(err)
			expect.That(t, got == tt.want, "Unmarshal(%.60s)\n got %s\nwant %s", tt.data, got, tt.want)
		})
	}
}

// unmarshal gives the first problem, and lenient all where unknown keys are passed over.
func unmarshal(data []byte, v any, exempt strict.Exempt) error {
	return strict.Unmarshal(data, v, exempt).First()
}

// has reports whether an error is, or joins, a strict error of a kind.
func has(err error, kind strict.Kind) bool {
	all := []error{err}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		all = joined.Unwrap()
	}
	return slices.ContainsFunc(all, func(one error) bool {
		var found *strict.Error
		return errors.As(one, &found) && found.Kind == kind
	})
}

func lenient(data []byte, v any) error {
	return errors.Join(strict.Unmarshal(data, v, strict.Everything)...)
}

func TestErrorsCanBeTakenApart(t *testing.T) {
	t.Parallel()
	var v netconf

	for _, want := range []strict.Error{
		{Kind: strict.Unknown, Path: "ipam.tipe", Text: `unknown field "ipam.tipe": "x" (did you mean "type"?)`},
		{Kind: strict.Duplicate, Path: "mtu", Text: `field "mtu" is given twice`},
		{Kind: strict.Syntax, Text: "not valid JSON at line 2, column 2: there is more after its end"},
	} {
		data := map[strict.Kind]string{strict.Unknown: `{"ipam":{"tipe": "x"}}`, strict.Duplicate: `{"mtu":1,"mtu":2}`,
			strict.Syntax: "{\n}}"}[want.Kind]
		var found *strict.Error
		err := unmarshal([]byte(data), &v, nil)
		expect.That(t, errors.As(err, &found) && *found == want, "%s: got %#v, want %#v", data, found, want)
	}

	err := unmarshal([]byte(`{"mac":"x"}`), &v, nil)
	expect.Is(t, err, errMAC, "the error of a type is lost")
}

func TestExemptKeysArePassedOver(t *testing.T) {
	t.Parallel()
	type call struct{ path, key string }
	var calls []call
	exempt := func(path, key string) bool {
		calls = append(calls, call{path, key})
		return strings.HasPrefix(key, "_") || path == "" && key == "capabilities"
	}
	var v netconf
	data := `{"_comment":{"a":[{}]},"name":"n","capabilities":{"ips":true},"ipam":{"ranges":[[{"_why":1}]],"capabilities":1}}`
	err := unmarshal([]byte(data), &v, exempt)
	if got, want := fmt.Sprint(err), `unknown field "ipam.capabilities": 1`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	want := []call{{"", "_comment"}, {"", "capabilities"}, {"ipam.ranges[0][0]", "_why"}, {"ipam", "capabilities"}}
	expect.NoDiff(t, cmp.Diff(want, calls, cmp.AllowUnexported(call{})), "calls of exempt")
	expect.Equal(t, v.Name, "n", "what came before the error is not stored: %+v", v)
}

func TestExemptValuesMustStillBeJSON(t *testing.T) {
	t.Parallel()
	var v netconf
	err := unmarshal([]byte(`{"_x":[1,}`), &v, func(string, string) bool { return true })
	expect.That(t, has(err, strict.Syntax), "got %v, want an error of syntax", err)
}

func TestLenientKeepsWhatIsSound(t *testing.T) {
	t.Parallel()
	var v netconf
	data := `{"mtu":"x","unknown":1,"name":"first","name":"last","ipam":{"type":5,"subnet":"10.0.0.0/8","names":["a",1,"c"]},"timeout":"5","foreign":"x","labels":[],"bridge":"b"}`
	err := lenient([]byte(data), &v)
	wantErr := strings.Join([]string{
		`field "mtu": expected a whole number from 0 to 65535, got the string "x"`,
		`field "name" is given twice`,
		`field "ipam.type": expected a string, got the number 5`,
		`field "ipam.names[1]": expected a string, got the number 1`,
		`field "timeout": expected a duration like "5s", got the string "5"`,
		`field "foreign": expected an object, got the string "x"`,
		`field "labels": expected an object, got a list: json: cannot unmarshal array into Go value of type map[string]int`,
	}, "\n")
	expect.NoDiff(t, cmp.Diff(wantErr, fmt.Sprint(err)), "error")
	expect.That(t, v.Name == "last" && v.Bridge == "b" && v.IPAM.Subnet.String() == "10.0.0.0/8",
		"sound fields are lost: %+v", v)
	expect.NoDiff(t, cmp.Diff([]string{"a", "", "c"}, v.IPAM.Names), "a bad element must not shift the others")
}

func TestLenientStopsAtRubbish(t *testing.T) {
	t.Parallel()
	var v netconf
	err := lenient([]byte(`{"name":"n","mtu":true,"bridge":}`), &v)
	expect.That(t, has(err, strict.Syntax) && has(err, strict.Value) && v.Name == "n", "got %+v, %v", v, err)
	if err := lenient([]byte(`{"name":"m"}`), &v); err != nil || v.Name != "m" {
		t.Errorf("sound document: %+v, %v", v, err)
	}
}

// What is wrong with a part is told by its place in the document.
func TestAPartIsCalledByItsPlace(t *testing.T) {
	t.Parallel()
	var v struct {
		List []struct{ Name string } `json:"list"`
	}
	for data, want := range map[string]string{
		`{"list":[{"Name":1}]}`: `field "ipam.list[0].Name": expected a string, got the number 1`,
		`{"list":[{"Nam":1}]}`:  `unknown field "ipam.list[0].Nam": 1 (did you mean "Name"?)`,
		`{"lst":[]}`:            `unknown field "ipam.lst": [] (did you mean "list"?)`,
		`7`:                     `field "ipam": expected an object, got the number 7`,
	} {
		expect.Equal(t, fmt.Sprint(strict.Part("ipam", []byte(data), &v, nil).First()), want, "%s", data)
	}
}

func TestOnlyPointersToStructsAreTargets(t *testing.T) {
	t.Parallel()
	var nothing *netconf
	for _, v := range []any{nil, netconf{}, nothing, new(int), new(map[string]int)} {
		expect.Says(t, unmarshal([]byte(`{}`), v, nil), "not a pointer to a struct", "Unmarshal into %T", v)
	}
}

func FuzzUnmarshal(f *testing.F) {
	f.Add([]byte(`{"ipam":{"subnet":"10.0.0.0/8","ranges":[[{"rangeEnd":"::1"}]]},"any":[{}],"labels":{"a":1}}`))
	f.Add([]byte(`{"name":"\u00e9\ud83d\ude00","small":-128,"pair":[1]}`))
	f.Add([]byte(`{"mtu":1,"mtu":2,"foreign":{"number":"x"},"timeout":null,"Isgateway":true}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var got, want netconf
		err := unmarshal(data, &got, nil)
		wantErr := json.Unmarshal(data, &want)
		if err == nil {
			must.Succeed(t, wantErr, "accepted %q, which encoding/json refuses", data)
			diff := cmp.Diff(want, got, compareAddrs()...)
			must.That(t, diff == "", "%q (-encoding/json +strict)\n%s", data, diff)
		}
		must.That(t, !has(err, strict.Syntax) || !json.Valid(data) || strings.Contains(err.Error(), "exceeded max depth"),
			"%q is valid JSON: %v", data, err)
		must.That(t, !has(err, strict.Value) || wantErr != nil || strings.HasPrefix(err.Error(), "the document"),
			"refused %q, which encoding/json takes: %v", data, err)
	})
}

// Structs without tags are marshalled with the names that they have in Go.
func TestWhereUnknownKeysArePassedOverCaseDoesNotMatter(t *testing.T) {
	t.Parallel()
	everything := func(string, string) bool { return true }
	var v struct {
		HostPort int `json:"hostPort"`
		Nested   struct {
			HostIP string `json:"hostIP"`
		} `json:"nested"`
	}
	must.Succeed(t, unmarshal([]byte(`{"HostPort":7,"Nested":{"HOSTIP":"a"},"Other":1}`), &v, everything))
	expect.That(t, v.HostPort == 7 && v.Nested.HostIP == "a", "got %+v", v)
	err := unmarshal([]byte(`{"HostPort":7,"hostPort":8}`), &v, everything)
	expect.That(t, has(err, strict.Duplicate), "two spellings of one key: %v", err)
	err = unmarshal([]byte(`{"HostPort":7}`), &v, nil)
	expect.That(t, has(err, strict.Unknown), "where nothing is passed over: %v", err)
}

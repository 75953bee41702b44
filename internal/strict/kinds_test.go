package strict_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

// kinds has a field of each kind that is decoded without encoding/json.
type kinds struct {
	Bool    bool
	String  string
	Int     int
	Int8    int8
	Int16   int16
	Int32   int32
	Int64   int64
	Uint    uint
	Uint8   uint8
	Uint16  uint16
	Uint32  uint32
	Uint64  uint64
	Pointer **int
	List    []string
	Lists   [][]int
	Structs []struct{ A int }
	Struct  *struct{ A int }
	Named   named
}

type named string

// TestEveryKindTakesWhatEncodingJSONTakes gives each field each value, and wants
// both decoders to agree on whether it is taken and what is stored.
func TestEveryKindTakesWhatEncodingJSONTakes(t *testing.T) {
	t.Parallel()
	values := []string{
		`null`, `true`, `false`, `""`, `"a"`, `"1"`, `"true"`, `{}`, `{"A":1}`, `{"A":null}`, `[]`, `[null]`, `["a","b"]`, `[[1],[],null,[2,3]]`,
		`[{"A":1},{}]`, `0`, `-0`, `1`, `-1`, `1.0`, `1.5`, `1e2`, `1E-2`, `127`, `128`, `-128`, `-129`, `255`, `256`, `32767`, `32768`, `65535`,
		`65536`, `2147483647`, `2147483648`, `4294967295`, `4294967296`, `9223372036854775807`, `9223372036854775808`, `-9223372036854775808`,
		`-9223372036854775809`, `18446744073709551615`, `18446744073709551616`, `3.4e38`, `3.5e38`, `1e308`, `1e309`,
	}
	typ := reflect.TypeFor[kinds]()
	for i := range typ.NumField() {
		name := typ.Field(i).Name
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, value := range values {
				data := []byte(`{"` + name + `":` + value + `}`)
				var got, want kinds
				err, wantErr := unmarshal(data, &got, nil), json.Unmarshal(data, &want)
				if (err == nil) != (wantErr == nil) {
					t.Errorf("%s: strict %v, encoding/json %v", data, err, wantErr)
					continue
				}
				diff := cmp.Diff(want, got, cmpopts.EquateEmpty())
				expect.That(t, err != nil || diff == "", "%s (-encoding/json +strict)\n%s", data, diff)
				expect.That(t, err == nil || strings.HasPrefix(err.Error(), `field "`+name),
					"%s: the error does not start with the field: %v", data, err)
			}
		})
	}
}

func TestNumbersOfSmallTypesNameTheirBounds(t *testing.T) {
	t.Parallel()
	for field, want := range map[string]string{
		"Int8":    "a whole number from -128 to 127",
		"Int16":   "a whole number from -32768 to 32767",
		"Int32":   "a whole number from -2147483648 to 2147483647",
		"Int64":   "a whole number",
		"Uint8":   "a whole number from 0 to 255",
		"Uint16":  "a whole number from 0 to 65535",
		"Uint32":  "a whole number from 0 to 4294967295",
		"Uint64":  "a whole number, not negative",
		"Pointer": "a whole number",
	} {
		var v kinds
		err := unmarshal([]byte(`{"`+field+`":"x"}`), &v, nil)
		expect.Equal(t, fmt.Sprint(err), fmt.Sprintf(`field %q: expected %s, got the string "x"`, field, want), "%s", field)
	}
}

// addresses has the types of package net that our configs use.
type addresses struct {
	Addr     netip.Addr
	Prefix   netip.Prefix
	IP       net.IP
	Optional *netip.Addr
	List     []netip.Prefix
}

func TestAddressesAreWordedForOperators(t *testing.T) {
	t.Parallel()
	for data, want := range map[string]string{
		`{"Addr":"x"}`:                 `field "Addr": expected an IP address, got the string "x"`,
		`{"Addr":["10.0.0.1"]}`:        `field "Addr": expected an IP address, got a list`,
		`{"Prefix":{"a":1}}`:           `field "Prefix": expected an address with a prefix length, like "10.1.0.0/16", got an object`,
		`{"IP":"10.0.0"}`:              `field "IP": expected an IP address, got the string "10.0.0"`,
		`{"Optional":true}`:            `field "Optional": expected an IP address, got true`,
		`{"List":["10.0.0.0/8","x/"]}`: `field "List[1]": expected an address with a prefix length, like "10.1.0.0/16", got the string "x/"`,
	} {
		var v addresses
		got := fmt.Sprint(unmarshal([]byte(data), &v, nil))
		expect.That(t, got == want, "%s\n got %s\nwant %s", data, got, want)
	}
	var v addresses
	data := `{"Addr":"","Prefix":"","IP":"","Optional":null,"List":[null,"fd00::/8"]}`
	expect.Success(t, unmarshal([]byte(data), &v, nil), "empty texts")
	expect.That(t, !v.Addr.IsValid() && !v.Prefix.IsValid() && v.Optional == nil && len(v.List) == 2, "empty texts: %+v", v)
}

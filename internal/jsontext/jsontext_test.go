package jsontext_test

import (
	"encoding/json"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/jsontext"
)

func FuzzAppendString(f *testing.F) {
	for _, s := range []string{"", "eth0", `a"b\c`, "\x00\x1f\x7f", "é\u2028", "\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		want, _ := json.Marshal(s)
		var a, b string
		if err := json.Unmarshal(want, &a); err != nil {
			t.Fatal(err)
		}
		got := jsontext.AppendString(nil, s)
		if err := json.Unmarshal(got, &b); err != nil || a != b {
			t.Errorf("%q became %s, which reads %q: %v", s, got, b, err)
		}
	})
}

func TestObjectLeavesOutWhatIsEmpty(t *testing.T) {
	t.Parallel()
	zero := 0
	o := jsontext.OpenObject([]byte("x="))
	o.String("none", "")
	o.Int("none", 0)
	o.IntPointer("none", nil)
	o.Strings("none", nil)
	o.String("s", "v")
	o.Int("i", -1)
	o.IntPointer("p", &zero)
	o.Strings("l", []string{"a", "b"})
	if got, want := string(o.Close()), `x={"s":"v","i":-1,"p":0,"l":["a","b"]}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if got := string(jsontext.OpenObject(nil).Close()); got != "{}" {
		t.Errorf("empty object: %s", got)
	}
}

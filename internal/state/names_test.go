package state

import (
	"errors"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestNetworkNames(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		name string
		ok   bool
	}{
		"usual":               {"cbr0", true},
		"all that is allowed": {"Net_1.2-3", true},
		"as long as can be":   {strings.Repeat("n", maxNetworkName), true},
		"empty":               {"", false},
		"too long":            {strings.Repeat("n", maxNetworkName+1), false},
		"parent":              {"..", false},
		"hidden":              {".hidden", false},
		"slash":               {"a/b", false},
		"up and away":         {"../../etc/x", false},
		"NUL":                 {"a\x00b", false},
		"newline":             {"a\n", false},
		"space":               {"a b", false},
		"not ASCII":           {"nétz", false},
		"not UTF-8":           {"a\xff", false},
		"starts with a dash":  {"-a", false},
	}
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			err := checkNetwork(test.name)
			expect.That(t, (!test.ok || err == nil) && (test.ok || errors.Is(err, ErrName)),
				"checkNetwork(%q) = %v, want ok %v", test.name, err, test.ok)
		})
	}
}

func TestBadNamesAreRefusedByEveryMethod(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	hash := ident.Hash("cbr0", "c", "eth0")
	calls := map[string]func(network, hash string) error{
		"Load":          func(n, h string) error { _, err := d.Load(n, h); return err },
		"Remove":        d.Remove,
		"List":          func(n, _ string) error { _, _, err := d.List(n); return err },
		"LoadNetwork":   func(n, _ string) error { _, err := d.LoadNetwork(n); return err },
		"SaveNetwork":   func(n, _ string) error { return d.SaveNetwork(&Network{Name: n}) },
		"RemoveNetwork": func(n, _ string) error { return d.RemoveNetwork(n) },
		"Create": func(n, _ string) error {
			_, err := d.Create(&Attachment{Network: n, ContainerID: "c", IfName: "eth0"})
			return err
		},
	}
	for what, call := range calls {
		expect.Is(t, call("../cbr0", hash), ErrName, "%s with network ../cbr0", what)
	}
	for _, hash := range []string{"", "..", "../../epoch", strings.ToUpper(hash), hash + "0", hash[:10] + "/", hash[:10] + "\x00"} {
		for _, what := range []string{"Load", "Remove"} {
			expect.Is(t, calls[what]("cbr0", hash), ErrName, "%s with hash %q", what, hash)
		}
	}
}

func TestCreateRefusesIdentitiesThatJSONCannotHold(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	tests := map[string]Attachment{
		"no container":           {Network: "cbr0", IfName: "eth0"},
		"no interface":           {Network: "cbr0", ContainerID: "c"},
		"container not UTF-8":    {Network: "cbr0", ContainerID: "c\xff", IfName: "eth0"},
		"interface not UTF-8":    {Network: "cbr0", ContainerID: "c", IfName: "\xc0\x80"},
		"container of NUL bytes": {Network: "cbr0\x00", ContainerID: "c", IfName: "eth0"},
	}
	for what, a := range tests {
		expect.Is(t, expect.Err(d.Create(&a)), ErrName, "%s", what)
	}
	odd := sample("quote\" backslash\\ newline\n NUL\x00 <&> \u2028 ü")
	create(t, d, odd)
	expect.Success(t, expect.Err(d.Load(odd.Network, odd.Hash())), "a container with odd characters")
}

func TestOpenRefusesPathsThatAreNoDirectory(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"", "run/tombolo", "./x", "/run/\x00"} {
		if d, err := Open(path); err == nil {
			t.Errorf("Open(%q) = %v, want an error", path, d.Path())
		}
	}
	d, err := Open("/run//tombolo/../tombolo/")
	expect.That(t, err == nil && d.Path() == DefaultDir, "Open = %v, %v, want %s", d, err, DefaultDir)
}

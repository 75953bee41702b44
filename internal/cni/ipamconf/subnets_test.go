package ipamconf

import (
	"strings"
	"testing"
)

func TestConfiguredSubnetsAreFound(t *testing.T) {
	t.Parallel()
	for ipam, want := range map[string]string{
		`{}`: "",
		`{"type": "host-local", "subnet": "10.1.0.0/16"}`:                                              "10.1.0.0/16",
		`{"type": "host-local", "subnet": "fd01::/64"}`:                                                "fd01::/64",
		`{"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/16"}], [{"subnet": "10.2.0.0/16"}]]}`: "10.1.0.0/16 10.2.0.0/16",
		`{"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/16"}], [{"subnet": "fd01::/64"}]]}`:   "10.1.0.0/16 fd01::/64",
		`{"type": "static", "addresses": [{"address": "10.1.0.2/16"}]}`:                                "10.1.0.0/16",
		`{"type": "static", "addresses": [{"address": "10.1.0.2/16"}, {"address": "fd01::2/64"}]}`:     "10.1.0.0/16 fd01::/64",
		// Not for it to say.
		`{"type": "host-local", "subnet": "fd01::"}`: "",
		`{"type": "another", "ranges": "fd01::/64"}`: "",
		`[`: "",
	} {
		got := ""
		for _, p := range Subnets([]byte(`{"name": "net", "ipam": ` + ipam + `}`)) {
			got += p.String() + " "
		}
		if got = strings.TrimSpace(got); got != want {
			t.Errorf("%s: %q, want %q", ipam, got, want)
		}
	}
}

package strict

import (
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestNearestFindsSlipsButNotStrangers(t *testing.T) {
	t.Parallel()
	names := []string{"bridge", "isGateway", "isDefaultGateway", "mtu", "ipMasq", "hairpinMode", "rangeStart", "gw"}
	tests := map[string]struct{ key, want string }{
		"letter missing":        {"isGatway", "isGateway"},
		"letter too much":       {"bridgee", "bridge"},
		"wrong letter":          {"brodge", "bridge"},
		"neighbours swapped":    {"rangeStrat", "rangeStart"},
		"wrong case":            {"HAIRPINMODE", "hairpinMode"},
		"three letters, one":    {"mut", "mtu"},
		"three letters, two":    {"tum", ""},
		"two letters":           {"gm", ""},
		"wrong case, two":       {"GW", "gw"},
		"two slips":             {"isDefaltGatway", ""},
		"another word":          {"vlan", ""},
		"monster":               {string(make([]byte, 1000)), ""},
		"empty":                 {"", ""},
		"the nearer of two":     {"isGatewa", "isGateway"},
		"not ASCII, same shape": {"brüdge", ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			expect.Equal(t, Nearest(tt.key, names), tt.want, "Nearest(%q)", tt.key)
		})
	}
}

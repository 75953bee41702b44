package strict

import "testing"

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
		"three slips":           {"isDefaltGatwy", "isDefaultGateway"},
		"four slips":            {"sDefaltGatwy", ""},
		"another word":          {"vlan", ""},
		"monster":               {string(make([]byte, 1000)), ""},
		"empty":                 {"", ""},
		"the nearer of two":     {"isGatewa", "isGateway"},
		"not ASCII, same shape": {"brüdge", ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := Nearest(tt.key, names); got != tt.want {
				t.Errorf("Nearest(%q) = %q, want %q", tt.key, got, tt.want)
			}
		})
	}
}

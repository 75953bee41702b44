package report

import (
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
)

func TestAPodIsMeantByWhatAnOperatorTypes(t *testing.T) {
	t.Parallel()
	a := &network.Attachment{Key: network.Key{ContainerID: "0123456789ab", IfName: "tb-01"}, Pod: "default/web-0", Port: "veth01", Addresses: []ipam.Address{{Prefix: nstest.Prefix("fd61::2/64")}}}
	for text, want := range map[string]bool{"": true, "default/web-0": true, "web-0": true, "0123": true, "web": false, "eb-0": false, "123": false,
		"veth01": true, "veth0": false, "tb-01": true, "tb-0": false, "fd61::2": true, "fd61:0::2": true, "fd61::3": false} {
		expect.Equal(t, Meant(a, text), want, "%q: want %t", text, want)
	}
}

func TestAPatternIsOfTheWholeNameOrOfItsLastPart(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		pattern, pod string
		want         bool
	}{
		{"default/web-0", "default/web-0", true},
		{"web-0", "default/web-0", true},
		{"web-0", "web-0", true}, // podman's have no namespace
		{"web", "default/web-0", false},
		{"web-*", "default/web-0", true},
		{"default/*", "default/web-0", true},
		{"*/web-0", "kube-system/web-0", true},
		{"*", "default/web-0", true},
		{"default/*", "default-2/web-0", false},
		{"d*", "default/web-0", false},
		{"[a-w]eb-?", "default/web-0", true},
		{"web-0", "", false},
	} {
		expect.Equal(t, Meant(&network.Attachment{Key: network.Key{ContainerID: "id"}, Pod: tt.pod}, tt.pattern), tt.want, "%q matches %q", tt.pattern, tt.pod)
	}
}

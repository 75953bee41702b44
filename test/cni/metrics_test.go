package cni

import (
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestTombolodTellsOfPoolsAndFailures(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	two := conf{"type": "host-local", "ranges": []any{
		[]any{conf{"subnet": subnet4, "rangeStart": "10.77.0.10", "rangeEnd": "10.77.0.11"}}, []any{conf{"subnet": subnet6}},
	}}
	w := n.podnet(conf{"ipam": two})
	pods := n.pods(3)
	w.add(pods[0])
	m := n.mind(t)
	want := func(name string, value int) {
		t.Helper()
		expect.Equal(t, m.metric(name), value, "%s is", name)
	}
	// The names of labels are sorted.
	reserved4 := `pool_reserved_addresses{family="ipv4",network="podnet",range="10.77.0.10-10.77.0.11 of 10.77.0.0/24"}`
	reserved6 := `pool_reserved_addresses{family="ipv6",network="podnet",range="fd77::/64"}`
	full := `failures_total{code="100",verb="ADD"}`
	want(reserved4, 1)
	want(strings.Replace(reserved4, "reserved_", "", 1), 2)
	want(full, 0)
	w.add(pods[1])
	for range 2 {
		wantError(t, expect.Err(w.tryAdd(pods[2])), 100, "")
	}
	want(reserved4, 2)
	want(reserved6, 2)
	want(full, 2)
	w.del(pods[0])
	want(reserved4, 1)
	want(`errors_total{kind="read"}`, 0)
}

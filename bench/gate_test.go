package main

import (
	"strings"
	"testing"
)

// figures is a report as a run makes it, with easy numbers.
func figures() *report {
	r := &report{}
	for range 3 {
		r.add("ipv4", "add", floor, "ms", 1)
		r.add("ipv4", "add", tombolo, "ms", 2)
		r.add("ipv4", "add", reference, "ms", 8)
		r.add("dual", "add", tombolo, "ms", 3)
		r.add("dual", "add", reference, "ms", 100)
		r.add("full=200", "add at 0", tombolo, "ms", 4)
		r.add("full=200", "add at 0", chainIPTables, "ms", 120)
		r.add("full=200", "add at 0", chainNFTables, "ms", 80)
	}
	for range 3 {
		r.add("dhcp", "add", tomboloUDP, "ms", 5)
		r.add("dhcp", "add", reference, "ms", 20)
	}
	r.add("ipv4", "peak", tombolo, "MiB", 12)
	r.add("pods=200", "growth", tombolo, "x", 1.5)
	return r
}

func TestGatesAreJudgedByTheFigures(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		gate  string
		holds bool
		says  string
	}{
		{"add/floor<=2.7", true, "holds with 2.00"},
		{"add/floor<=1.9", false, "broken by 2.00"},
		{"add/reference<=0.25", true, "holds with 0.250"},
		{"dual:add/reference<=0.04", true, "holds with 0.030"},
		{"full=200:add at 0/chain-iptables<=0.04", true, "holds with 0.033"},
		{"full=200:add at 0/chain-nftables<=0.04", false, "broken by 0.050"},
		{"dual:add<=2.5", false, "broken by 3.00"},
		{"growth<=1.6", true, "holds with 1.50"},
		{"tombolo-udp:add/reference<=0.3", true, "holds with 0.250"},
		{"dhcp:tombolo-udp:add<=4", false, "broken by 5.00"},
		{"dhcp:add/reference<=1", false, "cannot be judged: no such figure of tombolo was"},
		{"dual:tombolo-udp:add<=9", false, "cannot be judged: no such figure of tombolo-udp"},
		{"peak<=16", true, "holds with 12.0"},
		{"attach/floor<=1.3", false, "cannot be judged: no such figure of tombolo"},
		{"dual:add/floor<=9", false, "cannot be judged: no such figure of floor"},
		{"lan:add/floor<=9", false, "cannot be judged: no such figure of tombolo"},
	} {
		t.Run(test.gate, func(t *testing.T) {
			t.Parallel()
			gates, err := parseGates(test.gate)
			if err != nil {
				t.Fatal(err)
			}
			v := gates[0].judge(figures())
			if v.Holds != test.holds || !strings.Contains(v.String(), test.says) {
				t.Errorf("got %v, %q; want %v, %q", v.Holds, v, test.holds, test.says)
			}
		})
	}
}

func TestGatesThatAreNoGatesAreRefused(t *testing.T) {
	t.Parallel()
	for _, list := range []string{
		"add/floor", "add/floor<2", "add/floor<=", "add/floor<=two", "add/kindnet<=1", "add/floor<=1,", "add/tombolo<=1", "add/tombolo-udp<=1",
	} {
		if gates, err := parseGates(list); err == nil {
			t.Errorf("%q was taken for %v", list, gates)
		}
	}
}

func TestNoGatesIsAnEmptyList(t *testing.T) {
	t.Parallel()
	if gates, err := parseGates(""); err != nil || len(gates) != 0 {
		t.Errorf("got %v, %v", gates, err)
	}
}

func TestGateListMayHaveSpaces(t *testing.T) {
	t.Parallel()
	gates, err := parseGates("add/floor<=2.7, dual:add/reference<=0.45")
	if err != nil || len(gates) != 2 {
		t.Fatalf("got %v, %v", gates, err)
	}
	want := gate{text: "dual:add/reference<=0.45", scenario: "dual", of: tombolo, metric: "add", over: reference, limit: 0.45}
	if gates[1] != want {
		t.Errorf("got %+v, want %+v", gates[1], want)
	}
}

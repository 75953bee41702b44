package network_test

import "testing"

func TestBrokenElementsAreNamedAndMended(t *testing.T) {
	// lost is a fault by which an element is missing.
	lost := func(table, set, element, said string) fault {
		return fault{on: "nft 'delete element " + table + " tombolo " + set + " { " + element + " }'", says: "set " + set + " of table " + table + " tombolo: element " + said + " is missing [repair]"}
	}
	const port = "nft 'delete element inet tombolo hostports4 { tcp . 8080 }; add element inet tombolo hostports4 { tcp . 8080 comment \"tombolo:1:$H:pods\" : 10.61.0.9 . 80 }'"
	const target = "set guard-target of table bridge tombolo: element "
	table{with: everything, faults: map[string]fault{
		"pods4":                         lost("inet", "pods4", `"cbr0" . 10.61.0.2`, "cbr0 . 10.61.0.2"),
		"pods6":                         lost("inet", "pods6", `"cbr0" . fd61::2`, "cbr0 . fd61::2"),
		"masquerade":                    lost("inet", "masq4-pods", "10.61.0.2", "10.61.0.2"),
		"host port":                     lost("inet", "hostports4", "tcp . 8080", "tcp . 8080"),
		"published":                     lost("inet", "published6", `"cbr0" . fd61::2 . tcp . 80`, "cbr0 . fd61::2 . tcp . 80"),
		"itself":                        lost("inet", "selves4", `"cbr0" . 10.61.0.2 . 10.61.0.2`, "cbr0 . 10.61.0.2 . 10.61.0.2"),
		"guarded":                       lost("bridge", "guarded", `"$P"`, "$P"),
		"MAC":                           lost("bridge", "guard-mac", `"$P" . 0a:58:0a:3d:00:02`, "$P . 0a:58:0a:3d:00:02"),
		"own address":                   lost("bridge", "guard4", `"$P" . 10.61.0.2`, "$P . 10.61.0.2"),
		"the host port leads elsewhere": {on: port, says: "set hostports4 of table inet tombolo: data of element tcp . 8080 is 10.61.0.9 . 80, should be 10.61.0.2 . 80 [repair]"},
		"a set flushed": {on: "nft flush set bridge tombolo guard-target", says: target + "/sentinel . 0x00000000000000000000000000000000 is missing [repair]\n" +
			target + "$P . 0xfd610000000000000000000000000002 is missing [repair]\n" + target + "$P . 0xfe8000000000000008580afffe3d0002 is missing [repair]"},
		"of nobody": {on: "nft 'add element inet tombolo pods4 { \"cbr0\" . 10.61.0.99 comment \"tombolo:1:00000000abc:pods\" }'", says: "elements of endpoint 00000000abc of network pods have no record [repair]", hidden: true},
	}}.run(t)
}

package network_test

import (
	"strings"
	"testing"
)

func TestBrokenRulesAreNamedAndMended(t *testing.T) {
	const (
		tables   = "nf_tables: table inet tombolo is missing [repair]"
		bridges  = "nf_tables: table bridge tombolo is missing [repair]"
		elements = "\nset pods4 of table inet tombolo: element cbr0 . 10.61.0.2 is missing [repair]\nset pods6 of table inet tombolo: element cbr0 . fd61::2 is missing [repair]"
		unmark   = "chain unmark of table inet tombolo: rule "
		cleared  = unmark + `"clear the mark bit of packets from our bridges" is missing [repair]` + "\n" +
			unmark + `"clear the mark bit of packets to our bridges" is missing [repair]` + "\n" +
			unmark + `"the host's redirects to pods, IPv4" is missing [repair]` + "\n" + unmark + `"the host's redirects to pods, IPv6" is missing [repair]`
		another  = unmark + `"" does not belong there [repair]`
		loopback = "nft add rule inet tombolo loopback iifname != lo ip "
		own      = "set bridges of table inet tombolo: element cbr0 . cbr0 is missing [repair]"
	)
	table{keeper: lackingRules, faults: map[string]fault{
		"all flushed":                {on: "nft flush ruleset", says: tables + "\n" + bridges + elements},
		"the table deleted":          {on: "nft delete table inet tombolo", says: tables + elements},
		"the bridge's table deleted": {on: "nft delete table bridge tombolo", says: bridges},
		"dormant":                    {on: "nft 'add table inet tombolo { flags dormant; }'", says: "table inet tombolo: flag dormant does not belong there [repair]"},
		"a chain deleted":            {on: "nft delete chain inet tombolo unmark", says: "table inet tombolo: chain unmark is missing [repair]"},
		"a chain flushed":            {on: "nft flush chain inet tombolo unmark", says: cleared},
		"a chain of the bridge's table flushed": {on: "nft flush chain bridge tombolo groups",
			says: `chain groups of table bridge tombolo: rule "to link-local groups, from pods" is missing [repair]`},
		"a chain of a network more": {on: "nft add chain inet tombolo masq-pods", says: "table inet tombolo: chain masq-pods does not belong there [repair]"},
		"another's chain more":      {on: "nft add chain inet tombolo theirs"},
		"a chain at another hook": {on: "nft delete chain inet tombolo unmark; nft add chain inet tombolo unmark '{ type filter hook input priority 300; }'",
			says: cleared + "\nchain unmark of table inet tombolo: hook is type filter hook input priority 300, should be type filter hook postrouting priority -160 [repair]\n" +
				`chain unmark of table inet tombolo: comment (version and settings) is "", should be "tombolo rules 1, mark 0x10, 4 in all" [repair]`},
		"a rule more":      {on: "nft insert rule inet tombolo unmark counter", says: another},
		"a rule exchanged": {on: "nft flush chain inet tombolo unmark" + strings.Repeat("; nft add rule inet tombolo unmark counter", 4), says: another + "\n" + cleared, unseen: true},
		"rules out of order": {on: "nft flush chain inet tombolo loopback\n" + loopback + `saddr 127.0.0.0/8 drop comment '"nor pass for it"'` + "\n" +
			loopback + `daddr 127.0.0.0/8 drop comment '"others must not reach what is local to the host"'`,
			says: "chain loopback of table inet tombolo: order of the rules is another, should be as they were made [repair]", unseen: true},
		"the bridge's element": {on: `nft delete element inet tombolo bridges '{ "cbr0" . "cbr0" }'`, says: own},
		"a set flushed":        {on: "nft flush set inet tombolo bridges", says: own + "\nset bridges of table inet tombolo: element /sentinel . /sentinel is missing [repair]"},
		"a set deleted": {on: "nft delete chain inet tombolo hostports; nft delete chain inet tombolo hostports-local; nft delete map inet tombolo hostports4", says: "table inet tombolo: chain hostports is missing [repair]\ntable inet tombolo: chain hostports-local is missing [repair]\n" +
			"table inet tombolo: set hostports4 is missing [repair]"},
	}}.run(t)
}

package doctor

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
)

// solicitations are the kernel's counts of a link: of multicasts that came to its hook input, and of
// neighbour solicitations, which are some of them, that passed it.
type solicitations struct{ came, passed string }

func solicited(link string) (s solicitations) {
	data, _ := os.ReadFile("/proc/thread-self/net/dev_snmp6/" + link) // without IPv6 there is none
	for line := range strings.Lines(string(data)) {
		if count, ok := strings.CutPrefix(line, "Ip6InMcastPkts"); ok {
			s.came = count
		} else if count, ok := strings.CutPrefix(line, "Icmp6InType135"); ok {
			s.passed = count
		}
	}
	return s
}

// unresolved says where the question of a pod for a gateway was dropped, by what the host's link had
// counted before it.
func (e *examination) unresolved(gateway netip.Addr, link string, before solicitations, err error) {
	evidence := fmt.Sprintf("the gateway %s does not answer by %s: %v", gateway, resolution(gateway), err)
	remedy := "look which rules of the bridge drop it: nft list ruleset bridge"
	if now := solicited(link); gateway.Is6() && now.came != before.came && now.passed == before.passed {
		evidence += "; neighbour solicitations come to " + link + ", and the host's own firewall drops them"
		remedy = "look which rule or policy of hook input drops ICMPv6: nft list ruleset inet; nft list ruleset ip6; ip6tables-legacy-save"
	}
	e.add(StepGateway, remedy, "%s", evidence)
}

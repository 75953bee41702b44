package ipamconf

import (
	"strings"

	"github.com/containernetworking/cni/pkg/types"
)

// parseResolvConf takes nameserver, domain, search and options of a file in the format of resolv.conf(5), as the
// reference plugin does: several lines of search and options add up, and what
// it does not know it passes over.
func parseResolvConf(text string) types.DNS {
	var dns types.DNS
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0][0] == '#' || fields[0][0] == ';' {
			continue
		}
		switch fields[0] {
		case "nameserver":
			dns.Nameservers = append(dns.Nameservers, fields[1])
		case "domain":
			dns.Domain = fields[1]
		case "search":
			dns.Search = append(dns.Search, fields[1:]...)
		case "options":
			dns.Options = append(dns.Options, fields[1:]...)
		}
	}
	return dns
}

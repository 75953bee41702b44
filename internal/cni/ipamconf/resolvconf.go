package ipamconf

import (
	"io"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"
)

// maxResolvConf bounds what is read of a resolv.conf, in bytes.
const maxResolvConf = 64 << 10

// readResolvConf reads a file in the format of resolv.conf(5).
func readResolvConf(path string) (*types.DNS, error) {
	// It does not wait for the writer of a pipe.
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxResolvConf))
	if err != nil {
		return nil, err
	}
	return parseResolvConf(string(data)), nil
}

// parseResolvConf takes nameserver, domain, search and options, as the
// reference plugin does: several lines of search and options add up, and what
// it does not know it passes over.
func parseResolvConf(text string) *types.DNS {
	dns := &types.DNS{}
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

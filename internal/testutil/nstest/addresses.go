package nstest

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/netns"
)

// WaitForAddresses waits until the IPv6 addresses of namespaces can be reached. Even for those
// that were added without duplicate detection (nodad) the kernel leaves it to a worker
// to join the solicited-node group and to make the local route: until then a neighbour's
// question gets lost, and on a machine that keeps the worker from its work for three
// seconds the neighbour gives up. The links of such addresses have to be up; addresses
// whose detection is on are not waited for.
func WaitForAddresses(tb testing.TB, spaces ...*netns.NS) {
	tb.Helper()
	if !HasIPv6() {
		return
	}
	deadline := time.Now().Add(patience)
	for _, ns := range spaces {
		for {
			missing := unusable(tb, ns)
			if len(missing) == 0 {
				break
			}
			if time.Now().After(deadline) {
				tb.Fatalf("addresses without a local route: %s", strings.Join(missing, ", "))
			}
			time.Sleep(time.Millisecond) // only so as not to keep a CPU from the worker
		}
	}
}

// unusable gives the addresses without duplicate detection that have no local route
// yet, each with its link, in the words of proc.
func unusable(tb testing.TB, ns *netns.NS) []string {
	tb.Helper()
	var addresses, routes []byte
	err := ns.Do(func() error {
		var err error
		// The routes last: an address that is gone by then is no harm.
		if addresses, err = os.ReadFile("/proc/thread-self/net/if_inet6"); err == nil {
			routes, err = os.ReadFile("/proc/thread-self/net/ipv6_route")
		}
		return err
	})
	if err != nil {
		tb.Fatal(err)
	}
	var missing []string
	for line := range strings.Lines(string(addresses)) {
		// The address, its link's number, the prefix length, scope, flags, and the link.
		f := strings.Fields(line)
		if flags, err := strconv.ParseUint(f[4], 16, 32); err == nil && flags&unix.IFA_F_NODAD != 0 {
			missing = append(missing, f[0]+" "+f[5])
		}
	}
	for line := range strings.Lines(string(routes)) {
		// Destination and source with their lengths, next hop, metric, references, uses,
		// flags, and the link.
		const local = 1 << 31 // RTF_LOCAL, include/uapi/linux/ipv6_route.h
		f := strings.Fields(line)
		flags, err := strconv.ParseUint(f[8], 16, 32)
		if i := slices.Index(missing, f[0]+" "+f[9]); err == nil && flags&local != 0 && i >= 0 {
			missing = slices.Delete(missing, i, i+1)
		}
	}
	return missing
}

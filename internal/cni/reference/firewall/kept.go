package firewall

import (
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// IsReferenceHere says whether the reference's plugin has its chain in iptables, where that works over nf_tables.
func IsReferenceHere() (is bool) {
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return false
	}
	defer conn.Close()
	for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		var b nl.Batch
		nftnl.Get(&b, nl.Name("chain CNI-FORWARD"), family, unix.NFT_MSG_GETCHAIN, func([]byte) error {
			is = true
			return nil
		}, nftnl.String(unix.NFTA_CHAIN_TABLE, "filter"), nftnl.String(unix.NFTA_CHAIN_NAME, "CNI-FORWARD"))
		_ = nftnl.Look(conn, &b)
	}
	return is
}

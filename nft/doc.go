// Package nft is the firewall of pods: it says which packets may be forwarded for
// them, masquerades what leaves their network, publishes their ports on the host's
// addresses, and keeps apart what policies keep apart.
//
//	c, err := nft.Dial(nil)
//	ready, err := c.Ready(ctx, network)  // one look, for each pod
//	out, err := c.Ensure(ctx, network)   // the rules, where they are not
//	err = c.Add(ctx, endpoint)           // one transaction of a few elements
//	err = c.Remove(ctx, endpoint)
//
// All of it is one nf_tables table, inet tombolo. Rules belong to networks, and
// what belongs to a pod are elements of sets, which carry their owner in a comment:
// so the number of rules does not depend on the number of pods, and neither does the
// time that adding one takes. With one network "podnet" that masquerades, and one
// pod with a port, nft prints:
//
//	table inet tombolo {
//		set pods4 {
//			type ifname . ipv4_addr
//			elements = { "cbr0" . 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }
//		}
//		set pods6 {
//			type ifname . ipv6_addr
//		}
//		set ports { # pods without addresses
//			type ifname . ether_addr
//		}
//		map hostports4 { # on all addresses of the host
//			type inet_proto . inet_service : ipv4_addr . inet_service
//			elements = { tcp . 8080 comment "tombolo:1:0123456789a:podnet" : 10.22.0.5 . 80 }
//		}
//		map hostports6 {
//			type inet_proto . inet_service : ipv6_addr . inet_service
//		}
//		map hostaddrs4 { # on one of them
//			type ipv4_addr . inet_proto . inet_service : ipv4_addr . inet_service
//		}
//		map hostaddrs6 {
//			type ipv6_addr . inet_proto . inet_service : ipv6_addr . inet_service
//		}
//		set hostclaims { # to ports on single addresses
//			type nf_proto . inet_proto . inet_service
//		}
//		set published4 { # pods' ports that the maps lead to
//			type ifname . ipv4_addr . inet_proto . inet_service
//			elements = { "cbr0" . 10.22.0.5 . tcp . 80 comment "tombolo:1:0123456789a:podnet" }
//		}
//		set published6 {
//			type ifname . ipv6_addr . inet_proto . inet_service
//		}
//		set selves4 { # the addresses of such pods, each twice
//			type ifname . ipv4_addr . ipv4_addr
//			elements = { "cbr0" . 10.22.0.5 . 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }
//		}
//		set selves6 {
//			type ifname . ipv6_addr . ipv6_addr
//		}
//		set bridges { # of networks
//			type ifname . ifname
//			elements = { "cbr0" . "cbr0" comment "tombolo:1::podnet,open,nf" }
//		}
//		set policies { # bridges that have a policy
//			type ifname
//		}
//		set isolated { # those of policy Isolated
//			type ifname . ifname
//		}
//		set bypass { # bridges whose packets do not pass here
//			type ifname
//		}
//		set lans { # bridges with machines on them
//			type ifname
//		}
//		set masq4-podnet {
//			type ipv4_addr
//			elements = { 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }
//		}
//		set masq6-podnet {
//			type ipv6_addr
//		}
//		chain forward {
//			comment "tombolo rules 5, mark 0x1000, 12 in all"
//			type filter hook forward priority filter - 10; policy accept;
//			meta mark set meta mark & 0xffffefff
//			iifname . oifname @isolated drop
//			iifname @policies oifname @policies iifname . oifname != @bridges drop
//			iifname . ip saddr @pods4 meta mark set meta mark | 0x00001000
//			iifname . ip6 saddr @pods6 meta mark set meta mark | 0x00001000
//			iifname . ether saddr @ports meta mark set meta mark | 0x00001000
//			ct state established,related oifname . ip daddr @pods4 meta mark set meta mark | 0x00001000
//			ct state established,related oifname . ip6 daddr @pods6 meta mark set meta mark | 0x00001000
//			ct state established,related oifname . ether daddr @ports meta mark set meta mark | 0x00001000
//			ct status dnat oifname . ip daddr . meta l4proto . th dport @published4 meta mark set meta mark | 0x00001000
//			ct status dnat oifname . ip6 daddr . meta l4proto . th dport @published6 meta mark set meta mark | 0x00001000
//			iifname . oifname @bridges meta mark set meta mark | 0x00001000
//		}
//		chain unmark {
//			comment "tombolo rules 5, mark 0x1000, 1 in all"
//			type filter hook postrouting priority 300; policy accept;
//			meta mark set meta mark & 0xffffefff
//		}
//		chain loopback { # what is local stays local
//			comment "tombolo rules 5, shared, 2 in all"
//			type filter hook prerouting priority raw; policy accept;
//			iifname != "lo" ip daddr 127.0.0.0/8 drop
//			iifname != "lo" ip saddr 127.0.0.0/8 drop
//		}
//		chain loopback-answers {
//			comment "tombolo rules 5, mark 0x1000, 1 in all"
//			type filter hook prerouting priority dstnat + 1; policy accept;
//			iifname != "lo" ip daddr 127.0.0.0/8 meta mark set meta mark | 0x00001000
//		}
//		chain hostports {
//			comment "tombolo rules 3, shared, 7 in all"
//			type nat hook prerouting priority dstnat; policy accept;
//			fib daddr type != local return
//			ip6 daddr ::1 return
//			ip6 daddr fe80::/10 return
//			dnat ip to ip daddr . meta l4proto . th dport map @hostaddrs4
//			dnat ip6 to ip6 daddr . meta l4proto . th dport map @hostaddrs6
//			meta nfproto ipv4 dnat ip to meta l4proto . th dport map @hostports4
//			meta nfproto ipv6 dnat ip6 to meta l4proto . th dport map @hostports6
//		}
//		chain hostports-local {
//			comment "tombolo rules 3, shared, 7 in all"
//			type nat hook output priority -100; policy accept;
//			fib daddr type != local return
//			ip6 daddr ::1 return
//			ip6 daddr fe80::/10 return
//			dnat ip to ip daddr . meta l4proto . th dport map @hostaddrs4
//			dnat ip6 to ip6 daddr . meta l4proto . th dport map @hostaddrs6
//			meta nfproto ipv4 dnat ip to meta l4proto . th dport map @hostports4
//			meta nfproto ipv6 dnat ip6 to meta l4proto . th dport map @hostports6
//		}
//		chain hairpin {
//			comment "tombolo rules 3, shared, 8 in all"
//			type nat hook postrouting priority srcnat - 1; policy accept;
//			ct status dnat oifname != "lo" ip saddr 127.0.0.0/8 masquerade
//			ct status dnat oifname . ip saddr . ip daddr @selves4 masquerade
//			ct status dnat oifname . ip6 saddr . ip6 daddr @selves6 masquerade
//			ct status dnat oifname @bypass oifname . ip saddr @pods4 masquerade
//			ct status dnat oifname @bypass oifname . ip6 saddr @pods6 masquerade
//			ct status dnat oifname @lans oifname . ip daddr != @pods4 masquerade
//			ct status dnat oifname @lans oifname . ip6 daddr != @pods6 masquerade
//			ct status dnat oifname @lans oifname @bypass masquerade
//		}
//		chain masq-podnet {
//			comment "tombolo rules 3, prefixes 62702694, 9 in all"
//			type nat hook postrouting priority srcnat; policy accept;
//			ip saddr != @masq4-podnet return
//			ct status dnat oifname . ip daddr . meta l4proto . th dport @published4 return
//			ip daddr 10.22.0.0/16 return
//			ip daddr 224.0.0.0/4 return
//			ip daddr 255.255.255.255 return
//			ip6 saddr != @masq6-podnet return
//			ct status dnat oifname . ip6 daddr . meta l4proto . th dport @published6 return
//			ip6 daddr ff00::/8 return
//			masquerade
//		}
//	}
//
// and, behind each rule, a comment that says what it is for. A chain's comment says
// which version made its rules, of what settings, and how many; and in each set and map
// there is one more element, a sentinel ("/sentinel" . 0.0.0.0 and the like), which
// matches nothing, and is gone once somebody has emptied the set. So a caller learns by
// one look at each chain and each set that all is there (Conn.Ready), and builds or mends
// only where it is not (Conn.Ensure). Of what nobody has changed since, one look at a
// number does for all (Conn.Trust). The table is Tombolo's own: what others put into its
// chains is taken out again.
//
// The forward chain admits nothing. An accept in one table never overrides a drop
// in another; so it marks what may pass, for a rule in whichever table would drop it:
// what pods send, what belongs to connections that exist, what goes to published
// ports by way of them, and what stays on the bridge of a network.
//
// A port is reached by every address that is local to the host, but for ::1 and
// link-local ones of IPv6. By 127.0.0.1 it is reached from the host alone, and after
// the caller has switched route_localnet on for the bridge: not before Ensure, whose
// chain loopback keeps pods from what else listens there. That lasts as long as the
// table: a caller that wants more has the mark to go by, which chain loopback-answers
// gives to what may come to 127.0.0.0/8 by a bridge. Whoever calls keeps his
// address, unless the answer would not come back by the host then: the host by
// 127.0.0.1, a pod that calls itself, and, where bridged packets do not pass the
// firewall's hooks (Network.NFCall), another pod on the same bridge. Where the bridge is
// a LAN's (Network.LAN), that is so for machines there too, whatever they are led to and
// whoever leads them: to another service's address, by the host's rules of others. A
// program of the host that listens on a published port hears nothing, and nothing here
// knows of it.
//
// A second table, bridge tombolo, is there for networks that need it. It has the chains of
// package guard, which hold ports to what they may say: those for every pod (Network.Groups), and
// those for guarded ones (Network.Guard, Endpoint.GuardedPort), with sets in which pods have
// elements. All of an endpoint is one transaction, over both tables.
//
// The chains dedup-NETWORK drop what a promiscuous bridge would deliver twice (Dedup), and
// the chains quiet-NETWORK what it would deliver to pods that have no use for it
// (Network.Quiet).
//
// It needs CAP_NET_ADMIN in the user namespace that owns the network namespace, and
// Linux 6.1 or later with nf_tables (CONFIG_NF_TABLES_INET, CONFIG_NFT_CT,
// CONFIG_NFT_FIB_INET, CONFIG_NFT_MASQ, CONFIG_NFT_NAT; for the second table
// CONFIG_NF_TABLES_BRIDGE).
package nft

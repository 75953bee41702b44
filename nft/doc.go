// Package nft is the firewall of pods: it says which packets may be forwarded for
// them, and masquerades what leaves their network.
//
// All of it is one nf_tables table, inet tombolo. Rules belong to networks, and
// what belongs to a pod are elements of sets, which carry their owner in a comment:
// so the number of rules does not depend on the number of pods, and neither does the
// time that adding one takes. With one network "podnet" that masquerades, and one
// pod, nft prints:
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
//		set masq4-podnet {
//			type ipv4_addr
//			elements = { 10.22.0.5 comment "tombolo:1:0123456789a:podnet" }
//		}
//		set masq6-podnet {
//			type ipv6_addr
//		}
//		chain forward {
//			comment "tombolo rules 1, mark 0x1000"
//			type filter hook forward priority filter - 10; policy accept;
//			meta mark set meta mark & 0xffffefff
//			iifname . ip saddr @pods4 meta mark set meta mark | 0x00001000
//			iifname . ip6 saddr @pods6 meta mark set meta mark | 0x00001000
//			iifname . ether saddr @ports meta mark set meta mark | 0x00001000
//			ct state established,related oifname . ip daddr @pods4 meta mark set meta mark | 0x00001000
//			ct state established,related oifname . ip6 daddr @pods6 meta mark set meta mark | 0x00001000
//			ct state established,related oifname . ether daddr @ports meta mark set meta mark | 0x00001000
//		}
//		chain unmark {
//			comment "tombolo rules 1, mark 0x1000"
//			type filter hook postrouting priority 300; policy accept;
//			meta mark set meta mark & 0xffffefff
//		}
//		chain masq-podnet {
//			comment "tombolo rules 1, prefixes 62702694"
//			type nat hook postrouting priority srcnat; policy accept;
//			ip saddr != @masq4-podnet return
//			ip daddr 10.22.0.0/16 return
//			ip daddr 224.0.0.0/4 return
//			ip6 saddr != @masq6-podnet return
//			ip6 daddr ff00::/8 return
//			masquerade
//		}
//	}
//
// and, behind each rule, a comment that says what it is for. A chain's comment says
// which version made its rules, and of what settings: a caller learns by one look at
// each chain that all is there (Conn.Ready), and builds or mends only where it is not
// (Conn.Ensure). The table is Tombolo's own: what others put into its chains is
// taken out again.
//
// The forward chain admits nothing. An accept in one table never overrides a drop
// in another; so it marks what may pass, for a rule in whichever table would drop it.
//
// It needs CAP_NET_ADMIN in the user namespace that owns the network namespace, and
// Linux 6.1 or later with nf_tables (CONFIG_NF_TABLES_INET, CONFIG_NFT_CT,
// CONFIG_NFT_MASQ, CONFIG_NFT_NAT).
package nft

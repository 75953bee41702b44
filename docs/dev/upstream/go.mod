module github.com/tombolo-cni/tombolo/docs/dev/upstream

go 1.26.0

require (
	github.com/google/nftables v0.3.1-0.20251119083706-1db35da82052
	github.com/jsimonetti/rtnetlink/v2 v2.2.0
	github.com/mdlayher/netlink v1.11.2
	github.com/mdlayher/packet v1.2.0
	golang.org/x/sys v0.49.0
)

require (
	github.com/google/go-cmp v0.7.0 // indirect
	github.com/mdlayher/socket v0.7.0 // indirect
	golang.org/x/net v0.59.0 // indirect
	golang.org/x/sync v0.23.0 // indirect
)

module github.com/tombolo-cni/tombolo/bench/peers/kindnet

go 1.26.0

require (
	github.com/containernetworking/cni v1.3.0
	github.com/mattn/go-sqlite3 v1.14.24
	github.com/vishvananda/netlink v1.3.1
	github.com/vishvananda/netns v0.0.5
)

require golang.org/x/sys v0.35.0 // indirect

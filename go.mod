module github.com/tombolo-cni/tombolo

go 1.26.0

require (
	github.com/containernetworking/cni v1.3.0
	github.com/google/go-cmp v0.7.0
	golang.org/x/sys v0.49.0
)

require golang.org/x/net v0.53.0 // indirect

module github.com/tombolo-cni/tombolo/test/cni

go 1.26.0

require (
	github.com/containernetworking/cni v1.3.0
	github.com/google/go-cmp v0.7.0
	github.com/tombolo-cni/tombolo v0.0.0
	golang.org/x/sys v0.49.0
)

replace github.com/tombolo-cni/tombolo => ../..

module github.com/tombolo-cni/tombolo/test/containerd

go 1.26.0

require (
	github.com/containernetworking/cni v1.3.0
	github.com/google/go-cmp v0.7.0
	github.com/tombolo-cni/tombolo v0.0.0
	golang.org/x/sys v0.49.0
	google.golang.org/grpc v1.72.1
	k8s.io/cri-api v0.34.0
)

require (
	golang.org/x/net v0.53.0 // indirect
	golang.org/x/text v0.36.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20250303144028-a0af3efb3deb // indirect
	google.golang.org/protobuf v1.36.5 // indirect
)

replace github.com/tombolo-cni/tombolo => ../..

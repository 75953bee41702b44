package recorded

import (
	"context"
	"fmt"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/netns"
)

// OpenPod opens the namespace of a pod, unless another pod's is at the path by now.
func OpenPod(path string, cookie uint64) (*netns.NS, error) {
	pod, err := netns.Open(path)
	if err != nil {
		return nil, err
	}
	now, err := pod.Cookie()
	if err == nil && now != cookie {
		err = fmt.Errorf("%s is another pod's by now", path)
	}
	if err != nil {
		pod.Close()
		return nil, err
	}
	return pod, nil
}

// InterfaceIn gives the index of a pod's interface.
func InterfaceIn(ctx context.Context, pod *netns.NS, name string) (int, error) {
	conn, err := bridge.Dial(&bridge.Config{NetNS: pod})
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	l, err := conn.Link(ctx, name)
	if err != nil {
		return 0, err
	}
	return l.Index, nil
}

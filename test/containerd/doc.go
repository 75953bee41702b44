// Package containerd has the tests of the plugin and of deploy/containerd with a real
// containerd and runc: pods come and go by CRI, as a kubelet has them. There is nothing
// in it to import.
//
// Each test has a machine of its own: a network namespace, a mount namespace in which
// /run and /var/lib are empty, and a process namespace, all of whose processes end with
// the test, however that ends. There a containerd runs with a socket, a root and a
// configuration of its own. Of the real machine they use the control groups, below one
// that is removed in the end, and a directory in $TMPDIR.
//
// Pods are sandboxes without containers. Their image is made by the test, of the one
// program in directory pause, and is in no registry.
//
//	go test ./...
//
// needs root, containerd (1.6 or later), runc, iproute2, nft and nsenter. It builds the
// plugin, and the reference's plugin loopback, unless TOMBOLO_BIN names the directory of the one, and
// TOMBOLO_PEERS a directory with the other. With -update it rewrites the golden files in
// testdata.
//
// The helpers are in node_test.go (the node), init_test.go (its first process),
// cri_test.go (what a kubelet does), kernel_test.go (what the kernel and the plugin's
// files have) and image_test.go. Tests end with wantNothing: no link, no element, no
// queue, no reservation, no record and no namespace of a pod is left.
package containerd

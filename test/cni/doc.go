// Package cni has the tests of the plugin as a runtime sees it: the built program,
// called through libcni, through cnitool, or by itself. There is nothing in it to
// import.
//
// Each test has a machine of its own: a network namespace for the node, one for each
// pod, and a state directory, so that nothing of the real machine is touched and
// tests run side by side. They need root, and iproute2, nft, strace, unshare, nsenter
// and bash.
//
//	go test ./...
//
// builds the programs, and the reference's to compare with, unless TOMBOLO_BIN
// names the one, and TOMBOLO_PEERS a directory with the others. With -update it
// rewrites the golden files in testdata.
//
// The helpers are in node_test.go (the node, its pods, the verbs), kernel_test.go
// (what the kernel has) and capture_test.go (what is on the wire). Most tests end
// with wantNothing: no link, no element, no reservation and no record of an
// attachment is left.
package cni

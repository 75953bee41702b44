// Package nstest has what live tests share: network namespaces that end with the
// test, commands run in them, echo requests, a server that tells callers their
// address, and a gate for leaks. Shipped code never imports it.
//
// Tests need root, or a user namespace that maps it:
//
//	TOMBOLO_ALLOW_SKIPS=1 unshare -rmn go test ./...
package nstest

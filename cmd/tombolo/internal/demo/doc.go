// Package demo shows Tombolo at work on a machine that it leaves alone, with
// nothing but this program: pods are added and deleted by the CNI protocol, ping
// each other and the world outside, and what DEL leaves behind is counted.
//
// All of it happens in a sandbox: network namespaces and a mount namespace that no
// path names, so that the kernel takes them down with the process, however that
// ends. It needs CAP_SYS_ADMIN, CAP_NET_ADMIN and CAP_NET_RAW, which root of a user
// namespace has too (unshare --map-root-user --net).
package demo

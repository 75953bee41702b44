// Package cni is the CNI plugin: it reads network configurations, carries out the
// verbs of the CNI specification 1.1, and writes results and errors. It composes
// what the other packages do; it and the keeper are the only ones that compose.
//
// A file for each verb: add.go, del.go, check.go, gc.go, status.go. network.go has
// what all pods of a network share: the look at it that every ADD takes, and how it
// is built or mended (bridge.go, gateway.go, reattach.go).
package cni

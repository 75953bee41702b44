// Package cni is the CNI plugin: it reads network configurations and the environment, has
// package network carry out the verbs of the CNI specification 1.1, and writes results and
// errors. It is translation, and nothing else.
//
// netconf.go, dhcpconf.go, lanconf.go and ports.go read configurations; add.go, del.go (GC
// too), check.go and status.go are the verbs; result.go and prevresult.go are results both
// ways; errors.go has the codes.
package cni

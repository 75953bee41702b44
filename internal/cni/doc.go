// Package cni is the CNI plugin: it reads network configurations and the environment, has package network carry out
// the verbs of the CNI specification 1.1, and writes results and errors. It is translation, and nothing else.
//
// Files whose names end in conf.go read configurations; allocator.go makes of the ipam section what gives addresses;
// add.go, del.go (GC too) and check.go (STATUS too) are the verbs; result.go has results both ways, errors.go the codes.
package cni

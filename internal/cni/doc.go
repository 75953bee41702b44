// Package cni is the CNI plugin. It decodes network configurations and the environment, calls package network for the
// verbs of the CNI specification 1.1, and encodes results and errors. It only translates.
//
// Files whose names end in conf.go decode configurations. allocator.go turns the ipam section into an allocator.
// add.go, del.go (also GC) and check.go (also STATUS) run the verbs. result.go converts results in both directions,
// and errors.go has the codes.
package cni

// Package cni is the CNI plugin. It decodes network configurations and the environment, calls package network for the
// verbs of the CNI specification 1.1, and encodes results and errors. The work on the kernel is in package network.
//
// Files whose names end in conf.go decode configurations. allocator.go turns the ipam section into an allocator.
// add.go, del.go (also GC) and check.go (also STATUS) run the verbs. result.go converts results in both directions,
// and errors.go has the codes.
//
// The program can replace reference plugins: it then behaves like the plugin by whose name it was called (named.go).
// A program that had such a name before is kept, and handles the pods that it made (kept.go).
package cni

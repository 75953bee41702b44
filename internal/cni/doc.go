// Package cni implements the CNI plugin. It decodes network configurations and the environment, runs the verbs of the
// CNI specification 1.1, and encodes results and errors. Package network makes the changes in the kernel, except those
// of the plugins loopback and tuning.
//
// Files whose names end in conf.go decode configurations. allocator.go turns the ipam section into an allocator of
// addresses. add.go, del.go (also GC) and check.go (also STATUS) run the verbs. result.go encodes and decodes results,
// and errors.go has the error codes.
//
// The program can also have the name of a CNI reference plugin, such as bridge or portmap, and then behaves like that
// plugin (named.go). `tombolo install` keeps the program that had the name before, which handles the pods that it made
// (kept.go).
package cni

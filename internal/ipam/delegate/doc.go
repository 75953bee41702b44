// Package delegate runs CNI plugins of other projects, IPAM plugins that a netconf
// names and plugins whose names this program has taken, by the CNI protocol: the verb
// and its parameters in the environment, the netconf on stdin, the result or the error
// on stdout (CNI specification 1.1.0, sections 2 and 4).
//
// It is the one package in shipped code that starts processes. It needs no
// capability of its own.
//
// The CNI library's invoke package is not used: it does not bound what a plugin
// prints, waits without end for grandchildren that keep stdout open after the
// plugin was killed, and cannot try again when the binary is just being
// replaced (ETXTBSY).
package delegate

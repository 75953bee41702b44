// Package delegate runs CNI plugins of other projects: IPAM plugins that a configuration names, and plugins whose
// names this program has taken. It uses the CNI protocol: the verb and its parameters are in the environment, the
// configuration on stdin, and the result or the error on stdout (CNI specification 1.1.0, sections 2 and 4).
//
// It is the only package in the shipped programs that starts processes. It needs no capability of its own.
//
// It does not use the CNI library's invoke package. That package does not limit a plugin's output. It waits for ever
// for grandchildren that keep stdout open after the plugin was killed. And it does not try again if the binary is
// just being replaced (ETXTBSY).
package delegate

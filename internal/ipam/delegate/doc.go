// Package delegate runs other programs that are CNI plugins. These are IPAM plugins that a configuration names, and
// the original plugins whose names Tombolo has taken over. It uses the CNI protocol (CNI specification 1.1.0,
// sections 2 and 4). The verb and its parameters are in the environment, the configuration is on stdin, and the
// result or the error on stdout.
//
// No other package in the shipped programs starts processes. Package delegate needs no capability of its own.
//
// It does not use the CNI library's package invoke. After that package has killed a plugin, it waits for ever for
// grandchildren that still have stdout open. And if the binary is just being replaced (ETXTBSY), its second attempt
// always fails, since it reuses the exec.Cmd.
package delegate

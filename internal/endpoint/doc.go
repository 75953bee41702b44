// Package endpoint computes, from an attachment's record, its elements in the firewall and the alias of its port. The
// plugin creates them, and the keeper changes them when a lease moves to another address. Both must compute the same.
//
// The package itself changes nothing.
package endpoint

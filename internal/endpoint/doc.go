// Package endpoint computes an attachment's elements in the firewall, and the alias of its port, from the
// attachment's record. The plugin creates elements and alias, and the keeper changes them when a lease moves to
// another address. Both must compute equal results.
//
// The package itself changes nothing.
package endpoint

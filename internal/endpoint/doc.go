// Package endpoint computes an attachment's elements in the firewall's sets, and the alias of the host's end of the
// pod's link, from the attachment's record. The plugin creates elements and alias, and tombolod changes them when a
// lease gets another address. Both must compute equal results.
//
// The package itself changes nothing.
package endpoint

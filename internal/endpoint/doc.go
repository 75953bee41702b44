// Package endpoint computes two things from an attachment's record: the nft.Endpoint, which determines the firewall's
// elements, and the alias of the host's end of the pod's link. The plugin creates elements and alias, and tombolod
// changes them when the pod's addresses change. Both programs must compute equal results.
//
// The package itself changes nothing.
package endpoint

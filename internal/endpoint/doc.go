// Package endpoint says what an attachment on record has in the kernel besides its
// links: its elements in the firewall, and the alias that its port carries. The plugin
// makes them, and the keeper moves them when a lease does; both have to mean the same.
//
// It computes, and does nothing itself.
package endpoint

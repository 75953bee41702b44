// Package view shows an operator what there is on a node: its networks with their pools, its pods
// as a table, and all of it as a picture, in a terminal or as SVG. It looks at records and at what
// package network finds, and changes nothing.
//
// Names come from configurations and from pods, so whatever is drawn is made printable first.
package view

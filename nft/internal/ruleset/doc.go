// Package ruleset contains the content of the tables of package nft: the intended sets, chains and rules of a
// network, their state in the kernel, and the transaction that changes one into the other.
//
//	want := ruleset.New(&network, table, mark)  // opens nothing
//	have, err := tables.Read(want)
//	p := ruleset.Plan(want, have)
//	err = p.Transaction(have, true).Commit(tables.Conn)
//
// It knows networks, but not endpoints. For this package these are elements with a key, data and a comment, made by
// package nft. docs/ruleset.nft shows everything.
package ruleset

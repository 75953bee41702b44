// Package ruleset is what the tables of package nft are made of: the sets, chains and rules that
// there should be for a network, what the kernel has of them, and the transaction that makes one
// of the other.
//
//	want := ruleset.New(&network, table, mark)  // opens nothing
//	have, err := tables.Read(want)
//	p := ruleset.Plan(want, have)
//	err = p.Transaction(have, true).Commit(tables.Conn)
//
// It knows networks, and nothing of endpoints: those are elements to it, with a key, data and a comment. Package
// nft says what those are. docs/ruleset.nft shows all.
package ruleset

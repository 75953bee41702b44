// Package ruleset contains the intended tables of package nft: the sets, chains and rules of a network. It also reads
// their state from the kernel, and builds the transaction that changes the state into the intended one.
//
//	want := ruleset.New(&network, table, mark) // sends nothing
//	have, err := tables.Read(want)
//	p := ruleset.Plan(want, have)
//	err = p.Transaction(have, true).Commit(tables.Conn)
//
// Package nft turns an endpoint into elements with a key, data and a comment. The file docs/ruleset.nft shows the table
// of the family inet.
package ruleset

// Package lan has the tests of a host on a LAN, with packets: its NIC is taken over
// and given back while datagrams and streams go both ways, and pods come to live on
// the LAN. There is nothing in it to import.
//
// Each test has a LAN of its own, in network namespaces: a switch, a router with an
// "internet" behind it, another machine, and the host. They need root, and iproute2,
// nft, iptables and dnsmasq.
//
// The meter (meter_test.go, flow_test.go) counts every datagram of its flows. That it
// sees what is lost is shown beside what is not: see TestMeterSeesANaiveTakeover.
// How long a gap a takeover makes is in the log of its test, and no test's verdict: a
// busy machine makes gaps by itself, but loses nothing; where it does, as its processors
// cannot keep up with a flood of others', it says so, and as much is excused. A stall is
// the part of a gap that is not the sender's own: something was under way, and nothing
// arrived.
//
//	go test -v ./test/lan/
//
// builds the programs unless TOMBOLO_BIN names their directory. TOMBOLO_TAKEOVERS is how many times
// the NIC is taken over and given back where that is done over and over (default 3).
// Tests of flows do not run in parallel: they share two CPUs with other suites.
package lan

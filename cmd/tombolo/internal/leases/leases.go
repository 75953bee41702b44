// Package leases lists the DHCP leases of pods, as text and as JSON.
package leases

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
)

// Entry is a lease record in the form that `tombolo leases --json` prints.
type Entry struct {
	Hash        string       `json:"hash"`
	State       lease.State  `json:"state"`
	Network     string       `json:"network"`
	ContainerID string       `json:"containerID"`
	IfName      string       `json:"ifName"`
	Pod         string       `json:"pod,omitempty"`
	Address     netip.Prefix `json:"address,omitzero"`
	MAC         dhcpc.Hex    `json:"mac"`
	ClientID    dhcpc.Hex    `json:"clientID,omitempty"`
	Server      netip.Addr   `json:"server,omitzero"`
	Renew       time.Time    `json:"renew,omitzero"`  // T1: when the client first asks the server to renew
	Expire      time.Time    `json:"expire,omitzero"` // zero for a lease without an end
	Left        int64        `json:"left"`            // remaining seconds; 0: ended or no lease, -1: no end
	DNS         []netip.Addr `json:"dns,omitempty"`
	MTU         int          `json:"mtu,omitempty"`
	// These are the pod's DHCPv6 address, the end of its lease, and the current problem with this lease.
	IPv6       netip.Addr `json:"ipv6,omitzero"`
	ExpireIPv6 time.Time  `json:"expireIPv6,omitzero"`
	ErrorIPv6  string     `json:"errorIPv6,omitempty"`

	Error string `json:"error,omitempty"`
	// Notes lists irregularities that are no problem yet: an unanswered renewal, other servers that answered, and
	// answers and options that the client did not use.
	Notes []string `json:"notes,omitempty"`
}

// Of returns the Entry for a record at the time now.
func Of(r *lease.Record, now time.Time) Entry {
	e := Entry{
		Hash: r.Hash(), State: r.State, Network: r.Network, ContainerID: r.ContainerID, IfName: r.IfName, Pod: r.Pod,
		MAC: r.Client.MAC, ClientID: r.Client.ClientID, MTU: r.Applied.MTU, Error: r.Error,
	}
	if r.Note != "" {
		e.Notes = append(e.Notes, r.Note)
	}

	if six := r.Six; six != nil {
		e.ErrorIPv6 = six.Error
		if six.Lease != nil {
			e.IPv6, e.ExpireIPv6 = six.Lease.Address, six.Lease.Expire.UTC()
		}
		if six.Note != "" {
			e.Notes = append(e.Notes, "DHCPv6: "+six.Note)
		}
		if six.Information != nil {
			e.DNS = six.Information.DNS
		}
	}

	if l := r.Lease; l != nil {
		e.Address, e.Server, e.DNS = l.Address, l.Server, slices.Concat(l.DNS, e.DNS)
		e.Renew, e.Expire = l.Renew.UTC(), l.Expire.UTC()
		if e.Left = -1; !l.Infinite() {
			e.Left = int64(l.Left(now) / time.Second)
		}
		if len(l.Others) > 0 {
			e.Notes = append(e.Notes, lease.TwoServers(l))
		}
		e.Notes = append(e.Notes, l.Ignored...)
	}

	return e
}

// List returns an Entry for each record.
func List(records []*lease.Record, now time.Time) []Entry {
	entries := make([]Entry, len(records))
	for i, r := range records {
		entries[i] = Of(r, now)
	}
	return entries
}

// Table returns a table of records as text. Problems and notes follow below the table.
func Table(records []*lease.Record, now time.Time) string {
	if len(records) == 0 {
		return "no lease is on record\n"
	}

	var text strings.Builder
	t := tabwriter.NewWriter(&text, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "NETWORK\tPOD\tINTERFACE\tADDRESS\tMAC\tSERVER\tSTATE\tLEFT")
	troubles := ""
	for _, r := range records {
		e := Of(r, now)
		pod := cmp.Or(r.Pod, fmt.Sprintf("%.12s", r.ContainerID)) // as in tombolo ls
		row := func(address, server string, state lease.State, left string) {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", e.Network, pod, e.IfName, address, e.MAC, server, state,
				left)
		}
		ends := "-"
		if r.Lease != nil {
			ends = lease.TimeLeft(r.Lease, now)
		}

		row(orDash(e.Address.IsValid(), e.Address), orDash(e.Server.IsValid(), e.Server), e.State, ends)
		switch {
		case r.Six == nil || r.Six.Stateless:
		case r.Six.Lease == nil:
			row("-", "-", lease.Adding, "-")
		default:
			row(e.IPv6.String(), "-", lease.Bound, lease.TimeLeft(r.Six.Lease, now))
		}

		for _, trouble := range []string{e.Error, e.ErrorIPv6} {
			if trouble != "" {
				troubles += fmt.Sprintf("%s %s: %s\n", pod, r.IfName, trouble)
			}
		}

		for _, note := range e.Notes {
			troubles += fmt.Sprintf("%s %s: note: %s\n", pod, r.IfName, note)
		}
	}

	t.Flush()
	if troubles != "" {
		text.WriteString("\n" + troubles)
	}

	return text.String()
}

func orDash(valid bool, v fmt.Stringer) string {
	if !valid {
		return "-"
	}
	return v.String()
}

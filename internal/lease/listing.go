package lease

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
)

// Entry is a record as `tombolo leases --json` shows it.
type Entry struct {
	Hash        string       `json:"hash"`
	State       State        `json:"state"`
	Network     string       `json:"network"`
	ContainerID string       `json:"containerID"`
	IfName      string       `json:"ifName"`
	Pod         string       `json:"pod,omitempty"`
	Address     netip.Prefix `json:"address,omitzero"`
	MAC         dhcpc.Hex    `json:"mac"`
	ClientID    dhcpc.Hex    `json:"clientID,omitempty"`
	Server      netip.Addr   `json:"server,omitzero"`
	Renew       time.Time    `json:"renew,omitzero"`  // T1
	Expire      time.Time    `json:"expire,omitzero"` // zero for one without an end
	Left        int64        `json:"left"`            // seconds; 0: ended, -1: without an end
	DNS         []netip.Addr `json:"dns,omitempty"`
	MTU         int          `json:"mtu,omitempty"`
	// The pod's address by DHCPv6, when that lease ends, and what is wrong with it.
	IPv6       netip.Addr `json:"ipv6,omitzero"`
	ExpireIPv6 time.Time  `json:"expireIPv6,omitzero"`
	ErrorIPv6  string     `json:"errorIPv6,omitempty"`

	Error string `json:"error,omitempty"`
}

// EntryOf describes a record at a time.
func EntryOf(r *Record, now time.Time) Entry {
	e := Entry{
		Hash: r.Hash(), State: r.State, Network: r.Network, ContainerID: r.ContainerID, IfName: r.IfName, Pod: r.Pod,
		MAC: r.Client.MAC, ClientID: r.Client.ClientID, MTU: r.Applied.MTU, Error: r.Error,
	}
	if r.Six != nil {
		if e.ErrorIPv6 = r.Six.Error; r.Six.Lease != nil {
			e.IPv6, e.ExpireIPv6 = r.Six.Lease.Address, r.Six.Lease.Expire.UTC()
		}
	}
	if l := r.Lease; l != nil {
		e.Address, e.Server, e.DNS = l.Address, l.Server, l.DNS
		e.Renew, e.Expire = l.Renew.UTC(), l.Expire.UTC()
		if e.Left = -1; !l.Infinite() {
			e.Left = int64(l.Left(now) / time.Second)
		}
	}
	if r.Six != nil && r.Six.Information != nil {
		e.DNS = append(slices.Clone(e.DNS), r.Six.Information.DNS...)
	}
	return e
}

// WriteJSON writes records as a JSON array of Entry, one a line.
func WriteJSON(w io.Writer, records []*Record, now time.Time) error {
	lines := make([]string, len(records))
	for i, r := range records {
		data, err := json.Marshal(EntryOf(r, now))
		if err != nil {
			return fmt.Errorf("write leases: %w", err)
		}
		lines[i] = string(data)
	}
	if _, err := fmt.Fprintf(w, "[%s]\n", strings.Join(lines, ",\n ")); err != nil {
		return fmt.Errorf("write leases: %w", err)
	}
	return nil
}

// WriteTable writes records as a table for people, with their troubles below.
func WriteTable(w io.Writer, records []*Record, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "NETWORK\tPOD\tINTERFACE\tADDRESS\tMAC\tSERVER\tSTATE\tLEFT")
	troubles := ""
	for _, r := range records {
		e := EntryOf(r, now)
		pod := cmp.Or(r.Pod, r.ContainerID)
		row := func(address, server string, state State, left string) {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", e.Network, pod, e.IfName, address, e.MAC, server, state, left)
		}
		row(orDash(e.Address.IsValid(), e.Address), orDash(e.Server.IsValid(), e.Server), e.State, left(r, now))
		switch {
		case r.Six == nil || r.Six.Stateless:
		case r.Six.Lease == nil:
			row("-", "-", Adding, "-")
		default:
			row(e.IPv6.String(), "-", Bound, leftOf(r.Six.Lease, now))
		}
		for _, trouble := range []string{e.Error, e.ErrorIPv6} {
			if trouble != "" {
				troubles += fmt.Sprintf("%s %s: %s\n", pod, r.IfName, trouble)
			}
		}
	}
	err := t.Flush()
	if err == nil && troubles != "" {
		_, err = fmt.Fprint(w, "\n", troubles)
	}
	if err != nil {
		return fmt.Errorf("write leases: %w", err)
	}
	return nil
}

func orDash(valid bool, v fmt.Stringer) string {
	if !valid {
		return "-"
	}
	return v.String()
}

// left is the time left, in the largest unit that tells enough.
func left(r *Record, now time.Time) string {
	if r.Lease == nil {
		return "-"
	}
	return leftOf(r.Lease, now)
}

// leftOf is left for a lease of either family.
func leftOf(l interface {
	Infinite() bool
	Left(time.Time) time.Duration
}, now time.Time) string {
	if l.Infinite() {
		return "for ever"
	}
	d := l.Left(now)
	switch {
	case d == 0:
		return "ended"
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	}
	return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
}

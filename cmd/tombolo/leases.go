package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/internal/lease"
)

func (o *options) leasesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "leases",
		Short: "list the DHCP leases of pods, when they expire, and what is wrong with them",
		Args:  takes(0, 0),
		RunE:  func(*cobra.Command, []string) error { return o.listLeases() },
	}
	o.jsonFlag(cmd)
	return cmd
}

// listLeases prints the leases on record; what is wrong with a record, and with the keeper, goes to stderr.
func (o *options) listLeases() error {
	d, err := lease.Open(o.leases)
	if err != nil {
		return err
	}
	records, damaged, err := d.List()
	if err != nil {
		return err
	}
	for _, bad := range damaged {
		warn(bad.Error())
	}
	if len(records) > 0 {
		if err := d.CheckKeeper(); err != nil {
			warn(err.Error())
		}
	}
	switch {
	case o.json:
		return lease.WriteJSON(o.out, records, time.Now())
	case len(records) == 0:
		return o.print("no lease is on record\n", nil)
	}
	return lease.WriteTable(o.out, records, time.Now())
}

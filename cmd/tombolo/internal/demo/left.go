package demo

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/state"
	tombolo "github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// takeDown deletes the pods, then the network, and counts what is there before,
// between and after.
func (s *show) takeDown(ctx context.Context, box *sandbox) error {
	w := s.table()
	defer w.Flush()
	fmt.Fprintln(w, "\nWHAT THERE IS\tVETH ENDS\tIN NF_TABLES\tRESERVATIONS\tRECORDS\tBRIDGE")
	stage := func(when string, want inventory) error {
		got, err := box.count(ctx)
		if err != nil {
			return fmt.Errorf("count what there is %s: %w", when, err)
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%s\n", when, got.vethEnds, got.endpoints, got.reservations, got.records, got.bridge)
		if got != want {
			return fmt.Errorf("%s there should be %s, and there are %s", when, want, got)
		}
		return nil
	}
	n := s.pods
	if err := stage("with "+plural(n, "pod"), inventory{2 * n, n, box.families * n, n, podBridge}); err != nil {
		return err
	}
	mean, err := s.delPods(ctx, box)
	if err != nil {
		return err
	}
	if err := stage("after DEL", inventory{bridge: podBridge}); err != nil {
		return err
	}
	if err := removeNetwork(ctx, box); err != nil {
		return fmt.Errorf("remove network %q: %w", network, err)
	}
	if err := stage("after tombolo remove", inventory{bridge: noBridge}); err != nil {
		return err
	}
	w.Flush()
	fmt.Fprintf(s.out, "\nDEL took %s ms a pod, and left nothing.\n", milliseconds(mean, 1))
	return nil
}

// removeNetwork is the operator's tombolo remove.
func removeNetwork(ctx context.Context, box *sandbox) error {
	node, err := tombolo.Open(ctx, &tombolo.Config{StateDir: box.stateDir})
	if err != nil {
		return err
	}
	return node.Remove(ctx, network)
}

const noBridge = "-"

// inventory counts what ADD makes and DEL has to take away, and names the bridge,
// which stays until the network is removed.
type inventory struct {
	vethEnds     int // the node's and the pods', and any other link that was not there before
	endpoints    int // owners of nf_tables elements
	reservations int
	records      int
	bridge       string
}

// String words it for an error.
func (i inventory) String() string {
	return fmt.Sprintf("%s, %s, %s, %s and bridge %s", plural(i.vethEnds, "veth end"), plural(i.endpoints, "owner")+" of nf_tables elements",
		plural(i.reservations, "reservation"), plural(i.records, "record"), i.bridge)
}

func (b *sandbox) count(ctx context.Context) (inventory, error) {
	i := inventory{bridge: noBridge}
	err := errors.Join(b.countLinks(&i), i.countEndpoints(ctx), i.countReservations(b.stateDir), i.countRecords(b.stateDir))
	return i, err
}

func (b *sandbox) countLinks(i *inventory) error {
	names, err := linkNames()
	if err != nil {
		return err
	}
	for _, name := range names {
		switch {
		case name == podBridge:
			i.bridge = name
		case !slices.Contains(b.links, name):
			i.vethEnds++
		}
	}
	for _, p := range b.pods {
		err := p.ns.Do(func() error {
			names, err := linkNames()
			i.vethEnds += len(slices.DeleteFunc(names, func(name string) bool { return name == "lo" }))
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// linkNames lists the links of the calling thread's namespace.
func linkNames() ([]string, error) {
	links, err := net.Interfaces()
	var names []string
	for _, l := range links {
		names = append(names, l.Name)
	}
	return names, err
}

func (i *inventory) countEndpoints(ctx context.Context) error {
	conn, err := nft.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	endpoints, err := conn.Endpoints(ctx, "")
	i.endpoints = len(endpoints)
	return err
}

// countReservations goes by the names of files: a reservation's is its address.
func (i *inventory) countReservations(stateDir string) error {
	err := filepath.WalkDir(filepath.Join(stateDir, "ipam"), func(path string, _ fs.DirEntry, err error) error {
		if _, notAddress := netip.ParseAddr(filepath.Base(path)); notAddress == nil {
			i.reservations++
		}
		return err
	})
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// countRecords counts what cannot be read too.
func (i *inventory) countRecords(stateDir string) error {
	dir, err := state.Open(stateDir)
	if err != nil {
		return err
	}
	records, damaged, err := dir.List(network)
	i.records = len(records) + len(damaged)
	return err
}

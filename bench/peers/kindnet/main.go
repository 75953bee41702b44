// Kindnet does an ADD in the way of kindnet's CNI plugin (cmd/cni-kindnet of
// kubernetes-sigs/kindnet, v1.0.0), which cannot be installed as a Go module. It is the
// same design with the same libraries, written anew: the containernetworking skeleton, an
// SQLite database for the addresses, the veth pair in one message and vishvananda/netlink
// for the rest, a /32 in the pod and a host route to it, no bridge, and no firewall. What
// is left out makes it faster than the original: port mappings, IPv6, and the log.
package main

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/040"
	"github.com/containernetworking/cni/pkg/version"
	_ "github.com/mattn/go-sqlite3"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

type config struct {
	types.NetConf
	Ranges  []string `json:"ranges"`
	DataDir string   `json:"dataDir"`
}

// The tables, and what is set for each connection, at each start.
var preparations = []string{
	`PRAGMA foreign_keys = ON`,
	`PRAGMA journal_mode=WAL`,
	`CREATE TABLE IF NOT EXISTS pods (container_id TEXT PRIMARY KEY, netns TEXT NOT NULL, ip TEXT, gateway TEXT,
		interface_name TEXT NOT NULL, creation_timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, UNIQUE (ip))`,
	`CREATE TABLE IF NOT EXISTS portmap_entries (id INTEGER PRIMARY KEY AUTOINCREMENT, container_id TEXT NOT NULL,
		FOREIGN KEY (container_id) REFERENCES pods(container_id) ON DELETE CASCADE)`,
	`CREATE TABLE IF NOT EXISTS ipam_ranges (id INTEGER PRIMARY KEY AUTOINCREMENT, subnet TEXT NOT NULL)`,
}

func main() {
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Del: del, Check: func(*skel.CmdArgs) error { return nil }},
		version.PluginSupports("0.4.0"), "kindnet's way")
}

func open(stdin []byte) (*config, *sql.DB, error) {
	c := &config{}
	if err := json.Unmarshal(stdin, c); err != nil {
		return nil, nil, err
	}
	if err := os.MkdirAll(c.DataDir, 0o755); err != nil {
		return nil, nil, err
	}
	db, err := sql.Open("sqlite3", filepath.Join(c.DataDir, "cni.db")+"?_busy_timeout=10000")
	for i := 0; err == nil && i < len(preparations); i++ {
		_, err = db.Exec(preparations[i])
	}
	return c, db, err
}

func add(args *skel.CmdArgs) error {
	c, db, err := open(args.StdinData)
	if err != nil {
		return err
	}
	defer db.Close()
	for _, subnet := range c.Ranges {
		if _, err := db.Exec(`INSERT INTO ipam_ranges (subnet) SELECT ? WHERE NOT EXISTS(SELECT 1 FROM ipam_ranges WHERE subnet = ?)`, subnet, subnet); err != nil {
			return err
		}
	}
	host := fmt.Sprintf("knet%08x", rand.Uint32())
	if _, err := db.Exec(`INSERT INTO pods (container_id, netns, interface_name) VALUES (?, ?, ?)`, args.ContainerID, args.Netns, host); err != nil {
		return err
	}
	ip, gateway, err := allocate(db, args.ContainerID)
	if err == nil {
		err = connect(args.Netns, args.IfName, host, ip, gateway)
	}
	if err != nil {
		_, failed := db.Exec(`DELETE FROM pods WHERE container_id = ?`, args.ContainerID)
		return errors.Join(err, failed)
	}
	r := current.Result{CNIVersion: "0.4.0", Interfaces: []*current.Interface{{Name: args.IfName}},
		IPs: []*current.IPConfig{{Version: "4", Interface: new(int), Address: net.IPNet{IP: ip, Mask: net.CIDRMask(32, 32)}, Gateway: gateway}}}
	return r.Print()
}

// allocate counts the pods, and takes an address at random that no pod has.
func allocate(db *sql.DB, id string) (ip, gateway net.IP, err error) {
	var subnet string
	if err := db.QueryRow(`SELECT subnet FROM ipam_ranges`).Scan(&subnet); err != nil {
		return nil, nil, err
	}
	prefix, err := netip.ParsePrefix(subnet)
	if err != nil {
		return nil, nil, err
	}
	var taken int
	if err := db.QueryRow(`SELECT COUNT(ip) FROM pods`).Scan(&taken); err != nil {
		return nil, nil, err
	}
	first := prefix.Masked().Addr().Next()
	size := 1<<(32-prefix.Bits()) - 8
	for taken < size {
		at := first.As4()
		offset := rand.IntN(size) + 6
		at[2], at[3] = at[2]+byte(offset>>8), at[3]+byte(offset)
		candidate := netip.AddrFrom4(at)
		var count int
		if err := db.QueryRow(`SELECT COUNT(*) FROM pods WHERE ip = ?`, candidate.String()).Scan(&count); err != nil {
			return nil, nil, err
		}
		if count > 0 || !prefix.Contains(candidate) {
			continue
		}
		_, err := db.Exec(`UPDATE pods SET ip = ?, gateway = ? WHERE container_id = ?`, candidate.String(), first.String(), id)
		return candidate.AsSlice(), first.AsSlice(), err
	}
	return nil, nil, errors.New("no address is free")
}

// connect makes the pair in one message, and configures both ends, when both are up.
func connect(path, ifname, host string, ip, gateway net.IP) error {
	pod, err := netns.GetFromPath(path)
	if err != nil {
		return err
	}
	inside, errInside := netlink.NewHandleAt(pod)
	outside, errOutside := netlink.NewHandle()
	if err := errors.Join(errInside, errOutside); err != nil {
		return err
	}
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: host}, PeerName: ifname, PeerNamespace: netlink.NsFd(pod)}
	if err := outside.LinkAdd(pair); err != nil {
		return err
	}
	lo, errLo := inside.LinkByName("lo")
	eth, errEth := inside.LinkByName(ifname)
	port, errPort := outside.LinkByName(host)
	if err := errors.Join(errLo, errEth, errPort); err != nil {
		return err
	}
	if err := errors.Join(inside.LinkSetUp(lo), inside.LinkSetUp(eth), outside.LinkSetUp(port)); err != nil {
		return err
	}
	for range 10 {
		if eth, err = inside.LinkByIndex(eth.Attrs().Index); err != nil || eth.Attrs().OperState == netlink.OperUp {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	single := net.CIDRMask(32, 32)
	address, way := &net.IPNet{IP: ip, Mask: single}, &net.IPNet{IP: gateway, Mask: single}
	all := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	in, out := eth.Attrs().Index, port.Attrs().Index
	return errors.Join(err, inside.AddrAdd(eth, &netlink.Addr{IPNet: address}), outside.AddrAdd(port, &netlink.Addr{IPNet: way}),
		inside.RouteAdd(&netlink.Route{LinkIndex: in, Scope: netlink.SCOPE_LINK, Dst: way}),
		inside.RouteAdd(&netlink.Route{LinkIndex: in, Src: ip, Gw: gateway, Dst: all}),
		outside.RouteAdd(&netlink.Route{LinkIndex: out, Src: gateway, Scope: netlink.SCOPE_HOST, Dst: address}))
}

func del(args *skel.CmdArgs) error {
	_, db, err := open(args.StdinData)
	if err != nil {
		return err
	}
	defer db.Close()
	pod, err := netns.GetFromPath(args.Netns)
	if err != nil {
		return err
	}
	inside, err := netlink.NewHandleAt(pod)
	if err != nil {
		return err
	}
	if eth, err := inside.LinkByName(args.IfName); err == nil {
		if err := inside.LinkDel(eth); err != nil {
			return err
		}
	}
	_, err = db.Exec(`DELETE FROM pods WHERE container_id = ?`, args.ContainerID)
	return err
}

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
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
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
	rows, err := db.Query(`SELECT ip FROM pods`)
	if err != nil {
		return nil, nil, err
	}
	for rows.Next() {
		var taken sql.NullString
		if err := rows.Scan(&taken); err != nil {
			return nil, nil, err
		}
	}
	rows.Close()
	first := prefix.Masked().Addr().Next()
	size := 1<<(32-prefix.Bits()) - 8
	for {
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
}

// connect makes the pair from within the pod's namespace, and configures both ends.
func connect(path, ifname, host string, ip, gateway net.IP) error {
	root, err := netns.Get()
	if err != nil {
		return err
	}
	pod, err := netns.GetFromPath(path)
	if err != nil {
		return err
	}
	s, err := nl.GetNetlinkSocketAt(pod, root, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: s}}
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(ifname)))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("veth"))
	peer := info.AddRtAttr(nl.IFLA_INFO_DATA, nil).AddRtAttr(nl.VETH_INFO_PEER, nil)
	nl.NewIfInfomsgChild(peer, unix.AF_UNSPEC)
	peer.AddRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(host))
	peer.AddRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(root)))
	req.AddData(info)
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return err
	}
	inside, err := netlink.NewHandleAt(pod)
	if err != nil {
		return err
	}
	outside, err := netlink.NewHandle()
	if err != nil {
		return err
	}
	lo, errLo := inside.LinkByName("lo")
	eth, errEth := inside.LinkByName(ifname)
	port, errPort := outside.LinkByName(host)
	if err := errors.Join(errLo, errEth, errPort); err != nil {
		return err
	}
	for range 100 { // until both ends are up
		if eth, err = inside.LinkByIndex(eth.Attrs().Index); err != nil || eth.Attrs().OperState == netlink.OperUp {
			break
		}
		if err := errors.Join(inside.LinkSetUp(lo), inside.LinkSetUp(eth), outside.LinkSetUp(port)); err != nil {
			return err
		}
		if eth, err = inside.LinkByIndex(eth.Attrs().Index); err != nil || eth.Attrs().OperState == netlink.OperUp {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	single := net.CIDRMask(32, 32)
	address, way := &net.IPNet{IP: ip, Mask: single}, &net.IPNet{IP: gateway, Mask: single}
	steps := []func() error{
		func() error { return err },
		func() error { return inside.AddrAdd(eth, &netlink.Addr{IPNet: address}) },
		func() error { return netlink.AddrAdd(port, &netlink.Addr{IPNet: way}) },
		func() error {
			return inside.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: way})
		},
		func() error {
			return inside.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Src: ip, Gw: gateway, Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}})
		},
		func() error {
			return outside.RouteAdd(&netlink.Route{LinkIndex: port.Attrs().Index, Src: gateway, Scope: netlink.SCOPE_HOST, Dst: address})
		},
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
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

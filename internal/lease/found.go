package lease

import (
	"errors"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc"
)

// found is a lease as a network manager wrote it down. A value that its file does not have is
// zero.
type found struct {
	path    string
	written time.Time

	address    netip.Addr
	server     netip.Addr
	routes     []dhcpc.Route
	routers    []netip.Addr
	dns        []netip.Addr
	domain     string
	hostName   string
	clientID   dhcpc.Hex
	identified bool // clientID is known, even if it is empty
	usesMAC    bool // the manager's own choice of an identifier is the MAC address
	mtu        int

	// The times from the grant on; forever is without an end.
	renew, rebind, lifetime time.Duration
	// expire is for files that tell the time of day.
	expire time.Time
}

// forever is the lifetime of a lease without an end.
const forever = time.Duration(math.MaxInt64)

// ends says when the lease does; the zero time, where it does not or that is not known.
func (f *found) ends() time.Time {
	switch {
	case !f.expire.IsZero():
		return f.expire
	case f.lifetime > 0 && f.lifetime != forever:
		return f.written.Add(f.lifetime)
	}
	return time.Time{}
}

// lease gives the lease as the keeper takes it up: it ends when the kernel ends the
// address, or, where that is not the kernel's to do, when the file says. It is nil where
// there is nothing to renew.
func (f *found) lease(now time.Time, at *addr.Address) *dhcpc.Lease {
	expire := f.ends().UTC()
	if at.Valid != nil {
		expire = now.Add(*at.Valid)
	} else if f.ends().IsZero() {
		return nil
	}
	left := max(expire.Sub(now), 0)
	lifetime := f.lifetime
	if lifetime == forever || lifetime < left {
		lifetime = left
	}
	obtained := expire.Add(-lifetime)
	renew, rebind := f.renew, f.rebind
	// RFC 2131, section 4.4.5, where nothing or nonsense is said.
	if rebind <= 0 || rebind > lifetime {
		rebind = lifetime - lifetime/8
	}
	if renew <= 0 || renew > rebind {
		renew = min(lifetime/2, rebind)
	}
	l := &dhcpc.Lease{
		Address: at.Prefix, Routes: f.routes, Routers: f.routers, DNS: f.dns, Domain: f.domain, MTU: f.mtu, Server: f.server,
		Obtained: obtained, Renew: obtained.Add(renew), Rebind: obtained.Add(rebind), Expire: expire,
	}
	if !l.Server.IsValid() {
		l.Server = netip.IPv4Unspecified() // which the keeper takes for: ask them all
	}
	return l
}

// guesses are identities to try, the likeliest first. Servers find a client that names
// none by its MAC address, most of them also if it named one before.
func (f *found) guesses(mac net.HardwareAddr) []dhcpc.Hex {
	const ethernet = 1 // RFC 2132, section 9.14
	byMAC := append(dhcpc.Hex{ethernet}, mac...)
	if f.usesMAC {
		return []dhcpc.Hex{byMAC, nil}
	}
	return []dhcpc.Hex{nil, byMAC}
}

// router makes a default route of the first router, for files that tell no routes, or
// those of option 33 only.
func (f *found) router() {
	if len(f.routers) > 0 {
		f.routes = append(f.routes, dhcpc.Route{Dst: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Via: f.routers[0]})
	}
}

// newest gives the newest lease that a network manager wrote down and that is in force: its
// address is among those given, and either the kernel will end that, or the file says that
// it has not ended. Files that cannot be read do not count.
func (a *Adoption) newest(now time.Time) *found {
	var best *found
	for _, f := range a.files() {
		at := a.find(f.address)
		if at == nil || at.Valid == nil && !f.ends().After(now) {
			continue
		}
		if best == nil || f.written.After(best.written) {
			best = f
		}
	}
	return best
}

// files gives what is in the network managers' files about the NIC.
func (a *Adoption) files() []*found {
	root := a.Root
	if root == "" {
		root = "/"
	}
	var all []*found
	read := func(path string, parse func([]byte) *found) {
		data, written, err := readForeign(path)
		if err != nil {
			return
		}
		if f := parse(data); f != nil {
			f.path, f.written = path, written
			all = append(all, f)
		}
	}
	read(filepath.Join(root, "run/systemd/netif/leases", strconv.Itoa(a.Index)), parseKeys)
	for _, path := range list(root, "var/lib/NetworkManager", "internal-", "-"+a.NIC+".lease") {
		read(path, parseNetworkManager)
	}
	for _, path := range []string{"var/lib/dhcpcd/" + a.NIC + ".lease", "var/lib/dhcpcd5/dhcpcd-" + a.NIC + ".lease"} {
		read(filepath.Join(root, path), parsePacket)
	}
	return all
}

// list gives the files of a directory whose names begin and end with something.
func list(root, dir, prefix, suffix string) []string {
	dir = filepath.Join(root, dir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var paths []string
	for _, e := range entries {
		if name := e.Name(); len(name) >= len(prefix)+len(suffix) && strings.HasPrefix(name, prefix) && strings.HasSuffix(name, suffix) {
			paths = append(paths, filepath.Join(dir, name))
		}
	}
	return paths
}

// maxForeign bounds what is read of another program's file, in bytes.
const maxForeign = 1 << 20

var errNotAFile = errors.New("not a regular file")

// readForeign reads a file, and when it was written. Unlike file.Read it follows symbolic
// links, which administrators put in such places.
func readForeign(path string) ([]byte, time.Time, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, time.Time{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = &os.PathError{Op: "read", Path: path, Err: errNotAFile}
	}
	if err != nil {
		return nil, time.Time{}, err
	}
	data, err := io.ReadAll(io.LimitReader(f, maxForeign))
	return data, st.ModTime(), err
}

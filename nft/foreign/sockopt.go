package foreign

import (
	"bytes"
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// legacyFamily is what legacy iptables of IPv4 and of IPv6 differ in
// (include/uapi/linux/netfilter_ipv4/ip_tables.h, …_ipv6/ip6_tables.h). The numbers
// of the socket options are the same.
type legacyFamily struct {
	proto   byte // of nf_tables
	names   string
	domain  int
	level   int
	program string
}

const (
	getInfo    = 64 // IPT_SO_GET_INFO, IP6T_SO_GET_INFO
	getEntries = 65 // IPT_SO_GET_ENTRIES, IP6T_SO_GET_ENTRIES

	tableNameLen = 32 // XT_TABLE_MAXNAMELEN

	tries = 200 // while others change the table
)

func legacyFamilies() [2]legacyFamily {
	return [2]legacyFamily{
		{unix.NFPROTO_IPV4, "ip_tables_names", unix.AF_INET, unix.SOL_IP, "iptables-legacy"},
		{unix.NFPROTO_IPV6, "ip6_tables_names", unix.AF_INET6, unix.SOL_IPV6, "ip6tables-legacy"},
	}
}

// readLegacyFilter reads the table filter of one family; false if there is none.
// Nothing may ask for a table that is not there: that would make it.
func readLegacyFilter(ns *netns.NS, f legacyFamily) (info, entries []byte, found bool, _ error) {
	read := func() error {
		// Of the thread: /proc/self is the first thread's, in its namespace.
		names, err := os.ReadFile("/proc/thread-self/net/" + f.names)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		for name := range bytes.Lines(names) {
			found = found || string(bytes.TrimSpace(name)) == iptablesTable
		}
		if !found {
			return nil
		}
		fd, err := unix.Socket(f.domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		info, entries, err = getLegacyTable(fd, f.level, iptablesTable)
		return err
	}
	var err error
	if ns == nil {
		err = read()
	} else {
		err = ns.Do(read)
	}
	if err != nil {
		return nil, nil, false, &tombolo.OpError{Op: "read legacy table", Object: f.program + " -t " + iptablesTable, Err: err}
	}
	return info, entries, found, nil
}

// getLegacyTable reads a table: its struct ipt_getinfo, and the entries alone.
func getLegacyTable(fd, level int, name string) (info, entries []byte, _ error) {
	const (
		infoLen   = tableNameLen + 4*13 // struct ipt_getinfo
		headerLen = tableNameLen + 8    // struct ipt_get_entries: name, size, padding
	)
	for range tries {
		info = make([]byte, infoLen)
		copy(info, name)
		if err := nl.SocketOption(fd, level, getInfo, info); err != nil {
			return nil, nil, err
		}
		table, err := decodeLegacyInfo(info)
		if err != nil {
			return nil, nil, err
		}
		entries = make([]byte, headerLen+int(table.size))
		copy(entries, info[:tableNameLen])
		copy(entries[tableNameLen:], info[infoLen-4:]) // the size
		err = nl.SocketOption(fd, level, getEntries, entries)
		if errors.Is(err, unix.EAGAIN) {
			continue // it has another size by now
		}
		if err != nil {
			return nil, nil, err
		}
		return info, entries[headerLen:], nil
	}
	return nil, nil, nftnl.ErrOvertaken
}

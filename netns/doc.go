// Package netns opens, creates and enters network namespaces.
//
//	ns, err := netns.New() // or netns.Open("/run/netns/pod")
//	defer ns.Close()
//	conn, err := addr.Dial(ns) // its socket is in ns, and works from any goroutine
//	defer conn.Close()
//	err = ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) })
//
// A namespace is a handle (NS), not a path. Paths and inode numbers are reused, whereas a handle keeps its namespace
// alive. Other packages take a handle when they open a connection, and open its socket in that namespace. Such a
// socket works from any goroutine. So NS.Do is needed only to open files or sockets, and to read and write files
// below /proc/sys/net.
//
// Creating or entering a namespace needs CAP_SYS_ADMIN; opening one needs no capability. The package needs Linux 5.14
// or later.
package netns

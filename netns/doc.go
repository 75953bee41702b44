// Package netns opens, creates and enters network namespaces.
//
//	ns, err := netns.New() // or netns.Open("/run/netns/pod")
//	defer ns.Close()
//	conn, err := addr.Dial(ns) // a socket in there, for any goroutine
//	defer conn.Close()
//	err = ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) })
//
// A namespace is a handle (NS), not a path: paths and inode numbers are reused,
// and a handle keeps its namespace alive. The other packages take one where
// they dial and bind their socket to it at creation; such a socket then works from
// any goroutine, so that entering a namespace (NS.Do) is needed only to open
// something or to read and write below /proc/sys/net.
//
// It needs CAP_SYS_ADMIN to create and to enter a namespace, none to open one.
// Linux 5.14 and later.
package netns

// Package netns opens, creates and enters network namespaces.
//
//	pod, err := netns.Open("/run/netns/pod")
//	defer pod.Close()
//	conn, err := addr.Dial(pod) // a socket in the pod's namespace
//	err = pod.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", on, 0) })
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

package main

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// lacking says which of the capabilities of a privileged command the process is without,
// and whether it is hopeless to try: nothing goes without CAP_NET_ADMIN, but a network whose
// pods need not be entered without CAP_SYS_ADMIN.
func lacking() (names string, hopeless bool, _ error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return "", false, fmt.Errorf("read the capabilities: %w", err)
	}
	var list []string
	for _, c := range []struct {
		bit  int
		name string
	}{{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}} {
		if data[0].Effective&(1<<c.bit) == 0 {
			list = append(list, c.name)
		}
	}
	return strings.Join(list, " and "), data[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0, nil
}

package main

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// lacking says which of the capabilities of a privileged command the process is without.
func lacking() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read the capabilities: %w", err)
	}
	var names []string
	for _, c := range []struct {
		bit  int
		name string
	}{{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}} {
		if data[0].Effective&(1<<c.bit) == 0 {
			names = append(names, c.name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("user %d lacks %s: run it as root, as by sudo", os.Geteuid(), strings.Join(names, " and "))
}

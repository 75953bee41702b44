package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

func (f *tuningConf) run(ctx context.Context, c *call) (*current.Result, error) {
	if c.verb == "DEL" {
		f.forget(c)
		return nil, nil
	}

	prev, change, err := c.chainedChange()
	if err != nil {
		return nil, err
	}

	if c.verb == "CHECK" {
		return nil, c.checkTuned(f)
	}

	if err := f.checkAllowed(ctx); err != nil {
		return nil, err
	}

	if err := c.tune(ctx, change, f); err != nil {
		return nil, err
	}

	for _, one := range prev.Interfaces {
		if f.MAC != nil && one.Name == c.ifName {
			one.Mac = *f.MAC
		}
	}

	return prev, nil
}

// tune sets kernel parameters, and then attributes of the pod's interface. If the attributes cannot be set or recorded,
// it restores all attributes, but not the parameters. Later verbs restore nothing, since after ADD the settings belong
// to the pod.
func (c *call) tune(ctx context.Context, change network.Change, f *tuningConf) error {
	return inNamespace(c.netns, func(conn *nl.Conn, pod *netns.NS) error {
		err := f.eachSysctl(pod, c.ifName, func(path, value string) error {
			return sysctl.Write(strings.TrimPrefix(path, "/proc/sys/"), value)
		})
		if err != nil || f.attributes == (attributes{}) {
			return err
		}

		l, err := findLink(conn, c.ifName)
		if err != nil {
			return err
		}

		before := f.currentValues(l)
		if f.MAC != nil {
			// Check before the pod gets the MAC. If another machine has the MAC, the pod's first frame would mislead
			// the LAN's switches.
			if err := state.Ignore(change.RefuseMAC(ctx, f.mac()), network.ErrNotAttached); err != nil {
				return err
			}
		}

		if err = f.set(conn, l, c.ifName); err == nil {
			err = f.follow(ctx, change)
		}

		if err != nil {
			return errors.Join(err, before.set(conn, l, c.ifName))
		}

		return nil
	})
}

// follow passes a new MAC or MTU to package network. For a MAC, that updates the attachment's record and the MAC that
// the firewall lets the pod use. An MTU larger than the port's is recorded, and the port gets it too. follow returns
// nil for an attachment that Tombolo did not make.
func (f *tuningConf) follow(ctx context.Context, change network.Change) error {
	if f.MAC == nil && f.MTU == nil {
		return nil
	}
	return state.Ignore(change.Tuned(ctx, f.mac(), orZero(f.MTU)), network.ErrNotAttached)
}

// eachSysctl calls do in the pod's namespace with the path and the value of each parameter, sorted by name. It stops at
// the first error.
func (f *tuningConf) eachSysctl(pod *netns.NS, ifName string, do func(path, value string) error) error {
	if len(f.Sysctl) == 0 {
		return nil
	}
	return pod.Do(func() error {
		for _, key := range slices.Sorted(maps.Keys(f.Sysctl)) {
			if err := do(sysctlFile(key, ifName), f.Sysctl[key]); err != nil {
				return fmt.Errorf("sysctl %s: %w", key, err)
			}
		}
		return nil
	})
}

// forget deletes the file in which the reference plugin stored the attributes before it changed them. It logs errors.
func (f *tuningConf) forget(c *call) {
	err := os.Remove(filepath.Join(f.DataDir, c.containerID+"_"+c.ifName+".json"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.log.warn(err.Error())
	}
}

// checkTuned returns an error if a sysctl, or an attribute of the pod's interface, differs from the configuration. It
// compares only configured attributes, and promiscuous mode, which must be off unless it is requested.
func (c *call) checkTuned(f *tuningConf) error {
	return inNamespace(c.netns, func(conn *nl.Conn, pod *netns.NS) error {
		err := f.eachSysctl(pod, c.ifName, func(path, value string) error {
			data, err := os.ReadFile(path)
			if have := strings.TrimSuffix(string(data), "\n"); err == nil && have != value {
				err = newError(codeDiffers, "it is %s, and was set to %s", have, value)
			}
			return err
		})
		if err != nil {
			return err
		}

		l, err := findLink(conn, c.ifName)
		if err != nil {
			return err
		}

		want := f.attributes

		// Like the reference plugin, expect promiscuous mode to be off unless it is requested.
		want.Promisc = new(orZero(want.Promisc))
		if want.MAC != nil {
			want.MAC = new(want.mac().String())
		}

		wanted, _ := json.Marshal(want)
		has, _ := json.Marshal(want.currentValues(l))
		if string(wanted) != string(has) {
			return newError(codeDiffers, "%s has %s, and was set to %s", c.ifName, has, wanted)
		}

		return nil
	})
}

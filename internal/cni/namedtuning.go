package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

func (f *tuningConf) run(ctx context.Context, c *call) (*current.Result, error) {
	if c.verb == "DEL" {
		f.untune(c)
		return nil, nil
	}
	prev, of, err := c.chained()
	if err != nil {
		return nil, err
	}
	if c.verb == "CHECK" {
		return nil, c.checkTuned(f)
	}
	if err := f.allowed(ctx); err != nil {
		return nil, err
	}
	if err := c.tune(ctx, of, f); err != nil {
		return nil, err
	}
	for _, one := range prev.Interfaces {
		if f.MAC != nil && one.Name == c.ifName {
			one.Mac = *f.MAC
		}
	}
	return prev, nil
}

// tune does not overwrite what an ADD before, without a DEL since, has saved: that is what the link had before it was
// tuned.
func (c *call) tune(ctx context.Context, of network.Change, f *tuningConf) error {
	return within(c.netns, func(conn *nl.Conn, pod *netns.NS) error {
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
		path, had := f.backup(c), f.of(l)
		first := loadAttributes(path)
		if err := orZero(first).over(had).save(path); err != nil {
			return err
		}
		err = f.set(conn, l, c.ifName)
		if err == nil {
			err = f.follow(ctx, of)
		}
		if err == nil {
			return nil
		}
		err = errors.Join(err, had.set(conn, l, c.ifName))
		if first != nil {
			return errors.Join(err, first.save(path))
		}
		return errors.Join(err, os.Remove(path))
	})
}

// follow has the guard and the record of the pod follow.
func (f *tuningConf) follow(ctx context.Context, of network.Change) error {
	if f.MAC == nil && f.MTU == nil {
		return nil
	}
	err := of.Tuned(ctx, f.mac(), orZero(f.MTU))
	if errors.Is(err, network.ErrNotAttached) {
		return nil
	}
	return err
}

// eachSysctl takes the parameters in the order of their names. The files are the pod's.
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

// untune gives the link back the attributes that ADD changed. It deletes the file also if that fails: the namespace
// may be gone, and a pod can put a link there that takes no such value. As in the reference, it never fails: the
// interface goes next.
func (f *tuningConf) untune(c *call) {
	had := loadAttributes(f.backup(c))
	if had == nil {
		return
	}
	enter := withinPod
	if c.sameNetNS() {
		enter = within // which enters the plugin's own, too
	}
	err := enter(c.netns, func(conn *nl.Conn, _ *netns.NS) error {
		l, err := findLink(conn, c.ifName)
		if err != nil {
			return nil // what it had went with it
		}
		return had.set(conn, l, c.ifName)
	})
	if removeErr := os.Remove(f.backup(c)); !errors.Is(removeErr, fs.ErrNotExist) {
		err = errors.Join(err, removeErr)
	}
	if err != nil {
		c.log.warn(err.Error())
	}
}

// checkTuned compares what is set with what it should be.
func (c *call) checkTuned(f *tuningConf) error {
	return within(c.netns, func(conn *nl.Conn, pod *netns.NS) error {
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
		want.Promisc = new(orZero(want.Promisc)) // off where it is not to be on, as there
		if want.MAC != nil {
			want.MAC = new(want.mac().String())
		}
		wanted, _ := json.Marshal(want)
		has, _ := json.Marshal(want.of(l))
		if string(wanted) != string(has) {
			return newError(codeDiffers, "%s has %s, and was set to %s", c.ifName, has, wanted)
		}
		return nil
	})
}

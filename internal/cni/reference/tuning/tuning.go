// Package tuning is the reference's plugin of that name: it sets kernel parameters of a pod, and
// attributes of its interface.
package tuning

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"

	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/cni/reference"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/podlink"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

// Run is the plugin of that name.
func Run(ctx context.Context, c *reference.Call) (*current.Result, error) {
	switch c.Verb {
	case "ADD":
		return add(ctx, c)
	case "CHECK":
		return nil, check(c)
	case "DEL":
		del(c)
	}
	return nil, nil
}

// chained reads the configuration, and the result of the plugins before, which is needed.
func chained(c *reference.Call) (*conf, *current.Result, error) {
	f, err := read(c)
	if err != nil {
		return nil, nil, err
	}
	prev, err := c.Chained()
	return f, prev, err
}

func add(ctx context.Context, c *reference.Call) (*current.Result, error) {
	f, prev, err := chained(c)
	if err != nil {
		return nil, err
	}
	if err := f.allowed(); err != nil {
		return nil, err
	}
	err = podlink.Within(c.NetNS, func(conn *nl.Conn, pod *netns.NS) error {
		if err := f.write(pod, c.IfName); err != nil || !f.ofLink() {
			return err
		}
		l, err := find(conn, c.IfName)
		if err != nil {
			return err
		}
		b, first := f.backup(l), load(f.file(c))
		if err := b.under(first).save(f.file(c)); err != nil {
			return err
		}
		err = set(conn, l.Index, f.request(), c.IfName)
		if err == nil {
			err = follow(ctx, c, f.mac, f.mtu)
		}
		if err == nil {
			return nil
		}
		err = errors.Join(err, revert(conn, b, f.file(c), c.IfName))
		if first != nil {
			err = errors.Join(err, first.save(f.file(c)))
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, one := range prev.Interfaces {
		if f.mac != nil && one.Name == c.IfName {
			one.Mac = *f.MAC
		}
	}
	return prev, nil
}

// follow has the guard and the record of a pod of ours follow; there are none of another's.
func follow(ctx context.Context, c *reference.Call, mac net.HardwareAddr, mtu int) error {
	if mac == nil && mtu == 0 {
		return nil
	}
	node, err := c.Open()
	if err != nil {
		return err
	}
	err = node.Tuned(ctx, c.Key(), mac, mtu)
	if errors.Is(err, network.ErrNotAttached) {
		return nil
	}
	return err
}

// write sets the kernel parameters, in the order of their names.
func (f *conf) write(pod *netns.NS, ifName string) error {
	return f.eachSysctl(pod, ifName, func(_, path, value string) error { return os.WriteFile(path, []byte(value), 0) })
}

// eachSysctl looks at the names of all first. The files are those of the pod's.
func (f *conf) eachSysctl(pod *netns.NS, ifName string, do func(key, path, value string) error) error {
	var keys, paths []string
	for key := range f.Sysctl {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		path, err := sysctlFile(key, ifName)
		if err != nil {
			return err
		}
		paths = append(paths, path)
	}
	if len(keys) == 0 {
		return nil
	}
	return pod.Do(func() error {
		for i, key := range keys {
			if err := do(key, paths[i], f.Sysctl[key]); err != nil {
				return fmt.Errorf("sysctl %s: %w", key, err)
			}
		}
		return nil
	})
}

// find gives what of the link can be set.
func find(conn *nl.Conn, name string) (*link.Link, error) {
	var l link.Link
	var b nl.Batch
	link.Get(&b, name, 0, &l, unix.IFLA_ADDRESS, unix.IFLA_MTU, unix.IFLA_TXQLEN)
	return &l, conn.Execute(&b)
}

func set(conn *nl.Conn, index int, r link.Request, name string) error {
	var b nl.Batch
	r.Index = index
	r.Set(&b, "tune link", name)
	return conn.Execute(&b)
}

// flag switches one of the link's on or off.
func flag(r *link.Request, bit uint32, on bool) {
	r.Change |= bit
	if on {
		r.Flags |= bit
	}
}

// request is all of the link that is to be set, in one message.
func (f *conf) request() link.Request {
	r := link.Request{MAC: f.mac}
	if f.mtu != 0 {
		r.MTU = &f.mtu
	}
	if f.promisc() {
		flag(&r, unix.IFF_PROMISC, true)
	}
	if f.AllMulti != nil {
		flag(&r, unix.IFF_ALLMULTI, *f.AllMulti)
	}
	if f.TxQLen != nil {
		r.TxQLen = new(uint32(*f.TxQLen))
	}
	return r
}

// backup is what the link has of what is to be set.
func (f *conf) backup(l *link.Link) *backup {
	b := &backup{}
	has := func(flag uint32) *bool { return new(l.Flags&flag != 0) }
	if f.mac != nil {
		b.MAC = l.MAC.String()
	}
	if f.promisc() {
		b.Promisc = has(unix.IFF_PROMISC)
	}
	if f.mtu != 0 {
		b.MTU = l.MTU
	}
	if f.AllMulti != nil {
		b.AllMulti = has(unix.IFF_ALLMULTI)
	}
	if f.TxQLen != nil {
		b.TxQLen = &l.TxQLen
	}
	return b
}

// under is the backup with what an ADD before, without a DEL since, has saved instead: that is what the link
// had before it was tuned.
func (b *backup) under(first *backup) *backup {
	if first == nil {
		return b
	}
	kept := *b
	if first.MAC != "" {
		kept.MAC = first.MAC
	}
	if first.MTU != 0 {
		kept.MTU = first.MTU
	}
	kept.Promisc, kept.AllMulti = cmp.Or(first.Promisc, b.Promisc), cmp.Or(first.AllMulti, b.AllMulti)
	kept.TxQLen = cmp.Or(first.TxQLen, b.TxQLen)
	return &kept
}

// revert gives the link what it had, and deletes the file.
func revert(conn *nl.Conn, b *backup, path, name string) error {
	l, err := find(conn, name)
	if err != nil {
		return os.Remove(path) // what it had went with it
	}
	r := link.Request{TxQLen: b.TxQLen}
	if r.MAC, err = net.ParseMAC(b.MAC); err != nil {
		r.MAC = nil
	}
	if b.MTU != 0 {
		r.MTU = &b.MTU
	}
	if b.Promisc != nil {
		flag(&r, unix.IFF_PROMISC, *b.Promisc)
	}
	if b.AllMulti != nil {
		flag(&r, unix.IFF_ALLMULTI, *b.AllMulti)
	}
	// A pod can put a link there that takes no such value. The file would stay for good.
	return errors.Join(set(conn, l.Index, r, name), os.Remove(path))
}

// del reverts what ADD made of the link, whose file goes where the namespace has. As in the
// reference, nothing else that goes wrong fails it: the interface goes next.
func del(c *reference.Call) {
	f := conf{DataDir: defaultDataDir}
	_ = json.Unmarshal(c.Stdin, &struct {
		DataDir *string `json:"dataDir"`
	}{&f.DataDir}) // what is wrong with the rest keeps nothing from going
	b := load(f.file(c))
	if b == nil {
		return
	}
	within := podlink.WithinPod
	if c.SameNetNS {
		within = podlink.Within // which enters the plugin's own, too
	}
	err := within(c.NetNS, func(conn *nl.Conn, _ *netns.NS) error { return revert(conn, b, f.file(c), c.IfName) })
	if removeErr := os.Remove(f.file(c)); !errors.Is(removeErr, fs.ErrNotExist) {
		err = errors.Join(err, removeErr)
	}
	if err != nil {
		c.Warn(err.Error())
	}
}

// check compares what is set with what it should be.
func check(c *reference.Call) error {
	f, _, err := chained(c)
	if err != nil {
		return err
	}
	return podlink.Within(c.NetNS, func(conn *nl.Conn, pod *netns.NS) error {
		err := f.eachSysctl(pod, c.IfName, func(_, path, value string) error {
			data, err := os.ReadFile(path)
			if have := strings.TrimSuffix(string(data), "\n"); err == nil && have != value {
				err = differs("its value", value, have)
			}
			return err
		})
		if err != nil {
			return err
		}
		l, err := find(conn, c.IfName)
		if err != nil {
			return err
		}
		promisc, allMulti := l.Flags&unix.IFF_PROMISC != 0, l.Flags&unix.IFF_ALLMULTI != 0
		switch {
		case f.mac != nil && !bytes.Equal(f.mac, l.MAC):
			return differs("the MAC of "+c.IfName, f.mac, l.MAC)
		case f.promisc() != promisc:
			return differs("promisc of "+c.IfName, f.promisc(), promisc)
		case f.mtu != 0 && f.mtu != l.MTU:
			return differs("the MTU of "+c.IfName, f.mtu, l.MTU)
		case f.AllMulti != nil && *f.AllMulti != allMulti:
			return differs("allmulti of "+c.IfName, *f.AllMulti, allMulti)
		case f.TxQLen != nil && *f.TxQLen != int(l.TxQLen):
			return differs("txQLen of "+c.IfName, *f.TxQLen, l.TxQLen)
		}
		return nil
	})
}

func differs(what string, want, have any) error {
	return reference.Errorf(reference.CodeDiffers, "%s is %v, and was set to %v", what, have, want)
}

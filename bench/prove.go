package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/netns"
)

// A figure counts only if the work was done, so every measured ADD must give a
// result with an address of each family and a pod that pings its gateway, and
// every DEL must leave what was there before.

// checkResult looks at a plugin's result: one address in each subnet, in order.
func checkResult(stdout []byte, wanted []netip.Prefix) error {
	var result struct {
		IPs []struct {
			Address netip.Prefix `json:"address"`
			Gateway netip.Addr   `json:"gateway"`
		} `json:"ips"`
	}
	if err := json.Unmarshal(stdout, &result); err != nil {
		return fmt.Errorf("decode result: %w in %q", err, stdout)
	}
	if len(result.IPs) != len(wanted) {
		return fmt.Errorf("result has %d addresses, want %d: %s", len(result.IPs), len(wanted), stdout)
	}
	for i, subnet := range wanted {
		if ip := result.IPs[i]; ip.Address.Masked() != subnet || ip.Gateway != gatewayOf(subnet) {
			return fmt.Errorf("result has address %s by gateway %s, want one of %s by %s",
				ip.Address, ip.Gateway, subnet, gatewayOf(subnet))
		}
	}
	return nil
}

// provePod pings every gateway from within the pod's namespace.
func provePod(path string, wanted []netip.Prefix) error {
	ns, err := netns.Open(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	for _, subnet := range wanted {
		if err := ping(ns, gatewayOf(subnet), pingLimit); err != nil {
			return err
		}
	}
	return nil
}

// proveGone compares the node's and the pod's interfaces with what they should be
// after a DEL.
func proveGone(n *node, baseline []string, pod string) error {
	left, err := n.ns.links()
	if err != nil {
		return err
	}
	if !slices.Equal(left, baseline) {
		return fmt.Errorf("%s: links after DEL: %v, want %v", n.contender, left, baseline)
	}
	inside, err := netns.Open(pod)
	if err != nil {
		return err
	}
	defer inside.Close()
	left, err = namedNS{NS: inside}.links()
	if err == nil && !slices.Equal(left, []string{"lo"}) {
		err = fmt.Errorf("%s: links in the pod after DEL: %v", n.contender, left)
	}
	return err
}

// inventory is all that a contender could leave behind on its node: links, files of
// its state, and the firewall. Names only: counters and the contents of a
// last-address file may change.
func (n *node) inventory() (string, error) {
	names, err := n.ns.links()
	if err != nil {
		return "", err
	}
	err = filepath.WalkDir(n.state, func(path string, _ fs.DirEntry, err error) error {
		names = append(names, path)
		return err
	})
	if err != nil {
		return "", err
	}
	nft, err := exec.LookPath("nft")
	if err != nil {
		return strings.Join(names, "\n"), nil
	}
	rules, err := n.exec(command{argv: []string{nft, "list", "ruleset"}, env: os.Environ()}, run)
	if err != nil {
		return "", err
	}
	counters := regexp.MustCompile(`packets \d+ bytes \d+`)
	return strings.Join(names, "\n") + "\n" + string(counters.ReplaceAll(rules.stdout, nil)), nil
}

const (
	pingAgain = 20 * time.Millisecond // the pause after an error
	pingLimit = time.Minute           // on a busy machine; longer than duplicate address detection on a bridge
)

// ping sends ICMP echo requests from a namespace until one is answered. Errors are
// one more reason to try again: a link without carrier yet refuses, and so does an
// address that is still checked for duplicates.
func ping(ns *netns.NS, to netip.Addr, limit time.Duration) error {
	for until := time.Now().Add(limit); ; time.Sleep(pingAgain) {
		_, err := icmp.Ping(context.Background(), ns, to, icmp.Echo{Wait: max(time.Until(until), pingAgain)})
		if err == nil || time.Now().After(until) {
			return err
		}
	}
}

package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

// host is what a verb holds of the node: the kernel on its side, the state
// directory, and the lock on it.
type host struct {
	call     *call
	settings settings
	br       *bridge.Conn
	fw       *nft.Conn
	dir      *state.Dir
	lock     *state.Lock
	epoch    state.Epoch
	note     string // of the lock, as this verb found it

	// hostLease is the lock of the lease that the host has by a NIC, where a command has it
	// all the time.
	hostLease *lease.Held
	// later is done once no lock is held: it takes locks that come before the state's.
	later []func() error
}

// openHost opens the kernel and the state directory, without the lock.
func (c *call) openHost(s settings) (*host, error) {
	h := &host{call: c, settings: s}
	var err error
	if h.br, err = c.DialBridge(); err != nil {
		return nil, err
	}
	if h.fw, err = c.DialNFT(&nft.Config{Mark: s.Mark}); err != nil {
		h.br.Close()
		return nil, err
	}
	if h.dir, err = state.Open(s.StateDir); err != nil {
		h.Close()
		return nil, newError(codeIO, "%v", err)
	}
	return h, nil
}

// Close gives everything back, the locks first, and does what was left for then.
func (h *host) Close() {
	h.leave()
	if h.hostLease != nil {
		h.hostLease.Close()
	}
	for _, do := range h.later {
		if err := do(); err != nil {
			h.call.log.warn(oneLine(err))
		}
	}
	h.br.Close()
	if h.fw != nil {
		h.fw.Close()
	}
}

// enter takes the shared lock and sees to it that the state belongs to this life
// of the node. It may be called again.
func (h *host) enter(ctx context.Context) error {
	if h.lock != nil {
		return nil
	}
	var err error
	h.lock, h.epoch, err = h.dir.Enter(ctx, h.begin)
	if err == nil {
		h.readNote()
	}
	return err
}

// leave gives the lock up, so that something slow can be waited for, or a lock that
// comes before it. What was seen under it may be otherwise after the next enter.
func (h *host) leave() {
	if h.lock == nil {
		return
	}
	h.leaveNote()
	h.lock.Close()
	h.lock = nil
}

// enterAlone takes the lock exclusively.
func (h *host) enterAlone(ctx context.Context) error {
	if err := h.enter(ctx); err != nil {
		return err
	}
	return h.lock.Upgrade(ctx)
}

// The note is which networks the firewall was ready for, in this epoch and namespace,
// when the last verb was done with it: so the next one asks for a single number, unless
// others have changed nf_tables since.

func (h *host) readNote() {
	h.note = h.lock.Note()
	var seal nft.Seal
	if text, ok := strings.CutPrefix(h.note, h.epoch.Token()+" "); ok {
		seal, _ = nft.ParseSeal(text) // else as if there were none
	}
	h.fw.Trust(seal)
}

func (h *host) leaveNote() {
	if h.lock == nil || h.fw == nil {
		return
	}
	seal := h.fw.Seal()
	if note := h.epoch.Token() + " " + seal.String(); len(seal.Networks) > 0 && note != h.note {
		// Without it, the next verb looks for itself.
		_ = h.lock.SetNote(note)
	}
}

// begin takes down, when a life of the node begins, what pods of an earlier one
// left in the kernel. After a reboot there is nothing; where a nested node
// restarts, its namespace may be the machine's.
func (h *host) begin(life state.NewLife) error {
	for _, a := range life.Stale {
		if err := h.removeElements(context.Background(), a.Hash(), a); err != nil {
			h.call.log.warn("drop elements of an earlier life: " + err.Error())
		}
	}
	for _, a := range life.Stale {
		if a.Bridge == "" || !publishesIPv4(a) {
			continue
		}
		if err := h.shutLoopback(context.Background(), a.Bridge, true); err != nil {
			h.call.log.warn("close the loopback of an earlier life: " + err.Error())
		}
	}
	return nil
}

// hash is the short name of the call's attachment.
func (c *call) hash() string { return ident.Hash(c.network, c.containerID, c.ifName) }

// hostName is the name of the attachment's port.
func (c *call) hostName() string { return bridge.HostName(c.network, c.containerID, c.ifName) }

// ipamRequest describes the call to the IPAM.
func (h *host) ipamRequest(strictly bool) *ipamconf.Request {
	c := h.call
	return &ipamconf.Request{
		Network:        c.network,
		ContainerID:    c.containerID,
		IfName:         c.ifName,
		NetNS:          c.netns,
		Args:           c.args,
		Path:           c.path,
		Stdin:          c.stdin,
		Environ:        os.Environ(),
		Stderr:         os.Stderr,
		DefaultDataDir: h.dir.Path() + "/ipam",
		Strict:         strictly,
		Warn:           c.log.warn,
	}
}

// owner is the call's attachment to its allocator.
func (c *call) owner() ipam.Owner { return ipam.Owner{ContainerID: c.containerID, IfName: c.ifName} }

// ipamNode is what an allocator is told of the node.
func (h *host) ipamNode() ipam.Node {
	network := h.call.network
	return ipam.Node{
		Epoch: ipam.Epoch{Token: h.epoch.Token(), Started: h.epoch.Started},
		Live:  h.live,
		Hash: func(o ipam.Owner) string {
			return ident.Hash(network, o.ContainerID, o.IfName)
		},
		InUse: func(hash string) bool {
			_, err := h.dir.Load(network, hash)
			return !errors.Is(err, fs.ErrNotExist)
		},
		Warn: h.call.log.warn,
	}
}

// live lists the addresses that pods of this network have in the kernel: by the
// aliases of their ports, and by their nf_tables elements where an alias was too
// short for them.
func (h *host) live(ctx context.Context) ([]ipam.Live, error) {
	links, err := h.br.Veths(ctx)
	if err != nil {
		return nil, err
	}
	var list []ipam.Live
	ports := map[string]bool{}
	for i := range links {
		a, ok := parseAlias(links[i].Alias)
		if !ok || a.network != networkToken(h.call.network) {
			continue
		}
		ports[a.hash] = true
		for _, ip := range a.addresses {
			list = append(list, ipam.Live{Hash: a.hash, Addr: ip})
		}
	}
	endpoints, err := h.fw.Endpoints(ctx, h.call.network)
	if err != nil {
		return nil, err
	}
	for _, e := range endpoints {
		// An element outlives its pod where a DEL never came; a port does not.
		if !ports[string(e.Owner)] {
			continue
		}
		for _, ip := range e.Addrs {
			list = append(list, ipam.Live{Hash: string(e.Owner), Addr: ip})
		}
	}
	return list, nil
}

// aliasPrefix begins every alias of ours; see package endpoint.
const aliasPrefix = endpoint.AliasPrefix

// bridgeAlias marks a bridge that we made. One that was there before is its
// owner's: it keeps its MTU and its router advertisements, and is never deleted.
const bridgeAlias = aliasPrefix + "bridge"

type alias struct {
	hash      string
	network   string // as networkToken gives it
	addresses []netip.Addr
}

// aliasOwner is the beginning of an attachment's alias, which no other has.
func aliasOwner(hash string) string { return endpoint.AliasOwner(hash) }

func formatAlias(hash, network string, addresses []netip.Addr) string {
	return endpoint.Alias(hash, network, addresses)
}

func parseAlias(s string) (alias, bool) {
	rest, ok := strings.CutPrefix(s, aliasPrefix)
	if !ok {
		return alias{}, false
	}
	var a alias
	var addresses string
	if a.hash, rest, ok = strings.Cut(rest, ":"); !ok || !isHash(a.hash) {
		return alias{}, false
	}
	// An IPv6 address has colons of its own, a network's name has none.
	if a.network, addresses, ok = strings.Cut(rest, ":"); !ok {
		return alias{}, false
	}
	for _, text := range strings.Split(addresses, ",") {
		if ip, err := netip.ParseAddr(text); err == nil {
			a.addresses = append(a.addresses, ip)
		}
	}
	return a, true
}

func isHash(s string) bool {
	return len(s) == ident.Digits && strings.Trim(s, "0123456789abcdef") == ""
}

func networkToken(network string) string { return endpoint.NetworkToken(network) }

// removeElements takes an attachment out of the firewall's sets: by its keys where
// its record tells them, else by its owner's name, which is a search.
func (h *host) removeElements(ctx context.Context, hash string, rec *state.Attachment) error {
	if rec == nil || rec.State != state.Ready || rec.Moving {
		return h.fw.RemoveOwners(ctx, nft.Owner(hash))
	}
	return h.fw.Remove(ctx, endpointOf(rec))
}

// addressesOf lists an attachment's addresses.
func addressesOf(a *state.Attachment) []netip.Addr { return endpoint.Addresses(a) }

// parsePrevResult reads the result of an earlier ADD, or of the plugins before
// this one; nil if there is none.
func parsePrevResult(conf *NetConf, cniVersion string) (*current.Result, error) {
	if isEmptyJSON(conf.PrevResult) {
		return nil, nil
	}
	// A result of its own, as the specification has it, names a version; the one
	// that a runtime puts in need not, and has the configuration's.
	var v struct {
		CNIVersion string `json:"cniVersion"`
	}
	if err := json.Unmarshal(conf.PrevResult, &v); err == nil && v.CNIVersion != "" {
		cniVersion = v.CNIVersion
	}
	raw := map[string]json.RawMessage{}
	if err := json.Unmarshal(conf.PrevResult, &raw); err != nil {
		return nil, newError(codeDecoding, "prevResult: %v", err)
	}
	raw["cniVersion"], _ = json.Marshal(cniVersion)
	data, err := json.Marshal(raw)
	if err != nil {
		return nil, newError(codeDecoding, "prevResult: %v", err)
	}
	if err := refuseNulls(data); err != nil {
		return nil, err
	}
	res, err := version.NewResult(cniVersion, data)
	if err == nil {
		var r *current.Result
		if r, err = current.NewResultFromResult(res); err == nil {
			return r, checkResult(r)
		}
	}
	return nil, newError(codeDecoding, "prevResult: %v", err)
}

// refuseNulls finds the nulls in a result's lists. To convert it to another
// version would panic.
func refuseNulls(result []byte) error {
	var lists struct {
		Interfaces []json.RawMessage `json:"interfaces"`
		IPs        []json.RawMessage `json:"ips"`
		Routes     []json.RawMessage `json:"routes"`
	}
	// What else is wrong, decoding the result says better.
	_ = json.Unmarshal(result, &lists)
	for _, l := range []struct {
		name  string
		items []json.RawMessage
	}{{"interfaces", lists.Interfaces}, {"ips", lists.IPs}, {"routes", lists.Routes}} {
		for i, item := range l.items {
			if string(item) == "null" {
				return newError(codeDecoding, "prevResult: %s[%d] is null", l.name, i)
			}
		}
	}
	return nil
}

// checkResult refuses what would be indexed later on.
func checkResult(r *current.Result) error {
	for i, ip := range r.IPs {
		if ip.Interface != nil && (*ip.Interface < 0 || *ip.Interface >= len(r.Interfaces)) {
			return newError(codeDecoding, "prevResult: ips[%d] names interface %d of %d", i, *ip.Interface, len(r.Interfaces))
		}
	}
	return nil
}

// joinSteps runs each step whatever became of those before it, and joins their
// errors.
func joinSteps(steps ...func() error) error {
	var errs []error
	for _, step := range steps {
		errs = append(errs, step())
	}
	return errors.Join(errs...)
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

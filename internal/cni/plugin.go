package cni

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// Plugin is one call of the plugin, with the world that it is called in. Every field has to be set, but those of tests.
type Plugin struct {
	Getenv func(string) string
	Stdin  io.Reader
	Stdout io.Writer

	// DialBridge and DialNFT are for tests: a fault in front of the kernel.
	DialBridge func() (*bridge.Conn, error)
	DialNFT    func(*nft.Config) (*nft.Conn, error)
	// After is called with the name of each step of ADD when it is done; an error
	// of it fails the ADD there. It is for tests of what is undone.
	After func(step string) error
	// Name is the one that the program was called by. By the names of some of the reference's
	// plugins it does what these do; by any other, the empty one too, it is itself.
	Name string
	// Kept is where the program would be that had the name before: it gets the calls for pods
	// that other programs made.
	Kept string
	// Exit ends the process, where a call hangs past its deadline in something that cannot
	// be called off; it must not return.
	Exit func(status int)
}

// SupportedVersions are the versions of the CNI specification that are spoken.
func SupportedVersions() []string {
	return []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}
}

const (
	versionWithCheck  = "0.4.0"
	versionWithStatus = "1.1.0" // and GC

	maxNetworkName = 250 // it names files

	// MaxStdin bounds what is read of a configuration, in bytes. One has some KiB, and a prevResult or a list of
	// attachments may add to that.
	MaxStdin = 4 << 20
)

// call is what a verb works with.
type call struct {
	*Plugin
	kind
	named       bool // as one of the reference's, which passes over unknown fields
	verb        string
	containerID string
	netns       string
	ifName      string
	args        string
	path        string
	stdin       []byte
	conf        *Common // the kind's
	undecoded   []error // what is wrong with stdin
	log         *stepLog
	watchdog    *watchdog
}

func (p *Plugin) newCall() *call {
	c := &call{Plugin: p, log: noLog()}
	c.kind, c.named = p.kindOf()
	c.conf = c.common()
	return c
}

// Run carries out the verb that the environment names, with the configuration
// from stdin, by the CNI specification 1.1. It returns the process's exit status;
// an error has then been printed, as the specification wants it, to stdout.
func (p *Plugin) Run() int {
	c := p.newCall()
	c.watch()
	defer c.watchdog.timer.Stop()
	var said []byte
	err := c.readEnvironment()
	if err == nil {
		said, err = c.dispatch()
	}
	c.watchdog.speak()
	if err == nil && len(said) > 0 {
		if _, err = c.Stdout.Write(said); err != nil {
			err = newError(codeIO, "print the result: %v", err)
		}
	}
	if err == nil {
		return 0
	}
	e := coded(err)
	c.printError(c.conf.CNIVersion, e)
	c.log.done(e)
	c.countFailure(c.conf.stateDir(), e.Code)
	return 1
}

// countFailure counts the call for tombolod's metrics, if it is one that works on a pod. It may
// fail: the caller has the error that matters.
func (c *call) countFailure(stateDir string, code uint) {
	if !slices.Contains([]string{"ADD", "DEL", "CHECK", "GC"}, c.verb) {
		return
	}
	if dir, err := state.Open(stateDir); err == nil {
		_ = dir.CountFailure(c.verb, code)
	}
}

// printError prints an error as the specification wants it, in the configuration's version.
func (c *call) printError(cniVersion string, e *types.Error) {
	if !slices.Contains(SupportedVersions(), cniVersion) {
		cniVersion = SupportedVersions()[len(SupportedVersions())-1]
	}
	out := json.NewEncoder(c.Stdout)
	out.SetEscapeHTML(false) // a message may have a command with &&
	_ = out.Encode(struct {
		CNIVersion string `json:"cniVersion"`
		Code       uint   `json:"code"`
		Msg        string `json:"msg"`
	}{cniVersion, e.Code, e.Msg})
}

// dispatch reads the configuration, and carries out a verb with its deadline and its log. It gives what to print.
func (c *call) dispatch() ([]byte, error) {
	if c.verb == "VERSION" {
		return c.versionVerb(), nil
	}
	if err := c.readStdin(); err != nil {
		return nil, err
	}
	c.watchdog.until(c.conf)
	var err error
	if c.log, err = c.openLog(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.conf.deadline())
	defer cancel()
	said, err := c.carryOut(ctx)
	switch {
	case err == nil:
		c.log.done(nil)
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil:
		return nil, newError(codeTryAgainLater, "%s of network %q was not done within its deadline of %s: %v", c.verb, c.conf.Name, c.conf.deadline(), printable.Line(err.Error()))
	}
	return said, err
}

// needs lists the variables without which each verb means nothing. CNI_PATH is
// needed only to delegate, and looked for there.
func needs() map[string][]string {
	inPod := []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"}
	return map[string][]string{
		"ADD": inPod, "CHECK": inPod, "DEL": {"CNI_CONTAINERID", "CNI_IFNAME"}, "GC": nil, "STATUS": nil, "VERSION": nil,
	}
}

func (c *call) readEnvironment() error {
	c.verb = c.Getenv("CNI_COMMAND")
	required, known := needs()[c.verb]
	if !known {
		return newError(codeEnvironment, "CNI_COMMAND=%q is not a verb: ADD, DEL, CHECK, GC, STATUS and VERSION are", c.verb)
	}
	var missing []string
	for _, name := range required {
		if c.Getenv(name) == "" {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return newError(codeEnvironment, "%s needs the environment variables %s", c.verb, strings.Join(missing, ", "))
	}
	c.containerID, c.netns, c.ifName = c.Getenv("CNI_CONTAINERID"), c.Getenv("CNI_NETNS"), c.Getenv("CNI_IFNAME")
	c.args, c.path = c.Getenv("CNI_ARGS"), c.Getenv("CNI_PATH")
	if err := c.refuseDepth(); err != nil {
		return err
	}
	if len(required) == 0 {
		return nil
	}
	if !ident.IsIdentifier(c.containerID) {
		return newError(codeEnvironment, "CNI_CONTAINERID=%q: it takes letters, digits, '_', '.' and '-', and begins with a letter or a digit", c.containerID)
	}
	if !ident.IsLinkName(c.ifName) {
		return newError(codeEnvironment, "CNI_IFNAME=%q cannot name a link: it takes 1 to 15 bytes without '/', ':', '%%' and space", c.ifName)
	}
	return nil
}

// maxDepth is how many delegated plugins may lead to a call. No IPAM plugin has a reason to call this one, but one
// may do so, once, for another network.
const maxDepth = 1

// refuseDepth ends a chain of calls that a delegated plugin leads back here: a
// script around this very program, or another version of it.
func (c *call) refuseDepth() error {
	depth, err := delegate.Depth(c.Getenv(delegate.DepthVariable))
	if err != nil {
		return newError(codeEnvironment, "%v", err)
	}
	if depth > maxDepth && c.verb != "VERSION" {
		return newError(codeInvalidConfig, "%s=%d: this %s was started by an IPAM plugin that was itself started by Tombolo, and so on: ipam.type has to name a plugin that does not lead back here", delegate.DepthVariable, depth, c.verb)
	}
	return nil
}

// readStdin reads the configuration, and refuses what the plugin refuses for every verb. Where the attachment may
// be another program's, the rest is not read before it is known to be ours.
func (c *call) readStdin() error {
	data, err := io.ReadAll(io.LimitReader(c.Stdin, MaxStdin+1))
	if err != nil {
		return newError(codeIO, "read the network's configuration from stdin: %v", err)
	}
	if len(data) > MaxStdin {
		return newError(codeDecoding, "the network's configuration on stdin is longer than %d bytes", MaxStdin)
	}
	if err := c.parse(data); err != nil {
		return err
	}
	if err := c.accept(); err != nil {
		return err
	}
	if !c.others {
		if err := c.refuse(); err != nil {
			return err
		}
	}
	return c.conf.acceptName()
}

// versionVerb echoes the caller's version where it tells one; stdin may be empty. The reference says its own.
func (c *call) versionVerb() []byte {
	supported := c.supported()
	var conf struct {
		CNIVersion string `json:"cniVersion"`
	}
	data, err := io.ReadAll(io.LimitReader(c.Stdin, MaxStdin))
	if err != nil || json.Unmarshal(data, &conf) != nil || conf.CNIVersion == "" || c.named {
		conf.CNIVersion = supported[len(supported)-1]
	}
	said, _ := json.Marshal(struct {
		CNIVersion        string   `json:"cniVersion"`
		SupportedVersions []string `json:"supportedVersions"`
	}{conf.CNIVersion, supported}) // it has strings alone
	return append(said, '\n')
}

// sameNetNS says whether the runtime wants it so that a pod is in the plugin's own namespace.
func (c *call) sameNetNS() bool {
	override := c.Getenv("CNI_NETNS_OVERRIDE")
	return override == "1" || strings.EqualFold(override, "true")
}

// step says that a part of a verb is done.
func (c *call) step(name string) error {
	c.log.step(name)
	if c.After != nil {
		return c.After(name)
	}
	return nil
}

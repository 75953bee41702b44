package cni

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// Plugin is one call of the plugin, with the world that it is called in. Every
// field but After has to be set.
type Plugin struct {
	Getenv func(string) string
	Stdin  io.Reader
	Stdout io.Writer

	// DialBridge and DialNFT open the kernel, or a test's fault in front of it.
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
	// be called off; it must not return. Nil leaves it hanging.
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

	maxStdin = 4 << 20 // a netconf is some KiB; a prevResult or a list of attachments may add to it
)

// call is what a verb works with.
type call struct {
	*Plugin
	verb        string
	containerID string
	netns       string
	ifName      string
	args        string
	path        string
	stdin       []byte
	cniVersion  string // of the configuration
	network     string
	stateDir    string
	log         *stepLog
	watchdog    *watchdog
}

// Run carries out the verb that the environment names, with the configuration
// from stdin, by the CNI specification 1.1. It returns the process's exit status;
// an error has then been printed, as the specification wants it, to stdout.
func (p *Plugin) Run() int {
	c := &call{Plugin: p}
	err := c.readEnvironment()
	if err == nil {
		if c.Exit != nil {
			c.watch()
			defer c.watchdog.timer.Stop()
		}
		err = c.run()
	}
	if err == nil {
		return 0
	}
	e := coded(err)
	c.log.done(e)
	c.watchdog.speak()
	c.printError(c.cniVersion, e)
	c.countFailure(c.stateDir, e.Code)
	return 1
}

// countFailure counts the call for tombolod's metrics, if it is one that works on a pod. It may
// fail: the caller has the error that matters.
func (c *call) countFailure(stateDir string, code uint) {
	switch c.verb {
	case "ADD", "DEL", "CHECK", "GC":
	default:
		return
	}
	if !filepath.IsAbs(stateDir) {
		stateDir = network.DefaultStateDir // as for a call that succeeds
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

func (c *call) run() error {
	if c.verb == "VERSION" {
		return c.versionVerb()
	}
	if err := c.readStdin(); err != nil {
		return err
	}
	if first := map[string]string{"GC": versionWithStatus, "STATUS": versionWithStatus, "CHECK": versionWithCheck}[c.verb]; first != "" {
		if err := c.since(first); err != nil {
			return err
		}
	}
	if n := c.named(); n != nil {
		return c.byName(n)
	}
	switch c.verb {
	case "ADD":
		return c.addVerb()
	case "DEL":
		if c.Name == nameBridge {
			return c.lenientVerb(c.delBridge)
		}
		return c.lenientVerb(c.del)
	case "GC":
		return c.lenientVerb(c.gc)
	case "CHECK":
		if c.Name == nameBridge {
			return c.strictVerb(c.checkBridge)
		}
		return c.strictVerb(c.check)
	default: // STATUS: readEnvironment knows the verbs
		return c.strictVerb(c.status)
	}
}

// needs lists the variables without which a verb means nothing. CNI_PATH is
// needed only to delegate, and looked for there.
func needs(verb string) ([]string, bool) {
	switch verb {
	case "ADD", "CHECK":
		return []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"}, true
	case "DEL":
		return []string{"CNI_CONTAINERID", "CNI_IFNAME"}, true
	case "GC", "STATUS", "VERSION":
		return nil, true
	}
	return nil, false
}

func (c *call) readEnvironment() error {
	c.verb = c.Getenv("CNI_COMMAND")
	required, known := needs(c.verb)
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

// maxDepth is how many delegated plugins may lead to a call. No IPAM plugin has a
// reason to call this one; should one do so for another network, that is its own
// affair, once.
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

// readStdin reads the configuration, and of it what every verb needs: the version
// and the name. The rest is left to the verb, which may be lenient.
func (c *call) readStdin() error {
	data, err := io.ReadAll(io.LimitReader(c.Stdin, maxStdin+1))
	if err != nil {
		return newError(codeIO, "read the network's configuration from stdin: %v", err)
	}
	if len(data) > maxStdin {
		return newError(codeDecoding, "the network's configuration on stdin is longer than %d bytes", maxStdin)
	}
	c.stdin = data
	return nil
}

// accept checks the configuration's version and name.
func (c *call) accept(conf *NetConf) error {
	c.cniVersion, c.network, c.stateDir = conf.CNIVersion, conf.Name, conf.StateDir
	if c.cniVersion == "" {
		c.cniVersion = "0.1.0" // the specification's meaning of a missing one, up to 0.2.0
	}
	if !slices.Contains(c.supported(), c.cniVersion) {
		return newError(codeIncompatibleVersion, "cniVersion %q is not supported: this plugin speaks %s", c.cniVersion, strings.Join(c.supported(), ", "))
	}
	if c.network == "" {
		return newError(codeInvalidConfig, "the network has no name: set the field \"name\"")
	}
	if len(c.network) > maxNetworkName {
		return newError(codeInvalidConfig, "name: a network's name has at most %d bytes, not %d", maxNetworkName, len(c.network))
	}
	if !ident.IsIdentifier(c.network) {
		return newError(codeInvalidConfig, "name %q: a network's name takes letters, digits, '_', '.' and '-', and begins with a letter or a digit", c.network)
	}
	return nil
}

// since refuses a verb that the configuration's version does not have. It reads
// the version by itself: a verb that is strict must not complain of an unknown
// field first.
func (c *call) since(first string) error {
	conf, err := c.parseLenient()
	if err == nil {
		err = c.accept(conf)
	}
	if err != nil {
		return err
	}
	if ok, err := version.GreaterThanOrEqualTo(c.cniVersion, first); err != nil || !ok {
		return newError(codeIncompatibleVersion, "%s is a verb of CNI %s and later, and this network's cniVersion is %s", c.verb, first, c.cniVersion)
	}
	return nil
}

func (c *call) strictVerb(verb func(context.Context, *NetConf) error) error {
	conf, err := c.parseStrict()
	if err != nil {
		if named, lenient := c.parseLenient(); lenient == nil {
			c.cniVersion, c.stateDir = named.CNIVersion, named.StateDir // for the error
		}
		return err
	}
	if err := c.accept(conf); err != nil {
		return err
	}
	return c.timed(conf, verb)
}

func (c *call) lenientVerb(verb func(context.Context, *NetConf) error) error {
	conf, err := c.parseLenient()
	if err == nil {
		err = c.accept(conf)
	}
	if err != nil {
		return err
	}
	return c.timed(conf, verb)
}

// timed gives a verb its deadline and its log.
func (c *call) timed(conf *NetConf, verb func(context.Context, *NetConf) error) error {
	c.watchdog.until(conf.deadline(), c.cniVersion, c.stateDir)
	var err error
	if c.log, err = openLog(conf, c); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), conf.deadline())
	defer cancel()
	if err := verb(ctx, conf); err != nil {
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil {
			return newError(codeTryAgainLater, "%s of network %q was not done within its deadline of %s: %v", c.verb, c.network, conf.deadline(), oneLine(err))
		}
		return err
	}
	c.log.done(nil)
	return nil
}

func (c *call) addVerb() error {
	var result []byte
	err := c.strictVerb(func(ctx context.Context, conf *NetConf) error {
		var err error
		result, err = c.add(ctx, conf)
		return err
	})
	if err != nil {
		return err
	}
	return c.print(result)
}

func (c *call) print(result []byte) error {
	c.watchdog.speak()
	if _, err := c.Stdout.Write(result); err != nil {
		return newError(codeIO, "print the result: %v", err)
	}
	return nil
}

// versionVerb echoes the caller's version where it tells one; stdin may be empty. The reference
// says its own.
func (c *call) versionVerb() error {
	supported := c.supported()
	var conf struct {
		CNIVersion string `json:"cniVersion"`
	}
	if data, err := io.ReadAll(io.LimitReader(c.Stdin, maxStdin)); c.named() != nil || err != nil || json.Unmarshal(data, &conf) != nil || conf.CNIVersion == "" || c.Name == nameBridge {
		conf.CNIVersion = supported[len(supported)-1]
	}
	return json.NewEncoder(c.Stdout).Encode(struct {
		CNIVersion        string   `json:"cniVersion"`
		SupportedVersions []string `json:"supportedVersions"`
	}{conf.CNIVersion, supported})
}

// sameNetNS says whether the runtime wants it so that a pod is in the plugin's own
// namespace.
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

package cni

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// Plugin is one call of the plugin, with its environment. Dial and After are for tests, and may be nil.
type Plugin struct {
	Getenv func(string) string
	Stdin  io.Reader
	Stdout io.Writer

	// Dial is for tests: it puts faults between the plugin and the kernel.
	Dial nl.Dialer
	// After is called after each step of ADD with the step's name. If it returns an error, the ADD fails there. It is
	// for tests of the undo.
	After func(step string) error
	// Name is the name under which the program was called. If it is the name of a reference plugin (see Names), the
	// program acts as that plugin. Otherwise it acts as Tombolo's own plugin.
	Name string
	// Kept is the path of the kept program, which had the name before Tombolo (see the function Kept). It handles the
	// calls for pods that other programs made.
	Kept string
	// Moves is set if the caller will move the pod's interface to another namespace after ADD: see network.Pod.Path.
	Moves bool
	// Exit ends the process. The plugin calls it if the call continues past its deadline in a wait that cannot be
	// cancelled. Exit must not return.
	Exit func(status int)
}

// SupportedVersions returns the supported versions of the CNI specification.
func SupportedVersions() []string {
	return []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}
}

const (
	versionWithCheck  = "0.4.0"
	versionWithStatus = "1.1.0" // STATUS and GC exist since this version

	maxNetworkName = 250 // it is part of file names

	// MaxStdin is the maximum length of a configuration, in bytes. A configuration has some KiB. A prevResult or a
	// list of attachments may add to that.
	MaxStdin = 4 << 20
)

// call is the state of one call.
type call struct {
	*Plugin
	kind
	named       bool // the program was called by a reference plugin's name, so it ignores unknown fields
	verb        string
	containerID string
	netns       string
	ifName      string
	args        string
	path        string
	stdin       []byte
	conf        *Common // the decoded configuration
	undecoded   []error // errors in stdin
	log         *stepLog
	watchdog    *watchdog
}

func (p *Plugin) newCall() *call {
	c := &call{Plugin: p, log: noLog()}
	if c.kind, c.named = kinds()[p.Name]; !c.named {
		c.kind = kind{&NetConf{}, SupportedVersions()[0], false} // Tombolo's own plugin
	}

	c.conf = c.common()
	return c
}

// Run runs the verb that the environment names with the configuration from stdin, as the CNI specification 1.1
// defines it. It returns the exit status of the process. It prints errors to stdout in the specification's form.
func (p *Plugin) Run() int {
	c := p.newCall()
	c.startWatchdog()
	defer c.watchdog.timer.Stop()
	var output []byte
	err := c.readEnvironment()
	if err == nil {
		output, err = c.dispatch()
	}

	c.watchdog.claim()
	if err == nil && len(output) > 0 {
		if _, err = c.Stdout.Write(output); err != nil {
			err = newError(codeIO, "print the result: %v", err)
		}
	}

	if err == nil {
		return 0
	}

	e := newCNIError(err)
	c.printError(c.conf.CNIVersion, e)
	c.log.close(e)
	c.countFailure(c.conf.stateDir(), e.Code)
	return 1
}

// countFailure counts the failed call for tombolod's metrics, unless the verb is STATUS or VERSION. It ignores its own
// errors, since the runtime needs the error of the call.
func (c *call) countFailure(stateDir string, code uint) {
	if !slices.Contains([]string{"ADD", "DEL", "CHECK", "GC"}, c.verb) {
		return
	}
	if dir, err := state.Open(stateDir); err == nil {
		_ = dir.CountFailure(c.verb, code)
	}
}

// printError prints an error in the specification's form, with the version of the configuration.
func (c *call) printError(cniVersion string, e *types.Error) {
	if !slices.Contains(SupportedVersions(), cniVersion) {
		cniVersion = SupportedVersions()[len(SupportedVersions())-1]
	}
	out := json.NewEncoder(c.Stdout)
	out.SetEscapeHTML(false) // a message may contain a command with &&
	_ = out.Encode(struct {
		CNIVersion string `json:"cniVersion"`
		Code       uint   `json:"code"`
		Msg        string `json:"msg"`
	}{cniVersion, e.Code, e.Msg})
}

// dispatch reads the configuration, opens the log, and runs the verb within its deadline. It returns the output to
// print.
func (c *call) dispatch() ([]byte, error) {
	if c.verb == "VERSION" {
		return c.versionVerb(), nil
	}

	if err := c.readStdin(); err != nil {
		return nil, err
	}

	c.watchdog.restart(c.conf)
	var err error
	if c.log, err = c.openLog(); err != nil {
		return nil, err
	}

	ctx, cancel := context.WithTimeout(context.Background(), c.conf.deadline())
	defer cancel()
	output, err := c.runVerb(ctx)
	switch {
	case err == nil:
		c.log.close(nil)
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil:
		return nil, newError(codeTryAgainLater, "%s of network %q was not done within its deadline of %s: %v", c.verb,
			c.conf.Name, c.conf.deadline(), printable.Line(err.Error()))
	}

	return output, err
}

// needs returns the environment variables that each verb requires. CNI_PATH is required only to run other plugins,
// and checked there.
func needs() map[string][]string {
	inPod := []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"}
	return map[string][]string{
		"ADD": inPod, "CHECK": inPod, "DEL": {"CNI_CONTAINERID",
			"CNI_IFNAME"}, "GC": nil, "STATUS": nil, "VERSION": nil,
	}
}

// readEnvironment reads and checks the parameters in the environment.
func (c *call) readEnvironment() error {
	c.verb = c.Getenv("CNI_COMMAND")
	required, known := needs()[c.verb]
	if !known {
		return newError(codeEnvironment, "CNI_COMMAND=%q is not a verb: ADD, DEL, CHECK, GC, STATUS and VERSION are",
			c.verb)
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
		return newError(codeEnvironment,
			"CNI_CONTAINERID=%q: it takes letters, digits, '_', '.' and '-', and begins with a letter or a digit",
			c.containerID)
	}

	if !ident.IsLinkName(c.ifName) {
		return newError(codeEnvironment,
			"CNI_IFNAME=%q cannot name a link: it takes 1 to 15 bytes without '/', ':', '%%' and space", c.ifName)
	}

	return nil
}

// maxDepth is the maximum number of delegated plugins in the chain that started this call. It stops endless recursion.
// It is 1, so that an IPAM plugin may call Tombolo for another network.
const maxDepth = 1

// refuseDepth returns an error if more than maxDepth delegated plugins led to this call. A delegated plugin, such as a
// script around this program, may call this program again and again.
func (c *call) refuseDepth() error {
	depth := len(c.Getenv(delegate.DepthVariable))
	if depth > maxDepth && c.verb != "VERSION" {
		return newError(codeInvalidConfig,
			"this %s was started by an IPAM plugin that was itself started by Tombolo, and so on (%s): ipam.type has "+
				"to name a plugin that does not lead back here", c.verb, delegate.DepthVariable)
	}
	return nil
}

// readStdin reads the configuration, and returns the errors that stop every verb. A chained plugin may be called for
// another program's attachment. So its other errors wait until the attachment is known to be Tombolo's.
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

// versionVerb returns the output of the verb VERSION. Its field cniVersion repeats the version from stdin. If stdin
// has none, or under the name of a reference plugin, it is the latest supported version.
func (c *call) versionVerb() []byte {
	supported := c.supported()
	var conf struct {
		CNIVersion string `json:"cniVersion"`
	}
	data, err := io.ReadAll(io.LimitReader(c.Stdin, MaxStdin))
	if err != nil || json.Unmarshal(data, &conf) != nil || conf.CNIVersion == "" || c.named {
		conf.CNIVersion = supported[len(supported)-1]
	}

	output, _ := json.Marshal(struct {
		CNIVersion        string   `json:"cniVersion"`
		SupportedVersions []string `json:"supportedVersions"`
	}{conf.CNIVersion, supported}) // cannot fail, since it has only strings
	return append(output, '\n')
}

// sameNetNS reports whether the runtime permits a pod in the plugin's own namespace.
func (c *call) sameNetNS() bool {
	override := c.Getenv("CNI_NETNS_OVERRIDE")
	return override == "1" || strings.EqualFold(override, "true")
}

// step notes the end of a step of the verb in the log. For tests, it also calls After.
func (c *call) step(name string) error {
	c.log.step(name)
	if c.After != nil {
		return c.After(name)
	}
	return nil
}

package cni

import (
	"cmp"
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

// Plugin holds the inputs and outputs of one call of the CNI plugin. Dial and After are for tests, and may be nil.
type Plugin struct {
	Getenv func(string) string
	Stdin  io.Reader
	Stdout io.Writer

	// Dial opens netlink sockets. Tests set it to return errors in place of the kernel.
	Dial nl.Dialer
	// After is called after each step of a verb with the step's name. If it returns an error during ADD, the ADD undoes
	// its steps and fails.
	After func(step string) error
	// Name is the file name under which the program was called. If Names lists it, the program acts as that reference
	// plugin. Otherwise it acts as Tombolo's own plugin.
	Name string
	// Kept is the path of the program that had the reference plugin's name before Tombolo (see the function Kept). That
	// program handles the calls for pods that other programs made.
	Kept string
	// Moves is set if the caller will move the pod's interface to another namespace after ADD: see network.Pod.Path.
	Moves bool
	// Exit ends the process with the given status. In a program that embeds the plugin, it may end only the calling
	// goroutine. It must not return. The watchdog calls it if the call hangs after its deadline.
	Exit func(status int)
}

// SupportedVersions returns the versions of the CNI specification that Tombolo supports, oldest first.
func SupportedVersions() []string {
	return []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}
}

const (
	versionWithCheck  = "0.4.0"
	versionWithStatus = "1.1.0" // STATUS and GC exist since this version

	maxNetworkName = 250 // in bytes: file names contain the network's name

	// MaxStdin is the maximum length of the plugin's input, in bytes. A configuration has a few KiB; a prevResult or a
	// list of attachments may add to that.
	MaxStdin = 4 << 20
)

// call holds the parameters of one call of the plugin, and its configuration.
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
	conf        *Common // the fields of the decoded configuration that all plugins have
	undecoded   []error // errors in stdin, or in CNI_ARGS for the plugin tuning: see the method refuse
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

// Run runs the verb in CNI_COMMAND with the configuration from Stdin. It prints the result or error to Stdout, in the
// form of the configuration's version of the CNI specification. It logs an error, and counts it (see countFailure). It
// returns the exit status of the process: 0, or 1 after an error.
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

// countFailure counts the failed call for tombolod's metrics if the verb is ADD, DEL, CHECK or GC. It ignores its own
// errors, since the runtime needs the error of the call.
func (c *call) countFailure(stateDir string, code uint) {
	if !slices.Contains([]string{"ADD", "DEL", "CHECK", "GC"}, c.verb) {
		return
	}
	if dir, err := state.Open(stateDir); err == nil {
		_ = dir.CountFailure(c.verb, code)
	}
}

// printError prints an error in the specification's form. Its field cniVersion is the given version, or the latest
// supported one if the given version is not supported.
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

// dispatch runs the verb, and returns the output for stdout. For all verbs except VERSION, it first decodes the
// configuration, opens the log, and sets the deadline.
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

// needs returns the environment variables that each verb requires. CNI_PATH is not among them, since only a search for
// a delegated plugin needs it.
func needs() map[string][]string {
	inPod := []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"}
	return map[string][]string{
		"ADD": inPod, "CHECK": inPod, "DEL": {"CNI_CONTAINERID",
			"CNI_IFNAME"}, "GC": nil, "STATUS": nil, "VERSION": nil,
	}
}

// readEnvironment stores the parameters from the environment in c. It returns an error if the verb is unknown, or if a
// required variable is missing. A required CNI_CONTAINERID or CNI_IFNAME must also be valid. If more than maxDepth
// plugins that Tombolo started led to this call, that is an error for all verbs except VERSION.
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
	if depth := len(c.Getenv(delegate.DepthVariable)); depth > maxDepth && c.verb != "VERSION" {
		return newError(codeInvalidConfig,
			"this %s was started by an IPAM plugin that was itself started by Tombolo, and so on (%s): ipam.type has "+
				"to name a plugin that does not lead back here", c.verb, delegate.DepthVariable)
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

// maxDepth is the maximum number of plugins, each started by Tombolo, that may have led to this call. It stops endless
// recursion: such a plugin, for example an IPAM plugin, may be a script around Tombolo, which would start the script
// again and again. It is 1, so that an IPAM plugin may call Tombolo for another network.
const maxDepth = 1

// readStdin reads and decodes the configuration, and returns an error if the verb cannot use it. It leaves the check of
// a chained plugin's fields to runVerb, since another program may have made the attachment.
func (c *call) readStdin() error {
	data, err := io.ReadAll(io.LimitReader(c.Stdin, MaxStdin+1))
	if err != nil {
		return newError(codeIO, "read the network's configuration from stdin: %v", err)
	}

	if len(data) > MaxStdin {
		return newError(codeDecoding, "the network's configuration on stdin is longer than %d bytes", MaxStdin)
	}

	if err := cmp.Or(c.parse(data), c.accept()); err != nil || c.others {
		return cmp.Or(err, c.conf.acceptName())
	}

	return cmp.Or(c.refuse(), c.conf.acceptName())
}

// versionVerb returns the output of the verb VERSION. Its field cniVersion repeats the version from stdin. If stdin has
// none, or if the program acts as a reference plugin, it is the latest supported version.
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
	}{conf.CNIVersion, supported}) // Marshal cannot fail, since all values are strings
	return append(output, '\n')
}

// sameNetNS reports whether the runtime allows the plugin's own network namespace as CNI_NETNS, by the variable
// CNI_NETNS_OVERRIDE.
func (c *call) sameNetNS() bool {
	override := c.Getenv("CNI_NETNS_OVERRIDE")
	return override == "1" || strings.EqualFold(override, "true")
}

// step logs the duration of the step that has just ended. In tests it also calls After, and returns its error.
func (c *call) step(name string) error {
	c.log.step(name)
	if c.After != nil {
		return c.After(name)
	}
	return nil
}

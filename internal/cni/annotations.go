package cni

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/strict"
)

// annotationPrefix is the beginning of the keys of the annotations that Tombolo reads. The rest of a key is <setting>,
// or <network>.<setting> for only one of the pod's networks.
const annotationPrefix = "tombolo-cni.github.io/"

// annotationsCapability is the capability for the annotations of a Kubernetes pod, which containerd and CRI-O pass.
const annotationsCapability = "io.kubernetes.cri.pod-annotations"

// annotations holds the settings that a pod requests by annotations.
type annotations struct {
	IPs       entries    `json:"ips"`
	MAC       string     `json:"mac"`
	Bandwidth *Bandwidth `json:"bandwidth"`
	HostName  *string    `json:"hostName"`
	ClientID  string     `json:"clientID"`
	podPolicy

	keys map[string]string // the key of the annotation in use for each setting
}

// annotationTypes returns the names of the settings that a pod can request by annotations. The map's value is the
// ipam.type that a setting needs, or "" if it needs none.
func annotationTypes() map[string]string {
	return map[string]string{
		"ips": typeHostLocal, "hostName": typeDHCP, "clientID": typeDHCP,
		"mac": "", "bandwidth": "", "egressPolicy": "", "publishFrom": "",
	}
}

// annotationProblems adds a problem for each wrong entry in the field annotations, which lists the settings that pods
// may request. It also adds one if the field is set without the capability.
func (c *NetConf) annotationProblems(p *problems) {
	types := annotationTypes()
	for i, setting := range c.Annotations {
		needs, known := types[setting]
		p.add(!known, "annotations[%d] %q is not known: use %q", i, setting, slices.Sorted(maps.Keys(types)))
		p.add(needs != "" && needs != c.IPAM.Type, "annotations[%d] %q needs ipam.type %q", i, setting, needs)
		p.add(setting == "bandwidth" && c.Bandwidth != Bandwidth{},
			"annotations[%d] %q has no effect, since the configuration has rates or bursts for all pods", i, setting)
	}
	p.add(len(c.Annotations) > 0 && !c.Capabilities[annotationsCapability],
		`annotations: a runtime passes none without "capabilities": {%q: true}`, annotationsCapability)
}

// annotate copies the settings in the pod's annotations into the configuration. A MAC, policy or bandwidth that the
// runtime requests takes precedence. An annotation that names this network takes precedence over one that names none.
// annotate returns errors about Tombolo's annotations that are unknown, not permitted or invalid. It ignores
// annotations for another network or without Tombolo's prefix.
func (c *NetConf) annotate() (found strict.Problems) {
	rc, a, types := &c.RuntimeConfig, &c.annotated, annotationTypes()
	a.keys = map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(rc.Annotations)) {
		if n := len(annotationPrefix); len(key) < n || !strings.EqualFold(key[:n], annotationPrefix) {
			continue
		}

		network, setting := "", key[len(annotationPrefix):]
		if i := strings.LastIndexByte(setting, '.'); i >= 0 {
			network, setting = setting[:i], setting[i+1:]
		}

		_, known := types[setting]
		switch {
		case network != "" && network != c.Name:
		case !known || !strings.HasPrefix(key, annotationPrefix):
			found = append(found, fmt.Errorf("annotation %.100q is not known: after %q use one of %q", key,
				annotationPrefix, slices.Sorted(maps.Keys(types))))
		case !slices.Contains(c.Annotations, setting):
			found = append(found, fmt.Errorf("annotation %s is not permitted: to permit it in network %q, add %q to "+
				`"annotations" in its configuration`, key, c.Name, setting))
		case setting == "bandwidth" && rc.Bandwidth != nil, setting == "egressPolicy" && rc.EgressPolicy != "",
			setting == "publishFrom" && rc.PublishFrom != "":
			// Ignore the annotation: the runtime's request takes precedence.
		case network != "" || a.keys[setting] == "":
			a.keys[setting] = key
		}
	}

	for _, setting := range slices.Sorted(maps.Keys(a.keys)) {
		if err := a.read(setting, rc.Annotations[a.keys[setting]]); err != nil {
			found = append(found, fmt.Errorf("annotation %s: %w", a.keys[setting], err))
		}
	}

	rc.podPolicy = rc.withDefaults(a.podPolicy)
	if a.Bandwidth != nil {
		rc.Bandwidth = a.Bandwidth
	}
	rc.AnnotatedIPs = a.IPs.list()
	return found
}

// read decodes value, the annotation for a setting, into a. A value that begins with '{' or '[' is JSON, and any other
// value is text.
func (a *annotations) read(setting, value string) error {
	raw := json.RawMessage(value)
	if !strings.HasPrefix(value, "{") && !strings.HasPrefix(value, "[") {
		raw, _ = json.Marshal(value)
	}

	// Marshal fails if raw has text after its JSON value. Such text could add other settings.
	object, err := json.Marshal(map[string]json.RawMessage{setting: raw})
	if err != nil {
		return fmt.Errorf("%.64q is not valid JSON", value)
	}

	if problems := strict.Unmarshal(object, a, nil); len(problems) > 0 {
		return problems.First()
	}

	isName := ident.IsIdentifier(value) && len(value) <= 253
	switch {
	case strings.TrimSpace(value) == "" && setting != "hostName":
		return fmt.Errorf("%q is empty", value)
	case setting == "hostName" && value != "" && !isName, setting == "clientID" && !isName:
		return fmt.Errorf("%.64q is not a name of letters, digits, '-', '_' and '.'", value)
	}

	return nil
}

// source returns the origin of a setting for an error, such as "annotation tombolo-cni.github.io/mac". The origin is
// the text in otherwise if no annotation has set the setting.
func (c *Common) source(setting, otherwise string) string {
	if key := c.annotated.keys[setting]; key != "" {
		return "annotation " + key
	}
	return otherwise
}

// explainAnnotated appends the keys of the pod's annotations to an error of an ADD, since one of them may be the cause.
// Without annotations it returns err unchanged.
func (c *Common) explainAnnotated(err error) error {
	if len(c.annotated.keys) == 0 {
		return err
	}
	keys := slices.Sorted(maps.Values(c.annotated.keys))
	return fmt.Errorf("%w (the pod's annotations are %s)", err, strings.Join(keys, ", "))
}

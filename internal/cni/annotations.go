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

// annotationPrefix begins the keys of the annotations that Tombolo reads: <prefix><setting>, or
// <prefix><network>.<setting> for one of a pod's networks.
const annotationPrefix = "tombolo-cni.github.io/"

// annotationsCapability is the capability with the annotations of a Kubernetes pod, which containerd and CRI-O pass.
const annotationsCapability = "io.kubernetes.cri.pod-annotations"

// annotations holds the settings that a pod requests by annotations.
type annotations struct {
	IPs       entries    `json:"ips"`
	MAC       string     `json:"mac"`
	Bandwidth *Bandwidth `json:"bandwidth"`
	HostName  *string    `json:"hostName"`
	ClientID  string     `json:"clientID"`
	podPolicy

	keys map[string]string // the keys of the annotations in use, by setting
}

// annotationTypes returns the names of the settings that a pod can request by annotations. The map's value is the
// ipam.type that a setting needs, or "" if it needs none.
func annotationTypes() map[string]string {
	return map[string]string{
		"ips": typeHostLocal, "hostName": typeDHCP, "clientID": typeDHCP,
		"mac": "", "bandwidth": "", "egressPolicy": "", "publishFrom": "",
	}
}

// annotationProblems adds a problem for each wrong entry in the configuration's list of permitted annotations.
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

// annotate applies the pod's annotations, unless runtimeConfig or args.cni has the setting. It returns errors about
// Tombolo's annotations that are unknown, not permitted or invalid. It ignores annotations with another prefix, and
// those for another network.
func (c *NetConf) annotate() (found strict.Problems) {
	var ours []string
	for key := range c.RuntimeConfig.Annotations {
		if n := len(annotationPrefix); len(key) >= n && strings.EqualFold(key[:n], annotationPrefix) {
			ours = append(ours, key)
		}
	}

	rc, a, types := &c.RuntimeConfig, &c.annotated, annotationTypes()
	a.keys = map[string]string{}
	slices.Sort(ours)
	for _, key := range ours {
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
			// The runtime's request takes precedence.
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

// read decodes the value of an annotation: JSON if it begins with a bracket, else text.
func (a *annotations) read(setting, value string) error {
	raw := json.RawMessage(value)
	if !strings.HasPrefix(value, "{") && !strings.HasPrefix(value, "[") {
		raw, _ = json.Marshal(value)
	}

	// Marshal refuses text after the end of the JSON value, which could add other settings.
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

// source returns the origin of a setting, such as "annotation tombolo-cni.github.io/mac". If the setting does not come
// from an annotation, it returns the argument otherwise.
func (c *Common) source(setting, otherwise string) string {
	if key := c.annotated.keys[setting]; key != "" {
		return "annotation " + key
	}
	return otherwise
}

// explainAnnotated adds the pod's annotations to an error of an ADD, since one of them may be the cause.
func (c *Common) explainAnnotated(err error) error {
	if len(c.annotated.keys) == 0 {
		return err
	}
	keys := slices.Sorted(maps.Values(c.annotated.keys))
	return fmt.Errorf("%w (the pod's annotations are %s)", err, strings.Join(keys, ", "))
}

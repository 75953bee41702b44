package cni

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
)

// Args maps the keys in the environment variable CNI_ARGS to their values.
type Args map[string]string

// parseArgs parses CNI_ARGS: pairs KEY=VALUE, separated by semicolons. If a key occurs twice, the last value counts. An
// unknown key is an error unless IgnoreUnknown is 1 or true. The known keys are IgnoreUnknown, IP, MAC, GATEWAY, and
// all that begin with K8S_. Errors have the CNI specification's code 4.
func parseArgs(text string) (Args, error) {
	args := Args{}
	if text == "" {
		return args, nil
	}

	unknown := ""
	for pair := range strings.SplitSeq(text, ";") {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, newError(codeEnvironment, "CNI_ARGS: %q is not of the form KEY=VALUE", pair)
		}
		args[key] = value
		known := slices.Contains([]string{"IgnoreUnknown", "IP", "MAC", "GATEWAY"}, key) ||
			strings.HasPrefix(key, "K8S_")
		if !known && unknown == "" {
			unknown = pair
		}
	}

	ignore, err := strconv.ParseBool(cmp.Or(args["IgnoreUnknown"], "false"))
	if err != nil {
		return nil, newError(codeEnvironment, "CNI_ARGS: IgnoreUnknown=%q is neither true nor false",
			args["IgnoreUnknown"])
	}

	if unknown != "" && !ignore {
		return nil, newError(codeEnvironment,
			"CNI_ARGS: %s is not known: add IgnoreUnknown=1 if it is meant for another plugin", unknown)
	}

	return args, nil
}

// Pod returns the pod's name as namespace/name, from K8S_POD_NAMESPACE and K8S_POD_NAME. Without a namespace, as for a
// container of podman, it returns only the name. Without a name it returns "".
func (a Args) Pod() string {
	ns, name := a["K8S_POD_NAMESPACE"], a["K8S_POD_NAME"]
	if ns == "" || name == "" {
		return name
	}
	return ns + "/" + name
}

// List splits the value of key at commas, and trims spaces. It returns nil if the value is empty or missing.
func (a Args) List(key string) []string { return entries(a[key]).list() }

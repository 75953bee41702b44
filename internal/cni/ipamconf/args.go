package ipamconf

import (
	"strings"
)

// envArgs is what CNI_ARGS says about addresses.
type envArgs struct {
	ips      []string // IP: a list with commas
	gateways []string // GATEWAY: likewise; static only
}

// parseArgs reads CNI_ARGS, a list of KEY=VALUE with semicolons (CNI
// specification 1.1.0, "Parameters"). Keys of others are errors, as in the
// reference plugins, unless IgnoreUnknown is 1 or true. MAC is known: the
// plugin that calls us reads it. Of two equal keys the last counts.
func parseArgs(args string) (*envArgs, error) {
	parsed := &envArgs{}
	if args == "" {
		return parsed, nil
	}
	var unknown []string
	ignoreUnknown := false
	for pair := range strings.SplitSeq(args, ";") {
		key, value, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, newError(codeInvalidEnv, nil, "CNI_ARGS: %q is not KEY=VALUE", pair)
		}
		switch key {
		case "IP":
			parsed.ips = splitList(value)
		case "GATEWAY":
			parsed.gateways = splitList(value)
		case "MAC":
		case "IgnoreUnknown":
			ignore, err := parseBool(value)
			if err != nil {
				return nil, err
			}
			ignoreUnknown = ignore
		default:
			// Runtimes tell every plugin which Kubernetes pod it is: that is not an error.
			if !strings.HasPrefix(key, "K8S_") {
				unknown = append(unknown, key)
			}
		}
	}
	if len(unknown) > 0 && !ignoreUnknown {
		return nil, newError(codeInvalidEnv, nil, "CNI_ARGS: unknown keys %q, and IgnoreUnknown is not set", unknown)
	}
	return parsed, nil
}

// splitList splits a list with commas. An empty text is an empty list.
func splitList(text string) []string {
	if text == "" {
		return nil
	}
	items := strings.Split(text, ",")
	for i, item := range items {
		items[i] = strings.TrimSpace(item)
	}
	return items
}

func parseBool(text string) (bool, error) {
	switch strings.ToLower(text) {
	case "1", "true":
		return true, nil
	case "0", "false":
		return false, nil
	default:
		return false, newError(codeInvalidEnv, nil, "CNI_ARGS: IgnoreUnknown=%q is neither true nor false", text)
	}
}

package cni

import (
	"bytes"
	"errors"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestArgumentsAreReadOrRefused(t *testing.T) {
	t.Parallel()
	const help = " is not known: add IgnoreUnknown=1 if it is meant for another plugin"
	for _, tt := range []struct {
		in   string
		want Args
		err  string
	}{
		{"", Args{}, ""},
		{"IP=10.0.0.2;MAC=x;GATEWAY=;K8S_POD_NAME=p;K8S_WHATEVER=", Args{"IP": "10.0.0.2", "MAC": "x", "GATEWAY": "", "K8S_POD_NAME": "p", "K8S_WHATEVER": ""}, ""},
		{"FOO=bar;IgnoreUnknown=1", Args{"FOO": "bar", "IgnoreUnknown": "1"}, ""},
		{"IgnoreUnknown=True;FOO=a=b", Args{"FOO": "a=b", "IgnoreUnknown": "True"}, ""},
		{"IgnoreUnknown=false;IP=1", Args{"IgnoreUnknown": "false", "IP": "1"}, ""},
		{"IP=1;IP=2", Args{"IP": "2"}, ""},

		{"FOO=1;BAR=2", nil, "FOO=1" + help},
		{"IgnoreUnknown=0;FOO=1", nil, "FOO=1" + help},
		{"ip=10.0.0.2", nil, "ip=10.0.0.2" + help},
		{"IP", nil, `"IP" is not of the form KEY=VALUE`},
		{"IP=1;", nil, `"" is not of the form KEY=VALUE`},
		{"FOO=1;=1;IP=3;IgnoreUnknown=1", nil, `"=1" is not of the form KEY=VALUE`},
		{"IgnoreUnknown=maybe", nil, `IgnoreUnknown="maybe" is neither true nor false`},
	} {
		got, err := parseArgs(tt.in)
		expect.NoDiff(t, cmp.Diff(tt.want, got), "%q", tt.in)
		var coded *types.Error
		switch {
		case tt.err == "" && err == nil:
		case !errors.As(err, &coded) || coded.Code != types.ErrInvalidEnvironmentVariables || coded.Msg != "CNI_ARGS: "+tt.err:
			t.Errorf("%q: %v, want code 4 and %q", tt.in, err, tt.err)
		}
	}
}

func TestPodNameIsWholeOrThatOfAContainer(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ ns, name, want string }{
		{"default", "web-0", "default/web-0"}, {"", "web-0", "web-0"}, {"default", "", ""}, {"", "", ""},
	} {
		args := Args{"K8S_POD_NAMESPACE": tt.ns, "K8S_POD_NAME": tt.name}
		expect.Equal(t, args.Pod(), tt.want, "%q and %q give", tt.ns, tt.name)
	}
}

func TestListIsSplitAtCommas(t *testing.T) {
	t.Parallel()
	args := Args{"IP": "a, b ,", "GATEWAY": ""}
	expect.NoDiff(t, cmp.Diff([]string{"a", "b", ""}, args.List("IP")))
	expect.That(t, len(args.List("GATEWAY"))+len(args.List("MAC")) == 0, "an empty value, or none, is a list")
}

// FuzzParseArgs: what parseArgs gives stands in its text.
func FuzzParseArgs(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		args, err := parseArgs(string(data))
		if coded := new(types.Error); err != nil && (!errors.As(err, &coded) || coded.Code != types.ErrInvalidEnvironmentVariables) {
			t.Errorf("%v", err)
		}
		for key, value := range args {
			expect.That(t, bytes.Contains(data, []byte(key+"="+value)), "%q=%q is not in %q", key, value, data)
		}
	})
}

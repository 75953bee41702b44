package strict_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/strict"
)

// coldEnv makes the test binary decode typical once, print the nanoseconds, and exit. Its value names the decoder.
const coldEnv = "STRICT_COLD"

// pod has about as many fields as the plugin's real config.
type pod struct {
	CNIVersion string `json:"cniVersion"`
	Name       string `json:"name"`
	Type       string `json:"type"`
	Mode       string `json:"mode"`
	Bridge     string `json:"bridge"`
	IsGateway  *bool  `json:"isGateway"`
	IPMasq     *bool  `json:"ipMasq"`
	Hairpin    *bool  `json:"hairpinMode"`
	DAD        *bool  `json:"enabledad"`
	Isolation  *bool  `json:"portIsolation"`
	MTU        int    `json:"mtu"`
	IPAM       struct {
		*Inline
		Type    string         `json:"type"`
		DataDir string         `json:"dataDir"`
		Ranges  [][]inlineConf `json:"ranges"`
		Routes  []struct {
			Dst netip.Prefix `json:"dst"`
			GW  netip.Addr   `json:"gw"`
			MTU int          `json:"mtu"`
		} `json:"routes"`
	} `json:"ipam"`
	DNS struct {
		Nameservers []string `json:"nameservers"`
		Domain      string   `json:"domain"`
		Search      []string `json:"search"`
	} `json:"dns"`
	RuntimeConfig struct {
		PortMappings []struct {
			HostPort      int    `json:"hostPort"`
			ContainerPort int    `json:"containerPort"`
			Protocol      string `json:"protocol"`
			HostIP        string `json:"hostIP"`
		} `json:"portMappings"`
		Annotations json.RawMessage `json:"io.kubernetes.cri.pod-annotations"`
	} `json:"runtimeConfig"`
	Args       json.RawMessage `json:"args"`
	PrevResult json.RawMessage `json:"prevResult"`
}

// typical is a netconf of 1 KB, as containerd hands it over.
const typical = `{"cniVersion":"1.1.0","name":"lan","type":"tombolo","mode":"gateway","bridge":"cbr0","isGateway":true,` +
	`"ipMasq":true,"hairpinMode":true,"enabledad":false,"portIsolation":false,"mtu":1450,"ipam":{"type":"host-local",` +
	`"dataDir":"/run/tombolo/ipam","ranges":[[{"subnet":"10.1.0.0/24","rangeStart":"10.1.0.10","rangeEnd":"10.1.0.250"}],` +
	`[{"subnet":"fd00:1::/64"}]],"routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"},{"dst":"10.0.0.0/8","gw":"10.1.0.1",` +
	`"mtu":1400}]},"dns":{"nameservers":["10.96.0.10"],"domain":"cluster.local","search":["default.svc.cluster.local",` +
	`"svc.cluster.local"]},"runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp",` +
	`"hostIP":""},{"hostPort":8443,"containerPort":443,"protocol":"tcp","hostIP":"192.0.2.1"}],` +
	`"io.kubernetes.cri.pod-annotations":{"kubernetes.io/config.source":"api","kubernetes.io/config.seen":` +
	`"2026-01-02T03:04:05Z"}},"args":{"cni":{"labels":[{"key":"app","value":"web"}]}},"prevResult":{"cniVersion":"1.1.0",` +
	`"interfaces":[{"name":"eth0","mac":"02:00:00:00:00:01"}]}}`

// BenchmarkUnmarshal is the warm cost, beside that of encoding/json.
func BenchmarkUnmarshal(b *testing.B) {
	b.Run("strict", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var v pod
			if err := strict.Unmarshal([]byte(typical), &v, nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("encoding-json", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var v pod
			if err := json.Unmarshal([]byte(typical), &v); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkColdCall is what a plugin pays: the first call in a fresh process, without the process itself.
func BenchmarkColdCall(b *testing.B) {
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	for _, decoder := range []string{"strict", "encoding-json"} {
		b.Run(decoder, func(b *testing.B) {
			total := time.Duration(0)
			for b.Loop() {
				cmd := exec.Command(self)
				cmd.Env = append(os.Environ(), coldEnv+"="+decoder)
				out, err := cmd.Output()
				if err != nil {
					b.Fatal(err)
				}
				ns, err := strconv.Atoi(strings.TrimSpace(string(out)))
				if err != nil {
					b.Fatal(err)
				}
				total += time.Duration(ns)
			}
			b.ReportMetric(float64(total.Microseconds())/float64(b.N), "cold-µs/op")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// coldCall is the child of BenchmarkColdCall.
func coldCall() {
	var v pod
	data := []byte(typical)
	start := time.Now()
	var err error
	if os.Getenv(coldEnv) == "strict" {
		err = strict.Unmarshal(data, &v, nil)
	} else {
		err = json.Unmarshal(data, &v)
	}
	took := time.Since(start)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(took.Nanoseconds())
}

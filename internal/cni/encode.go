package cni

import (
	"bytes"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/jsontext"
)

// encode writes a result in the version of the configuration.
func (c *call) encode(r *current.Result) ([]byte, error) {
	if c.cniVersion == "1.0.0" || c.cniVersion == "1.1.0" {
		r.CNIVersion = c.cniVersion
		return encodeResult(r), nil
	}
	var out bytes.Buffer
	older, err := r.GetAsVersion(c.cniVersion)
	if err == nil {
		err = older.PrintTo(&out)
	}
	if err != nil {
		return nil, newError(codeIncompatibleVersion, "write the result as CNI %s: %v", c.cniVersion, err)
	}
	return out.Bytes(), nil
}

// encodeResult writes a result of CNI 1.0 and 1.1, as the specification's section 5
// has it. The library's types do it in four passes, which is a tenth of an ADD.
func encodeResult(r *current.Result) []byte {
	o := jsontext.OpenObject(nil)
	o.String("cniVersion", r.CNIVersion)
	jsontext.List(o, "interfaces", r.Interfaces, encodeInterface)
	jsontext.List(o, "ips", r.IPs, encodeIP)
	jsontext.List(o, "routes", r.Routes, encodeRoute)
	if !isEmptyDNS(r.DNS) {
		dns := jsontext.OpenObject(o.Key("dns"))
		dns.Strings("nameservers", r.DNS.Nameservers)
		dns.String("domain", r.DNS.Domain)
		dns.Strings("search", r.DNS.Search)
		dns.Strings("options", r.DNS.Options)
		o.Done(dns.Close())
	}
	return append(o.Close(), '\n')
}

func encodeInterface(b []byte, in *current.Interface) []byte {
	o := jsontext.OpenObject(b)
	o.Done(jsontext.AppendString(o.Key("name"), in.Name))
	o.String("mac", in.Mac)
	o.Int("mtu", in.Mtu)
	o.String("sandbox", in.Sandbox)
	o.String("socketPath", in.SocketPath)
	o.String("pciID", in.PciID)
	return o.Close()
}

func encodeIP(b []byte, ip *current.IPConfig) []byte {
	o := jsontext.OpenObject(b)
	o.IntPointer("interface", ip.Interface)
	o.Done(jsontext.AppendString(o.Key("address"), ip.Address.String()))
	if ip.Gateway != nil {
		o.String("gateway", ip.Gateway.String())
	}
	return o.Close()
}

func encodeRoute(b []byte, r *types.Route) []byte {
	o := jsontext.OpenObject(b)
	o.Done(jsontext.AppendString(o.Key("dst"), r.Dst.String()))
	if r.GW != nil {
		o.String("gw", r.GW.String())
	}
	o.Int("mtu", r.MTU)
	o.Int("advmss", r.AdvMSS)
	o.Int("priority", r.Priority)
	o.IntPointer("table", r.Table)
	o.IntPointer("scope", r.Scope)
	return o.Close()
}

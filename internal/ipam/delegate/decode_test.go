package delegate

import (
	"errors"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// FuzzDecodeResult: whatever a plugin prints, decode neither panics nor returns a result that a caller could trip over.
func FuzzDecodeResult(f *testing.F) {
	f.Add([]byte(`{"cniVersion":"1.1.0","ips":[{"address":"10.1.0.2/24"}],"routes":[{"dst":"::/0"}],"dns":{}}`), []byte(`{}`))
	f.Add([]byte(`{"ips":[{"version":"4","address":"10.1.0.2/24"}]}`), []byte(`{"cniVersion":"0.4.0"}`))
	f.Add([]byte(`{"cniVersion":"0.2.0","ip4":{"ip":"10.1.0.2/24"},"ip6":null}`), []byte(`{}`))
	f.Add([]byte(`{"code":7,"msg":"no"}`), []byte(`{"cniVersion":"1.0.0"}`))
	f.Fuzz(func(t *testing.T, stdout, stdin []byte) {
		plugin := &Plugin{Name: "fake", Stdin: stdin}
		result, err := plugin.decode(stdout)
		if err != nil {
			must.That(t, errors.Is(err, ErrBadResult), "%v is not an ErrBadResult", err)
			return
		}
		for _, ip := range result.IPs {
			must.That(t, ip != nil && ip.Address.IP != nil, "%q gave an empty address", stdout)
		}
		for _, route := range result.Routes {
			must.That(t, route != nil, "%q gave a null route", stdout)
		}
		for _, link := range result.Interfaces {
			must.That(t, link != nil, "%q gave a null interface", stdout)
		}
	})
}

// FuzzErrorObject: an error object always has a code, so that it is never taken for success.
func FuzzErrorObject(f *testing.F) {
	f.Add([]byte(`{"cniVersion":"1.1.0","code":11,"msg":"busy","details":"x"}`))
	f.Add([]byte(`{"msg":"old"}`))
	f.Add([]byte(`panic: x`))
	f.Fuzz(func(t *testing.T, stdout []byte) {
		own := errorObject(stdout)
		must.That(t, own == nil || own.Code != 0, "%q gave code 0", stdout)
	})
}

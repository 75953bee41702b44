package dhcpc

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestLeasesThatNoServerGranted(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(*Lease){
		"no address":           func(l *Lease) { l.Address = netip.Prefix{} },
		"IPv6":                 func(l *Lease) { l.Address = netip.MustParsePrefix("2001:db8::7/64") },
		"address 0":            func(l *Lease) { l.Address = netip.MustParsePrefix("0.0.0.0/24") },
		"no server":            func(l *Lease) { l.Server = netip.Addr{} },
		"IPv6 server":          func(l *Lease) { l.Server = addr("2001:db8::1") },
		"no MAC":               func(l *Lease) { l.MAC = nil },
		"long MAC":             func(l *Lease) { l.MAC = make(Hex, 7) },
		"never obtained":       func(l *Lease) { l.Obtained = time.Time{} },
		"T1 before it":         func(l *Lease) { l.Renew = l.Obtained.Add(-1) },
		"T2 before T1":         func(l *Lease) { l.Rebind = l.Renew.Add(-1) },
		"ended before T2":      func(l *Lease) { l.Expire = l.Rebind.Add(-1) },
		"T1 only":              func(l *Lease) { l.Rebind, l.Expire = time.Time{}, time.Time{} },
		"no T1 but an end":     func(l *Lease) { l.Renew = time.Time{} },
		"no end but T1 and T2": func(l *Lease) { l.Expire = time.Time{} },
	} {
		l := testLease()
		damage(l)
		m, err := NewMachine(testConfig())
		must.Succeed(t, err)
		_, restore := m.Restore(epoch(), 1, l)
		_, release := Release(l, 1)
		for _, err := range []error{l.Validate(), restore, release} {
			if !errors.Is(err, tombolo.ErrInvalid) || strings.Contains(err.Error(), "invalid Prefix") || strings.Contains(err.Error(), "invalid IP") {
				t.Errorf("%s: %v, want %v in words of its own", name, err, tombolo.ErrInvalid)
			}
		}
	}
}

func TestTimeLeft(t *testing.T) {
	t.Parallel()
	l := testLease()
	for _, tt := range []struct {
		at   time.Duration
		want time.Duration
	}{{0, time.Hour}, {59 * time.Minute, time.Minute}, {time.Hour, 0}, {2 * time.Hour, 0}} {
		got := l.Left(epoch().Add(tt.at))
		expect.That(t, got == tt.want, "%s left after %s, want %s", got, tt.at, tt.want)
	}
}

func TestHex(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "00", "02:00:0a:09:00:07", "ff:fe"} {
		var h Hex
		expect.Success(t, json.Unmarshal([]byte(`"`+text+`"`), &h))
		expect.Equal(t, h.String(), text, "read %q as %q", text, h)
	}
	for _, text := range []string{"0", "0g", "00:", ":00", "00:0", "00-00", "0000", "00::00", "000:0"} {
		var h Hex
		expect.Failure(t, h.UnmarshalText([]byte(text)), "read %q as %s", text, h)
	}
}

func TestStatesHaveTheirNames(t *testing.T) {
	t.Parallel()
	var got []string
	for s := initial; s <= rebinding; s++ {
		got = append(got, s.String())
	}
	expect.That(t, strings.Join(got, " ") == "INIT REBOOTING SELECTING REQUESTING PROBING BOUND RENEWING REBINDING",
		"got %v", got)
}

func TestConfigsThatCannotWork(t *testing.T) {
	t.Parallel()
	for want, cfg := range map[string]*Config{
		"no configuration":               nil,
		`MAC address ""`:                 {},
		"want 6 bytes":                   {MAC: make([]byte, 8)},
		"client identifier of 1 bytes":   {MAC: ownMAC(), ClientID: []byte{0}},
		"client identifier of 256 bytes": {MAC: ownMAC(), ClientID: make([]byte, 256)},
		"host name of 256 bytes":         {MAC: ownMAC(), HostName: strings.Repeat("a", 256)},
		"vendor class of 256 bytes":      {MAC: ownMAC(), VendorClass: strings.Repeat("a", 256)},
		"address 224.0.0.1":              {MAC: ownMAC(), Address: addr("224.0.0.1")},
		"address ::1":                    {MAC: ownMAC(), Address: addr("::1")},
		"has no address":                 {MAC: ownMAC(), Last: &Lease{}},
		"timeout -1ns":                   {MAC: ownMAC(), Timeout: -1},
		"retransmission 1m5s":            {MAC: ownMAC(), Retransmit: 65 * time.Second},
		"link MTU -1":                    {MAC: ownMAC(), LinkMTU: -1},
		"option 53 cannot be provided":   {MAC: ownMAC(), Provide: []Option{{53, []byte{1}}}},
		"option 61 cannot be provided":   {MAC: ownMAC(), Provide: []Option{{61, []byte{1}}}},
		"option 12 cannot be provided":   {MAC: ownMAC(), Provide: []Option{{12, nil}}},
		"option 60 cannot be provided":   {MAC: ownMAC(), Provide: []Option{{60, nil}}},
		"option 50 cannot be provided":   {MAC: ownMAC(), Provide: []Option{{50, nil}}},
		"option 55 cannot be provided":   {MAC: ownMAC(), Provide: []Option{{55, nil}}},
		"option 80 cannot be provided":   {MAC: ownMAC(), Provide: []Option{{80, nil}}},
		"option 255 cannot be provided":  {MAC: ownMAC(), Provide: []Option{{255, nil}}},
		"option 77 of 256 bytes":         {MAC: ownMAC(), Provide: []Option{{77, make([]byte, 256)}}},
		"option 0 cannot be requested":   {MAC: ownMAC(), Request: []uint8{0}},
		"no Dial in the configuration":   {MAC: ownMAC()},
	} {
		expect.Says(t, expect.Err(New(cfg)), want)
	}
}

func TestConfigIsTheMachinesOwn(t *testing.T) {
	t.Parallel()
	cfg := testConfig()
	m := must.Of(NewMachine(cfg)).Get(t)
	cfg.MAC[0], cfg.ClientID[1] = 0xfe, 'X'
	expect.That(t, m.cfg.MAC.String() == ownMAC().String() && string(m.cfg.ClientID) == string(ownID()),
		"it changed with its caller's")
}

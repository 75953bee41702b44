package main

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/hostport"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

type closing func() error

func (fn closing) Close() error { return fn() }

// Whatever is closed once more is an error, and no other file is closed, though it has the number by then.
func TestWhateverIsClosedTwice(t *testing.T) {
	host, pod, _ := hostAndPod(t)
	links, err := bridge.Dial(host)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := links.Ensure(t.Context(), bridge.Bridge{Name: "twice0"}); err != nil {
		t.Fatal(err)
	}
	port := bridge.Port{Name: "veth0", Bridge: "twice0", Peer: "eth0", Autoconf: &bridge.Autoconf{}}
	at, err := links.Attach(t.Context(), pod, port)
	if err != nil {
		t.Fatal(err)
	}
	inPod := &transport.Config{NetNS: pod, Link: at.PeerIndex}
	outside := &transport.Config{NetNS: host, Link: at.Index, MAC: at.PeerMAC}
	dialUDP := func() (dhcpc.Transport[*dhcpc.Packet], error) { return transport.DialUDP(inPod) }
	dialUDP6 := func() (dhcpc.Transport[[]byte], error) { return transport.DialUDP6(inPod) }

	for name, open := range map[string]func() (io.Closer, error){
		"netns.New":                func() (io.Closer, error) { return netns.New() },
		"netns.Current":            func() (io.Closer, error) { return netns.Current() },
		"leave":                    func() (io.Closer, error) { leave, err := pod.Enter(); return closing(leave), err },
		"addr.Dial":                func() (io.Closer, error) { return addr.Dial(pod) },
		"addr.Listen":              func() (io.Closer, error) { return addr.Listen(pod) },
		"route.Dial":               func() (io.Closer, error) { return route.Dial(pod) },
		"bridge.Dial":              func() (io.Closer, error) { return bridge.Dial(host) },
		"Solicit":                  func() (io.Closer, error) { return links.Solicit(t.Context(), pod, port) },
		"nft.Dial":                 func() (io.Closer, error) { return nft.Dial(&nft.Config{NetNS: host}) },
		"hostport.Dial":            func() (io.Closer, error) { return hostport.Dial(host, nil) },
		"transport.DialRaw":        func() (io.Closer, error) { return transport.DialRaw(inPod) },
		"transport.DialUDP":        func() (io.Closer, error) { return dialUDP() },
		"transport.DialUDP6":       func() (io.Closer, error) { return dialUDP6() },
		"transport.DialWitness":    func() (io.Closer, error) { return transport.DialWitness(outside, dialUDP) },
		"transport.DialWitness6":   func() (io.Closer, error) { return transport.DialWitness6(outside, dialUDP6) },
		"transport.Dialer, leased": func() (io.Closer, error) { return transport.Dialer(inPod)(t.Context(), netip.IPv4Unspecified()) },
	} {
		c, err := open()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if err := c.Close(); err != nil {
			t.Errorf("%s: the first Close: %v", name, err)
		}
		var others []*os.File // some of which get the numbers
		for range 4 {
			f, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			others = append(others, f)
		}
		isQuiet := name == "transport.DialRaw" // mdlayher/packet takes it for success
		if err := c.Close(); (err != nil || !isQuiet) && !errors.Is(err, tombolo.ErrInvalid) && !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: the second Close: %v", name, err)
		}
		for _, f := range others {
			if err := f.Close(); err != nil {
				t.Errorf("%s: the second Close closed another file: %v", name, err)
			}
		}
	}
	if err := links.Close(); err != nil {
		t.Error(err)
	}
}

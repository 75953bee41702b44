package transport

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// A server on the same machine: its kernel leaves the UDP checksum to a device that
// never computes it. Without the status beside the packet its answer would be damaged.
func TestRawHearsAnAnswerWhoseChecksumNobodyComputed(t *testing.T) {
	t.Parallel()
	pod, host := nstest.New(t), nstest.New(t)
	eth0, _ := nstest.Veth(t, pod, "eth0", host, "veth0")
	nstest.Run(t, host, "ip", "address", "add", "10.9.0.1/24", "dev", "veth0")
	r, err := DialRaw(&Config{NetNS: pod, Link: eth0, MAC: net.HardwareAddr(ownMAC())})
	must.Succeed(t, err)
	defer r.Close()
	must.Succeed(t, host.Do(func() error {
		conn, err := net.ListenPacket("udp4", "10.9.0.1:67")
		if err != nil {
			return err
		}
		defer conn.Close()
		for range 2 {
			if _, err := conn.WriteTo(reply().Payload, &net.UDPAddr{IP: net.IPv4(10, 9, 0, 255), Port: 68}); err != nil {
				return err
			}
		}
		return nil
	}))
	frame, complete, err := r.read()
	must.That(t, err == nil && !complete,
		"complete %v, %v: the kernel computes checksums here, which makes this no test", complete, err)
	if _, err := decode(frame, true); err == nil {
		t.Fatal("the checksum is right, which makes this no test")
	}
	p, err := r.Receive(context.Background(), time.Now().Add(3*time.Minute))
	expect.That(t, err == nil && string(p.Payload) == string(reply().Payload), "received %v, %v", p, err)
}

// A frame whose checksum its sender did compute comes without that status, and is
// verified.
func TestRawVerifiesAChecksumThatIsThere(t *testing.T) {
	t.Parallel()
	pod, host := nstest.New(t), nstest.New(t)
	eth0, veth0 := nstest.Veth(t, pod, "eth0", host, "veth0")
	r := must.Of(DialRaw(&Config{NetNS: pod, Link: eth0, MAC: net.HardwareAddr(ownMAC())})).Get(t)
	defer r.Close()
	sender := must.Of(DialRaw(&Config{NetNS: host, Link: veth0})).Get(t)
	defer sender.Close()
	must.Succeed(t, sender.Send(t.Context(), reply()))
	frame, complete, err := r.read()
	must.That(t, err == nil && complete, "complete %v, %v", complete, err)
	expect.Success(t, expect.Err(decode(frame, true)))
}

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
// never computes it.
func TestRawHearsAnAnswerWhoseChecksumNobodyComputed(t *testing.T) {
	t.Parallel()
	pod, host := nstest.New(t), nstest.New(t)
	eth0, _ := nstest.Veth(t, pod, "eth0", host, "veth0")
	nstest.Run(t, host, "ip", "address", "add", "10.9.0.1/24", "dev", "veth0")
	r, err := DialRaw(&Config{NetNS: pod, Link: eth0, MAC: net.HardwareAddr(ownMAC())})
	must.Succeed(t, err)
	defer r.Close()
	err = host.Do(func() error {
		conn, err := net.ListenPacket("udp4", "10.9.0.1:67")
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.WriteTo(reply().Payload, &net.UDPAddr{IP: net.IPv4(10, 9, 0, 255), Port: 68})
		return err
	})
	must.Succeed(t, err)
	p, err := r.Receive(context.Background(), time.Now().Add(3*time.Minute))
	expect.That(t, err == nil && string(p.Payload) == string(reply().Payload), "received %v, %v", p, err)
}

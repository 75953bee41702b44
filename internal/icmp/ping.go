package icmp

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/netns"
)

const (
	firstPause   = 50 * time.Millisecond  // until the first repetition of a request; doubled each time
	longestPause = 400 * time.Millisecond // limits the delay until Ping notices that its context is done
	moment       = 2 * time.Millisecond   // the shortest time to listen

	tokenLen  = 8
	packetMax = 1 << 16
)

// Echo configures Ping.
type Echo struct {
	// From is the source address. The zero Addr lets the kernel choose it.
	From netip.Addr
	// Size is the number of bytes after the 8 bytes of the ICMP header. Ping sends at least 8.
	Size int
	// DontFragment makes a request fail with EMSGSIZE if it is too long for the path.
	DontFragment bool
	// ID is the identifier of the requests. 0 means a random one.
	ID uint16
	// Wait is the total time to wait for an answer.
	Wait time.Duration
}

// ErrNoReply is the cause of an error of Ping if no answer came in time.
var ErrNoReply = errors.New("no echo reply")

// Ping sends echo requests from a namespace until one is answered, the kernel reports an error, ctx is done, or
// opt.Wait is over. Without an answer, the error matches ErrNoReply, an errno of the kernel (EHOSTUNREACH,
// ECONNREFUSED, …) or ctx's error.
func Ping(ctx context.Context, ns *netns.NS, dst netip.Addr, opt Echo) error {
	conn, err := dial(ns, dst, opt)
	if err == nil {
		defer conn.Close()
		p := pinger{
			IPConn: conn, id: cmp.Or(opt.ID, uint16(rand.Uint32())), data: make([]byte, max(opt.Size, tokenLen)),
			request: ipv6.ICMPTypeEchoRequest, reply: ipv6.ICMPTypeEchoReply,
		}
		if dst.Is4() {
			p.request, p.reply = ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply
		}

		// Send random data, which identify the replies to this pinger. Every raw socket of a namespace receives all
		// replies.
		binary.BigEndian.PutUint64(p.data, rand.Uint64())
		err = p.run(ctx, opt.Wait)
	}

	if err != nil {
		return fmt.Errorf("ping %s: %w", dst, err)
	}
	return nil
}

// pinger is the state of one call of Ping.
type pinger struct {
	*net.IPConn
	request, reply icmp.Type
	id             uint16
	data           []byte
	sent           int
}

// dial opens a raw socket for ICMP in a namespace, connected to dst. It makes the kernel report errors about packets
// to dst, for example that no host answers for the address.
func dial(ns *netns.NS, dst netip.Addr, opt Echo) (conn *net.IPConn, err error) {
	network := "ip6:ipv6-icmp"
	level, receiveErrors, discover := unix.IPPROTO_IPV6, unix.IPV6_RECVERR, unix.IPV6_MTU_DISCOVER
	if dst.Is4() {
		network = "ip4:icmp"
		level, receiveErrors, discover = unix.IPPROTO_IP, unix.IP_RECVERR, unix.IP_MTU_DISCOVER
	}

	dialer := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		controlErr := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), level, receiveErrors, 1)
			if opt.DontFragment {
				err = cmp.Or(err, unix.SetsockoptInt(int(fd), level, discover, unix.IP_PMTUDISC_DO))
			}
		})
		return cmp.Or(controlErr, err)
	}}
	if opt.From.IsValid() {
		dialer.LocalAddr = &net.IPAddr{IP: opt.From.AsSlice()}
	}

	err = ns.Do(func() error {
		to, err := dialer.Dial(network, dst.String())
		if err == nil {
			conn = to.(*net.IPConn)
		}
		return err
	})
	return conn, err
}

// run does the work of Ping. It sends requests for at most the duration wait. An answer that has already arrived counts
// even after that time, because the process may not have got the CPU in time.
func (p *pinger) run(ctx context.Context, wait time.Duration) error {
	limit := time.Now().Add(wait)
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		if err := ctx.Err(); err != nil {
			return err
		}

		left := time.Until(limit)
		if left > 0 {
			if err := p.send(); err != nil {
				return err
			}
		}

		err := p.receive(time.Now().Add(max(min(pause, left), moment)))
		switch {
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return err
		case left <= 0:
			return fmt.Errorf("%w within %s", ErrNoReply, wait)
		}
	}
}

// send sends the next echo request.
func (p *pinger) send() error {
	m := icmp.Message{Type: p.request, Body: &icmp.Echo{ID: int(p.id), Seq: p.sent, Data: p.data}}
	packet, err := m.Marshal(nil) // for IPv6 the kernel fills in the checksum
	if err == nil {
		p.sent++
		_, err = p.Write(packet)
	}
	return err
}

// receive waits for an answer to any of the requests. If none comes before the time in the parameter until, the error
// matches os.ErrDeadlineExceeded.
func (p *pinger) receive(until time.Time) error {
	if err := p.SetReadDeadline(until); err != nil {
		return err
	}

	buf := make([]byte, packetMax)
	for {
		n, _, err := p.ReadFromIP(buf)
		if err != nil || p.isAnswer(buf[:n]) {
			return err
		}
	}
}

// isAnswer reports whether an ICMP message answers one of the requests.
func (p *pinger) isAnswer(message []byte) bool {
	m, err := icmp.ParseMessage(p.reply.Protocol(), message)
	if err != nil || m.Type != p.reply {
		return false
	}
	echo, ok := m.Body.(*icmp.Echo)
	return ok && echo.ID == int(p.id) && echo.Seq < p.sent && bytes.Equal(echo.Data, p.data)
}

package icmp

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/netns"
)

const (
	firstPause   = 50 * time.Millisecond  // until a request is repeated, doubled each time
	longestPause = 400 * time.Millisecond // limits the delay until Ping notices that its context is done

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

// Ping sends echo requests from a namespace until one is answered. It returns the time between that request and its
// answer. The error matches ErrNoReply, an errno of the kernel (EHOSTUNREACH, ECONNREFUSED, …) or ctx's error.
func Ping(ctx context.Context, ns *netns.NS, dst netip.Addr, opt Echo) (time.Duration, error) {
	p, err := newPinger(ns, dst, opt)
	if err != nil {
		return 0, fmt.Errorf("ping %s: %w", dst, err)
	}
	defer unix.Close(p.fd)
	deadline := time.Now().Add(opt.Wait)
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		left := time.Until(deadline)
		if left <= 0 {
			return 0, fmt.Errorf("ping %s: %w within %s", dst, ErrNoReply, opt.Wait)
		}

		rtt, err := p.try(ctx, min(pause, left))
		switch {
		case err == nil:
			return rtt, nil
		case !errors.Is(err, ErrNoReply):
			return 0, fmt.Errorf("ping %s: %w", dst, err)
		}
	}
}

// pinger is the state of one call of Ping.
type pinger struct {
	fd   int
	is4  bool
	id   uint16
	data []byte
	sent []time.Time // time of each request, by its sequence number
	buf  []byte
}

func newPinger(ns *netns.NS, dst netip.Addr, opt Echo) (*pinger, error) {
	fd, err := open(ns, dst.Is4())
	if err != nil {
		return nil, err
	}

	p := &pinger{
		fd: fd, is4: dst.Is4(), id: cmp.Or(opt.ID, uint16(rand.Uint32())),
		data: make([]byte, max(opt.Size, tokenLen)),
		buf:  make([]byte, packetMax),
	}

	// Send random data, which identify the replies to this pinger. Every raw socket of a namespace receives all
	// replies.
	binary.BigEndian.PutUint64(p.data, rand.Uint64())
	if err := p.connect(dst, opt); err != nil {
		unix.Close(fd)
		return nil, err
	}

	return p, nil
}

// open opens a raw socket for ICMP in a namespace.
func open(ns *netns.NS, is4 bool) (int, error) {
	family, protocol := unix.AF_INET6, unix.IPPROTO_ICMPV6
	if is4 {
		family, protocol = unix.AF_INET, unix.IPPROTO_ICMP
	}

	fd := -1
	err := ns.Do(func() (err error) {
		if fd, err = unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol); err != nil {
			return fmt.Errorf("open raw socket: %w", err)
		}

		return nil
	})

	return fd, err
}

// connect sets the socket's options and its destination. It makes the kernel report errors about packets to dst, for
// example that no host answers for the address.
func (p *pinger) connect(dst netip.Addr, opt Echo) error {
	level, receiveErrors, discover := unix.IPPROTO_IPV6, unix.IPV6_RECVERR, unix.IPV6_MTU_DISCOVER
	if p.is4 {
		level, receiveErrors, discover = unix.IPPROTO_IP, unix.IP_RECVERR, unix.IP_MTU_DISCOVER
	}

	if err := unix.SetsockoptInt(p.fd, level, receiveErrors, 1); err != nil {
		return fmt.Errorf("ask for errors: %w", err)
	}

	if opt.DontFragment {
		if err := unix.SetsockoptInt(p.fd, level, discover, unix.IP_PMTUDISC_DO); err != nil {
			return fmt.Errorf("forbid fragments: %w", err)
		}
	}

	if opt.From.IsValid() {
		if err := unix.Bind(p.fd, sockaddr(opt.From)); err != nil {
			return fmt.Errorf("from %s: %w", opt.From, err)
		}
	}

	return unix.Connect(p.fd, sockaddr(dst))
}

func sockaddr(a netip.Addr) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Addr: a.As16()}
}

// try sends one request, and waits for an answer to this or an earlier request. An answer that has already arrived
// counts even after the time is over, because the process may not have got the CPU in time.
func (p *pinger) try(ctx context.Context, wait time.Duration) (time.Duration, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}

	packet, err := p.request().Marshal(nil) // for IPv6 the kernel fills in the checksum
	if err != nil {
		return 0, err
	}

	p.sent = append(p.sent, time.Now())
	if err := unix.Send(p.fd, packet, 0); err != nil {
		return 0, err
	}

	deadline := time.Now().Add(wait)
	for {
		// A time-out of 0 would mean to wait for ever.
		timeout := unix.NsecToTimeval(max(time.Until(deadline), time.Microsecond).Nanoseconds())
		if err := unix.SetsockoptTimeval(p.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
			return 0, fmt.Errorf("set time-out: %w", err)
		}

		n, err := unix.Read(p.fd, p.buf)
		now := time.Now()
		switch {
		case err == unix.EAGAIN && !now.Before(deadline):
			return 0, ErrNoReply
		case err == unix.EAGAIN || err == unix.EINTR:
			continue
		case err != nil:
			return 0, err
		}

		if seq, ok := p.answered(p.buf[:n]); ok {
			return now.Sub(p.sent[seq]), nil
		}
	}
}

// request returns the next echo request.
func (p *pinger) request() *icmp.Message {
	m := &icmp.Message{Type: ipv6.ICMPTypeEchoRequest, Body: &icmp.Echo{ID: int(p.id), Seq: len(p.sent), Data: p.data}}
	if p.is4 {
		m.Type = ipv4.ICMPTypeEcho
	}
	return m
}

// answered returns the sequence number of the request that a packet answers. It returns false if the packet is no
// answer to this pinger.
func (p *pinger) answered(packet []byte) (int, bool) {
	protocol, reply := unix.IPPROTO_ICMPV6, icmp.Type(ipv6.ICMPTypeEchoReply)
	if p.is4 {
		// On IPv4, the packet begins with the IP header.
		h, err := ipv4.ParseHeader(packet)
		if err != nil || h.Len < ipv4.HeaderLen {
			return 0, false
		}
		protocol, reply, packet = unix.IPPROTO_ICMP, ipv4.ICMPTypeEchoReply, packet[h.Len:]
	}

	m, err := icmp.ParseMessage(protocol, packet)
	if err != nil || m.Type != reply {
		return 0, false
	}

	echo, ok := m.Body.(*icmp.Echo)
	if !ok || echo.ID != int(p.id) || echo.Seq >= len(p.sent) || !bytes.Equal(echo.Data, p.data) {
		return 0, false
	}

	return echo.Seq, true
}

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/tombolo-cni/tombolo/netns"
)

// A request may be lost, as long as a port is not quite up, and a busy machine takes its
// time for an answer.
const (
	pingAgain  = time.Second
	pingGiveUp = time.Minute
)

// ping sends ICMP echo requests from a namespace until one is answered.
func ping(from *netns.NS, to netip.Addr) error {
	network, request, reply := "ip6:ipv6-icmp", byte(128), byte(129) // RFC 4443
	if to.Is4() {
		network, request, reply = "ip4:icmp", 8, 0 // RFC 792
	}
	var conn *net.IPConn
	err := from.Do(func() error {
		var err error
		conn, err = net.DialIP(network, nil, &net.IPAddr{IP: to.AsSlice()})
		return err
	})
	if err != nil {
		return fmt.Errorf("ping %s: %w", to, err)
	}
	defer conn.Close()
	message := []byte{request, 0, 0, 0, 0x70, 0x6f, 0, 1}
	// Of ICMPv6 the kernel computes the checksum, since addresses are part of it.
	if to.Is4() {
		binary.BigEndian.PutUint16(message[2:], checksum(message))
	}
	for giveUp := time.Now().Add(pingGiveUp); ; {
		err := try(conn, message, reply)
		if err == nil {
			return nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || time.Now().After(giveUp) {
			return fmt.Errorf("ping %s: %w", to, err)
		}
	}
}

// try sends one request, and waits a while for an answer.
func try(conn *net.IPConn, message []byte, reply byte) error {
	if err := conn.SetDeadline(time.Now().Add(pingAgain)); err != nil {
		return err
	}
	if _, err := conn.Write(message); err != nil {
		return err
	}
	buf := make([]byte, 1500)
	for {
		// Unlike Read, it takes the IPv4 header off.
		n, _, err := conn.ReadFromIP(buf)
		if err != nil {
			return err
		}
		if n >= len(message) && buf[0] == reply && string(buf[4:8]) == string(message[4:]) {
			return nil
		}
	}
}

// checksum is that of RFC 1071, of an even number of bytes.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

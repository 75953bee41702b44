// Command pause is the one file in the image that the tests' pods are made of. It
// tells callers of port 8080, over TCP or UDP, the address and port that it sees as
// theirs.
package main

import (
	"fmt"
	"net"
	"os"
)

const port = ":8080"

func main() {
	err := serve()
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func serve() error {
	packets, err := net.ListenPacket("udp", port)
	if err != nil {
		return err
	}
	// Second: a caller that gets an answer over TCP may count on one over UDP.
	streams, err := net.Listen("tcp", port)
	if err != nil {
		return err
	}
	failed := make(chan error)
	go func() { failed <- answerPackets(packets) }()
	go func() { failed <- answerStreams(streams) }()
	return <-failed
}

func answerPackets(conn net.PacketConn) error {
	buf := make([]byte, 2048)
	for {
		_, from, err := conn.ReadFrom(buf)
		if err != nil {
			return err
		}
		// A caller that cannot be answered has gone, or is not reachable: the next may be.
		conn.WriteTo([]byte(from.String()), from)
	}
}

func answerStreams(l net.Listener) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go answer(conn)
	}
}

func answer(conn net.Conn) {
	defer conn.Close()
	// A close with the question unread would reset the connection.
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		conn.Write([]byte(conn.RemoteAddr().String()))
	}
}

package main

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFlowIsTimed takes the node for its own pod, at the port where pods answer.
func TestFlowIsTimed(t *testing.T) {
	t.Parallel()
	n := outsideNode(t, scenario{})
	p := &probe{node: n, port: udpPort}
	if _, _, err := p.flow(); !errors.Is(err, unix.ECONNREFUSED) {
		t.Fatalf("nobody listens, and the error is %v", err)
	}
	echo, err := startEcho(n.ns.NS)
	if err != nil {
		t.Fatal(err)
	}
	first, next, err := p.flow()
	if err != nil {
		t.Error(err)
	}
	if first <= 0 || next <= 0 {
		t.Errorf("round trips of %g and %g us", first, next)
	}
	echo.stop()
	if _, _, err := p.flow(); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("nobody listens any more, and the error is %v", err)
	}
}

func TestForeignAnswerIsAnError(t *testing.T) {
	t.Parallel()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	for _, answer := range [][]byte{{8}, {7, 7}} {
		if _, err := unix.Write(pair[1], answer); err != nil {
			t.Fatal(err)
		}
		if _, err := roundTrip(pair[0], 7); err == nil {
			t.Errorf("%v was taken for what was sent", answer)
		}
	}
}

package transport

import (
	"context"
	"fmt"
	"time"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
)

// argument is the error about an argument that cannot be meant.
func argument(what string) error { return fmt.Errorf("%w: %s", tombolo.ErrInvalid, what) }

// dialed refuses a transport that was not dialed, or is closed.
func dialed(is bool) error {
	if !is {
		return argument("the transport was not opened by Dial, or is closed")
	}
	return nil
}

// dialedFor refuses a context that is nil as well.
func dialedFor(ctx context.Context, is bool) error {
	if ctx == nil {
		return argument("no context")
	}
	return dialed(is)
}

func noPacket() error { return argument("no packet") }

// unopened stands in for a transport that is nil.
type unopened struct{}

func (unopened) Send(context.Context, *dhcpc.Packet) error { return dialed(false) }
func (unopened) Receive(context.Context, time.Time) (*dhcpc.Packet, error) {
	return nil, dialed(false)
}
func (unopened) Close() error { return dialed(false) }

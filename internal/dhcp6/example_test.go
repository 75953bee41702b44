package dhcp6_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/dhcp6"
	"github.com/tombolo-cni/tombolo/netns"
)

// The client of a pod, by a socket in the pod's namespace: until it has a lease.
func Example() {
	pod, err := netns.Open("/run/netns/pod-7")
	if err != nil {
		log.Fatal(err)
	}
	defer pod.Close()
	conn, err := transport.DialUDP6(&transport.Config{NetNS: pod, Link: 2}) // eth0's index there
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	machine, err := dhcp6.NewMachine(&dhcp6.Config{DUID: dhcp6.DUID([16]byte{15: 7}), IAID: 1, RapidCommit: true})
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	session, event := machine.Start(time.Now(), rand.Uint64()), dhcp6.Event{}
	for {
		next, out := machine.Step(session, time.Now(), event)
		session, event = next, dhcp6.Event{}
		if out.Bound != nil {
			fmt.Println(out.Bound.Address, out.Bound.DNS)
			return
		}
		if out.Send != nil {
			err = conn.Send(ctx, out.Send)
		}
		if err == nil {
			event.Message, err = conn.Receive(ctx, session.Wake())
		}
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			log.Fatal(err)
		}
		err = nil
	}
}

package nltest

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Objects are of the sorts that a package reads and copies: one is made by each command.
type Objects struct {
	Commands string // a line each: of ip(8), or a name of ByHand
	ByHand   map[string]func() (netlink.Message, error)
	IP       func(args ...string) error
	// List gives all of them as the kernel writes them, and Identity what two listings of
	// one have in common.
	List     func(*nl.Conn) []netlink.Message
	Identity func(netlink.Message) string
	// Copy and Del give the requests that add and delete what a message is of. Said is what
	// a message says, without what is the kernel's to say.
	Copy, Del func(netlink.Message) (netlink.Message, error)
	Said      func(netlink.Message) []string
	// Refused is called where a command is; Skips names objects that are no command's, or
	// that cannot be copied.
	Refused func(command string, err error)
	Skips   func(command string, m netlink.Message, err error) bool
	// Least is how many copies there must be.
	Least int
}

// CopiesLoseNothing holds the copies of what kernels listed, by the recordings of the
// package, to what they listed.
func (o *Objects) CopiesLoseNothing(t *testing.T) {
	for kernel, list := range Recordings(t) {
		t.Run(kernel, func(t *testing.T) {
			t.Parallel()
			copies := 0
			for _, r := range list {
				for _, m := range r.Messages {
					copied, err := o.Copy(m)
					if o.Skips(r.Command, m, err) {
						continue
					}
					if err != nil {
						t.Errorf("%s: %v", r.Command, err)
						continue
					}
					if diff := cmp.Diff(o.Said(m), o.Said(copied)); diff != "" {
						t.Errorf("%s (-listed +copied):\n%s", r.Command, diff)
					}
					copies++
				}
			}
			if copies < o.Least {
				t.Errorf("%d copies: the recordings cannot be whole", copies)
			}
		})
	}
}

// each makes one object after the other in a namespace, and gives what the kernel lists
// since.
func (o *Objects) each(t *testing.T, ns *netns.NS, look func(c *nl.Conn, command string, made []netlink.Message, err error)) {
	t.Helper()
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for command := range strings.Lines(strings.TrimSpace(o.Commands)) {
		command = strings.TrimSpace(command)
		before := map[string]bool{}
		for _, m := range o.List(conn) {
			before[o.Identity(m)] = true
		}
		var err error
		if request := o.ByHand[command]; request != nil {
			err = ask(conn)(request())
		} else {
			err = o.IP(strings.Fields(command)[1:]...)
		}
		made := slices.DeleteFunc(o.List(conn), func(m netlink.Message) bool { return before[o.Identity(m)] })
		look(conn, command, made, err)
	}
}

func ask(c *nl.Conn) func(netlink.Message, error) error {
	return func(m netlink.Message, err error) error {
		var b nl.Batch
		b.Add("ask", nil, m, err)
		return c.Execute(&b)
	}
}

// AreTakenAgain deletes objects of every sort, adds them as they were listed, and compares
// the kernel's listings.
func (o *Objects) AreTakenAgain(t *testing.T, ns *netns.NS) {
	taken := 0
	o.each(t, ns, func(c *nl.Conn, command string, made []netlink.Message, err error) {
		if err != nil {
			o.Refused(command, err)
			return
		}
		for _, m := range made {
			copied, err := o.Copy(m)
			if o.Skips(command, m, err) {
				continue
			}
			if err != nil {
				t.Errorf("%s: %v", command, err)
				continue
			}
			// A neighbour's state "delay" ends with the kernel's next tick, so that it may
			// be over when it is listed.
			listed := false
			for tries := 0; tries < 10 && !listed; tries++ {
				if err := ask(c)(o.Del(m)); err != nil {
					t.Fatalf("%s: delete it: %v", command, err)
				}
				if err := ask(c)(copied, nil); err != nil {
					t.Fatalf("%s: add the copy: %v", command, err)
				}
				listed = slices.ContainsFunc(o.List(c), func(have netlink.Message) bool { return cmp.Equal(o.Said(have), o.Said(m)) })
			}
			if !listed {
				t.Errorf("%s: %q is no more listed", command, o.Said(m))
			}
			taken++
		}
	})
	if taken < o.Least {
		t.Errorf("%d copies: the kernel refused too many commands", taken)
	}
}

// Record writes the file of the running kernel anew.
func (o *Objects) Record(t *testing.T, ns *netns.NS) {
	var records []Recording
	o.each(t, ns, func(_ *nl.Conn, command string, made []netlink.Message, err error) {
		r := Recording{Command: command, Messages: made}
		if err != nil {
			r.Refused, r.Messages = strings.TrimPrefix(err.Error(), command+": "), nil
		}
		t.Log(command, len(r.Messages), r.Refused)
		records = append(records, r)
	})
	SaveRecordings(t, records)
}

package dhcpc

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

var errNotThat = errors.New("it is the host's own address")

// declining refuses one address, or all if that is empty.
func declining(address string) func(*Config) {
	return func(c *Config) {
		c.Refuse = func(l, _ *Lease) error {
			if address == "" || l.Address.Addr() == addr(address) {
				return errNotThat
			}
			return nil
		}
	}
}

// declined fails the test unless what is granted was declined just now.
func (b *bench) declined(lost bool) {
	b.t.Helper()
	b.want(initial)
	b.wantSent(dhcpv4.MessageTypeDecline)
	b.option(50, raw4(clientIP))
	b.option(54, raw4(serverIP))
	if !errors.Is(b.out.Err, ErrRefused) || !errors.Is(b.out.Err, errNotThat) || b.out.Bound != nil || (b.out.Lost != nil) != lost || b.s.Lease() != nil {
		b.t.Errorf("output %+v", b.out)
	}
	got := b.s.wake.Sub(b.now)
	expect.That(b.t, got >= declineBackOff, "it starts over after %s, want %s at least", got, declineBackOff)
	b.tick()
	b.want(selecting)
	b.option(50, nil) // nor is it asked for
	// Another server's word is worth more by now.
	b.hear(offer, yiaddr(otherIP))
	b.want(selecting)
	b.hear(offer, yiaddr(otherIP), from(rogueIP))
	b.want(requesting)
}

func TestAnotherServersOfferIsTakenInPlaceOfARefusedOne(t *testing.T) {
	t.Parallel()
	b := newBench(t, declining(clientIP))
	b.tick()
	b.hear(offer)
	b.want(selecting)
	b.hear(offer, yiaddr(otherIP), from(rogueIP))
	b.want(requesting)
	b.option(50, raw4(otherIP))
}

func TestARefusedAddressIsDeclinedOnceItIsGranted(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		config func(*Config)
		grant  func(*bench)
	}{
		"where nobody offers another": {func(*Config) {}, func(b *bench) {
			b.tick()
			b.hear(offer)
			b.tick()
			b.want(requesting)
			b.hear(ack)
		}},
		"with the hint": {func(c *Config) { c.Address = addr(clientIP) }, func(b *bench) {
			b.tick()
			b.hear(offer)
			b.tick()
			b.hear(ack)
		}},
		"with rapid commit":           {func(c *Config) { c.RapidCommit = true }, func(b *bench) { b.tick(); b.hear(ack, set(80, []byte{})) }},
		"before anybody is asked for": {func(c *Config) { c.DetectConflicts = true }, func(b *bench) { b.tick(); b.hear(offer); b.tick(); b.hear(ack) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, declining(clientIP), tt.config)
			tt.grant(b)
			b.declined(false)
		})
	}
}

// What may be had depends on what else there is, and that changes.
func TestARefusedLeaseIsDeclinedWhenItIsRenewed(t *testing.T) {
	t.Parallel()
	for _, state := range []state{renewing, rebinding} {
		t.Run(state.String(), func(t *testing.T) {
			t.Parallel()
			var held []*Lease
			refuse := false
			b := newBench(t, func(c *Config) {
				c.Refuse = func(l, has *Lease) error {
					held = append(held, has)
					if refuse && l.Address.Addr() == addr(clientIP) {
						return errNotThat
					}
					return nil
				}
			})
			b.bound()
			if held[0] != nil {
				t.Errorf("asked with %v, want no lease that is held", held[0])
			}
			b.tick()
			for b.s.state != state {
				b.tick()
			}
			b.want(state)
			refuse = true
			had := b.s.Lease()
			b.hear(ack)
			if held[len(held)-1] != had {
				t.Errorf("asked with %v, want the lease that is held", held[len(held)-1])
			}
			b.declined(true)
		})
	}
}

func TestAcquireSaysWhatWasRefusedAndWhy(t *testing.T) {
	t.Parallel()
	_, c := newWorld(t, honest(), declining(""))
	_, err := c.Acquire(t.Context())
	want := "before: address not taken: 10.9.0.7, by 10.9.0.1: it is the host's own address"
	expect.That(t, strings.HasSuffix(fmt.Sprint(err), want) && errors.Is(err, ErrRefused),
		"got %v, want … %s", err, want)
}

func TestALeaseSaysThatItsAddressIsARouters(t *testing.T) {
	t.Parallel()
	classless := func(via string) []byte { return append([]byte{8, 10}, raw4(via)...) }
	for name, tt := range map[string]struct {
		add  []change
		want bool
	}{
		"another's":                       {nil, false},
		"router":                          {[]change{set(3, raw4(clientIP))}, true},
		"second router":                   {[]change{set(3, raw4(serverIP, clientIP))}, true},
		"classless route":                 {[]change{set(121, classless(clientIP))}, true},
		"classless route as 249":          {[]change{set(249, classless(clientIP))}, true},
		"static route":                    {[]change{set(33, raw4("10.0.0.0", clientIP))}, true},
		"router beside a classless route": {[]change{set(3, raw4(clientIP)), set(121, classless(serverIP))}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.bound(tt.add...)
			expect.Equal(t, b.s.Lease().OwnRouter, tt.want, "own router")
		})
	}
}

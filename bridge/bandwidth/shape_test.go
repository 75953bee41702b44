package bandwidth_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestEffectiveBurstReachesTheRateAndDoesNotDefeatIt(t *testing.T) {
	t.Parallel()
	const twoFrames = 2 * (1500 + 18) * 8
	for name, c := range map[string]struct {
		limit, want bandwidth.Limit
		adjusted    string // the beginning of what is said
	}{
		"no limit":                        {bandwidth.Limit{}, bandwidth.Limit{}, ""},
		"no burst, high rate: 5 ms":       {bandwidth.Limit{Rate: 1e9}, bandwidth.Limit{Rate: 1e9, Burst: 5e6}, ""},
		"no burst, low rate: two frames":  {bandwidth.Limit{Rate: 1e6}, bandwidth.Limit{Rate: 1e6, Burst: twoFrames}, ""},
		"a burst in between stays":        {bandwidth.Limit{Rate: 10e6, Burst: 100e3}, bandwidth.Limit{Rate: 10e6, Burst: 100e3}, ""},
		"the longest stays: 50 ms":        {bandwidth.Limit{Rate: 10e6, Burst: 500e3}, bandwidth.Limit{Rate: 10e6, Burst: 500e3}, ""},
		"one byte longer does not":        {bandwidth.Limit{Rate: 10e6, Burst: 500e3 + 8}, bandwidth.Limit{Rate: 10e6, Burst: 500e3}, "ingress burst of 500008 bit would defeat the rate: it is what 10 Mbit/s takes 50ms to send; 500000 bit"},
		"what runtimes fill in, 2³¹ - 1":  {bandwidth.Limit{Rate: 10e6, Burst: math.MaxInt32}, bandwidth.Limit{Rate: 10e6, Burst: 500e3}, "ingress burst of 2147483647 bit would defeat the rate: it is what 10 Mbit/s takes 3m34.748s to send"},
		"what runtimes fill in, 2³² - 1":  {bandwidth.Limit{Rate: 10e6, Burst: math.MaxUint32}, bandwidth.Limit{Rate: 10e6, Burst: 500e3}, "ingress burst of 4294967295 bit"},
		"the largest number there is":     {bandwidth.Limit{Rate: 10e6, Burst: math.MaxUint64}, bandwidth.Limit{Rate: 10e6, Burst: 500e3}, "ingress burst of 18446744073709551615 bit"},
		"less than a frame":               {bandwidth.Limit{Rate: 10e6, Burst: 8000}, bandwidth.Limit{Rate: 10e6, Burst: twoFrames}, "ingress burst of 8000 bit is shorter than two frames"},
		"less than a byte is none":        {bandwidth.Limit{Rate: 1e9, Burst: 7}, bandwidth.Limit{Rate: 1e9, Burst: 5e6}, ""},
		"a rate so low that frames count": {bandwidth.Limit{Rate: 1e3, Burst: math.MaxInt32}, bandwidth.Limit{Rate: 1e3, Burst: twoFrames}, "ingress burst of 2147483647 bit"},
		"odd bits of the rate go":         {bandwidth.Limit{Rate: 10e6 + 7, Burst: 100e3 + 7}, bandwidth.Limit{Rate: 10e6, Burst: 100e3}, ""},
		"the highest rate":                {bandwidth.Limit{Rate: 1e15}, bandwidth.Limit{Rate: 1e15, Burst: 1 << 34}, ""},
	} {
		got, adjusted, err := bandwidth.Shape{Ingress: c.limit}.Effective(1500)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		expect.NoDiff(t, cmp.Diff(bandwidth.Shape{Ingress: c.want}, got), "%s", name)
		if len(adjusted) > 1 || (len(adjusted) == 1) != (c.adjusted != "") || c.adjusted != "" && !strings.HasPrefix(adjusted[0], c.adjusted) {
			t.Errorf("%s: it is said %q, want %q", name, adjusted, c.adjusted)
		}
	}
}

func TestEffectiveTreatsBothDirectionsAlike(t *testing.T) {
	t.Parallel()
	limit := bandwidth.Limit{Rate: 10e6, Burst: math.MaxInt32}
	got, adjusted, err := bandwidth.Shape{Ingress: limit, Egress: limit}.Effective(9000)
	must.That(t, err == nil && got.Ingress == got.Egress && len(adjusted) == 2,
		"effective is %+v, with %d adjustments, %v", got, len(adjusted), err)
	if !strings.HasPrefix(adjusted[1], "egress burst of 2147483647 bit would defeat the rate") {
		t.Errorf("second adjustment %q", adjusted[1])
	}
}

func TestEffectiveOfAnEffectiveShapeIsItself(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	limit := func() bandwidth.Limit {
		return bandwidth.Limit{Rate: 1000 + r.Uint64()>>(15+r.IntN(40)), Burst: r.Uint64() >> r.IntN(64)}
	}
	for range 10000 {
		s, mtu := bandwidth.Shape{Ingress: limit(), Egress: limit()}, 68+r.IntN(65535-68)
		once, _, err := s.Effective(mtu)
		must.Succeed(t, err, "%+v", s)
		twice, adjusted, err := once.Effective(mtu)
		must.That(t, err == nil && once == twice && len(adjusted) == 0,
			"%+v at an MTU of %d is first %+v, then %+v, %v, %v", s, mtu, once, twice, adjusted, err)
		least := uint64(mtu+18) * 2
		must.That(t, once.Ingress.Burst/8 >= least, "%+v at an MTU of %d: a burst of %d bytes", s, mtu, once.Ingress.Burst/8)
	}
}

func TestShapesThatCannotBeMeantAreRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		shape bandwidth.Shape
		mtu   int
		want  string
	}{
		"burst alone":           {bandwidth.Shape{Ingress: bandwidth.Limit{Burst: 8000}}, 1500, "ingress: invalid argument: a burst of 8000 bit without a rate"},
		"burst alone, egress":   {bandwidth.Shape{Egress: bandwidth.Limit{Burst: 8000}}, 1500, "egress: "},
		"megabits meant":        {bandwidth.Shape{Egress: bandwidth.Limit{Rate: 7}}, 1500, "a rate of 7 bit/s, where 8 bit/s is the least"},
		"beyond all links":      {bandwidth.Shape{Egress: bandwidth.Limit{Rate: 1e15 + 1}}, 1500, "1000 Tbit/s is the most"},
		"MTU of nothing":        {bandwidth.Shape{Egress: bandwidth.Limit{Rate: 1e6}}, 0, "an MTU of 0 bytes"},
		"MTU that no link has":  {bandwidth.Shape{Egress: bandwidth.Limit{Rate: 1e6}}, 65536, "an MTU of 65536 bytes"},
		"a minus one in 64 bit": {bandwidth.Shape{Ingress: bandwidth.Limit{Rate: math.MaxUint64}}, 1500, "0 means no limit"},
	} {
		_, _, err := c.shape.Effective(c.mtu)
		expect.That(t, errors.Is(err, tombolo.ErrInvalid) && strings.Contains(err.Error(), c.want),
			"%s: error is %v, want tombolo.ErrInvalid with %q", name, err, c.want)
	}
}

func TestZeroShape(t *testing.T) {
	t.Parallel()
	expect.That(t, (bandwidth.Shape{}).IsZero() && !(bandwidth.Shape{Egress: bandwidth.Limit{Rate: 1}}).IsZero() &&
		!(bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 1}}).IsZero(),
		"IsZero is wrong")
}

func TestIFBNamesAreDifferentAndSayWhose(t *testing.T) {
	t.Parallel()
	name := bandwidth.IFBName(hash)
	expect.That(t, len(name) <= 15, "%q is too long for a link", name)
	if want := "ifb" + hash; name != want || bandwidth.IFBName("veth"+hash) != want {
		t.Errorf("%q and %q, want %q", name, bandwidth.IFBName("veth"+hash), want)
	}
	expect.That(t, bandwidth.IFBName("0123456789a") != bandwidth.IFBName("0123456789b"), "two hashes, one name")
}

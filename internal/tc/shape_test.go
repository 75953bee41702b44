package tc_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/tc"
)

func TestEffectiveBurstReachesTheRateAndDoesNotDefeatIt(t *testing.T) {
	t.Parallel()
	const twoFrames = 2 * (1500 + 18) * 8
	for name, c := range map[string]struct {
		limit, want tc.Limit
		adjusted    string // the beginning of what is said
	}{
		"no limit":                        {tc.Limit{}, tc.Limit{}, ""},
		"no burst, high rate: 5 ms":       {tc.Limit{Rate: 1e9}, tc.Limit{Rate: 1e9, Burst: 5e6}, ""},
		"no burst, low rate: two frames":  {tc.Limit{Rate: 1e6}, tc.Limit{Rate: 1e6, Burst: twoFrames}, ""},
		"a burst in between stays":        {tc.Limit{Rate: 10e6, Burst: 100e3}, tc.Limit{Rate: 10e6, Burst: 100e3}, ""},
		"the longest stays: 50 ms":        {tc.Limit{Rate: 10e6, Burst: 500e3}, tc.Limit{Rate: 10e6, Burst: 500e3}, ""},
		"one byte longer does not":        {tc.Limit{Rate: 10e6, Burst: 500e3 + 8}, tc.Limit{Rate: 10e6, Burst: 500e3}, "ingress burst of 500008 bit would defeat the rate: it is what 10 Mbit/s takes 50 ms to send; 500000 bit"},
		"what runtimes fill in, 2³¹ - 1":  {tc.Limit{Rate: 10e6, Burst: math.MaxInt32}, tc.Limit{Rate: 10e6, Burst: 500e3}, "ingress burst of 2147483647 bit would defeat the rate: it is what 10 Mbit/s takes 215 s to send"},
		"what runtimes fill in, 2³² - 1":  {tc.Limit{Rate: 10e6, Burst: math.MaxUint32}, tc.Limit{Rate: 10e6, Burst: 500e3}, "ingress burst of 4294967295 bit"},
		"the largest number there is":     {tc.Limit{Rate: 10e6, Burst: math.MaxUint64}, tc.Limit{Rate: 10e6, Burst: 500e3}, "ingress burst of 18446744073709551615 bit"},
		"less than a frame":               {tc.Limit{Rate: 10e6, Burst: 8000}, tc.Limit{Rate: 10e6, Burst: twoFrames}, "ingress burst of 8000 bit is shorter than two frames"},
		"less than a byte is none":        {tc.Limit{Rate: 1e9, Burst: 7}, tc.Limit{Rate: 1e9, Burst: 5e6}, ""},
		"a rate so low that frames count": {tc.Limit{Rate: 1e3, Burst: math.MaxInt32}, tc.Limit{Rate: 1e3, Burst: twoFrames}, "ingress burst of 2147483647 bit"},
		"odd bits of the rate go":         {tc.Limit{Rate: 10e6 + 7, Burst: 100e3 + 7}, tc.Limit{Rate: 10e6, Burst: 100e3}, ""},
		"the highest rate":                {tc.Limit{Rate: 1e15}, tc.Limit{Rate: 1e15, Burst: 1 << 34}, ""},
	} {
		got, adjusted, err := tc.Shape{Ingress: c.limit}.Effective(1500)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if diff := cmp.Diff(tc.Shape{Ingress: c.want}, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if len(adjusted) > 1 || (len(adjusted) == 1) != (c.adjusted != "") || c.adjusted != "" && !strings.HasPrefix(adjusted[0].String(), c.adjusted) {
			t.Errorf("%s: it is said %q, want %q", name, adjusted, c.adjusted)
		}
	}
}

func TestEffectiveTreatsBothDirectionsAlike(t *testing.T) {
	t.Parallel()
	limit := tc.Limit{Rate: 10e6, Burst: math.MaxInt32}
	got, adjusted, err := tc.Shape{Ingress: limit, Egress: limit}.Effective(9000)
	if err != nil || got.Ingress != got.Egress || len(adjusted) != 2 {
		t.Fatalf("effective is %+v, with %d adjustments, %v", got, len(adjusted), err)
	}
	want := tc.Adjustment{Direction: "egress", Rate: 10e6, Asked: math.MaxInt32, Effective: 500e3}
	if diff := cmp.Diff(want, adjusted[1]); diff != "" {
		t.Errorf("second adjustment (-want +got):\n%s", diff)
	}
}

func TestEffectiveOfAnEffectiveShapeIsItself(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	limit := func() tc.Limit {
		return tc.Limit{Rate: 1000 + r.Uint64()>>(15+r.IntN(40)), Burst: r.Uint64() >> r.IntN(64)}
	}
	for range 10000 {
		s, mtu := tc.Shape{Ingress: limit(), Egress: limit()}, 68+r.IntN(65535-68)
		once, _, err := s.Effective(mtu)
		if err != nil {
			t.Fatalf("%+v: %v", s, err)
		}
		twice, adjusted, err := once.Effective(mtu)
		if err != nil || once != twice || len(adjusted) > 0 {
			t.Fatalf("%+v at an MTU of %d is first %+v, then %+v, %v, %v", s, mtu, once, twice, adjusted, err)
		}
		if least := uint64(mtu+18) * 2; once.Ingress.Burst/8 < least {
			t.Fatalf("%+v at an MTU of %d: a burst of %d bytes", s, mtu, once.Ingress.Burst/8)
		}
	}
}

func TestShapesThatCannotBeMeantAreRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		shape tc.Shape
		mtu   int
		want  string
	}{
		"burst alone":           {tc.Shape{Ingress: tc.Limit{Burst: 8000}}, 1500, "ingress: invalid argument: a burst of 8000 bit without a rate"},
		"burst alone, egress":   {tc.Shape{Egress: tc.Limit{Burst: 8000}}, 1500, "egress: "},
		"megabits meant":        {tc.Shape{Egress: tc.Limit{Rate: 100}}, 1500, "a rate of 100 bit/s, where 1 kbit/s is the least"},
		"beyond all links":      {tc.Shape{Egress: tc.Limit{Rate: 1e15 + 1}}, 1500, "1000 Tbit/s is the most"},
		"MTU of nothing":        {tc.Shape{Egress: tc.Limit{Rate: 1e6}}, 0, "an MTU of 0 bytes"},
		"MTU that no link has":  {tc.Shape{Egress: tc.Limit{Rate: 1e6}}, 65536, "an MTU of 65536 bytes"},
		"a minus one in 64 bit": {tc.Shape{Ingress: tc.Limit{Rate: math.MaxUint64}}, 1500, "0 means no limit"},
	} {
		_, _, err := c.shape.Effective(c.mtu)
		if !errors.Is(err, tc.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error is %v, want ErrInvalid with %q", name, err, c.want)
		}
	}
}

func TestZeroShape(t *testing.T) {
	t.Parallel()
	if !(tc.Shape{}).IsZero() || (tc.Shape{Egress: tc.Limit{Rate: 1}}).IsZero() || (tc.Shape{Ingress: tc.Limit{Rate: 1}}).IsZero() {
		t.Error("IsZero is wrong")
	}
}

func TestIFBNamesAreDifferentAndFindTheirHash(t *testing.T) {
	t.Parallel()
	name := tc.IFBName(hash)
	if len(name) > 15 {
		t.Errorf("%q is too long for a link", name)
	}
	if got, ok := tc.IFBHash(name); !ok || got != hash {
		t.Errorf("hash of %q is %q, %v", name, got, ok)
	}
	for _, other := range []string{"ifb0", "ifb", "bwp0123456789a", "ifb0123456789A", "ifb0123456789ab", ""} {
		if h, ok := tc.IFBHash(other); ok {
			t.Errorf("%q has the hash %q", other, h)
		}
	}
	if tc.IFBName("0123456789a") == tc.IFBName("0123456789b") {
		t.Error("two hashes, one name")
	}
}

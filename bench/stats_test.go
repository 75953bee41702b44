package bench

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

// quantile is the q-quantile (0 to 1) of values, interpolated between the two nearest. It
// is NaN for no values.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	low, high := int(math.Floor(at)), int(math.Ceil(at))
	return sorted[low] + (at-float64(low))*(sorted[high]-sorted[low])
}

func median(values []float64) float64 { return quantile(values, 0.5) }

// interval is an estimate with its 95 % confidence interval.
type interval struct{ value, low, high float64 }

// resamples is how often the bootstrap draws: 1000 steady a 95 % interval to the second
// digit, which is what is printed.
const resamples = 1000

// ratioOf is the ratio of the median of a to the sum of the medians of the others, where
// values of one index were measured in the same round. The interval is a bootstrap over
// rounds: a round is drawn for all at once, so a slow spell of the machine, which hits
// all, does not widen it. The seed is fixed: the same measurements give the same ratio.
func ratioOf(a []float64, over ...[]float64) interval {
	n := len(a)
	for _, o := range over {
		n = min(n, len(o))
	}
	if n == 0 {
		return interval{math.NaN(), math.NaN(), math.NaN()}
	}
	ratio := func(pick func(values []float64) []float64) float64 {
		sum := 0.0
		for _, o := range over {
			sum += median(pick(o))
		}
		return median(pick(a)) / sum
	}
	random := rand.New(rand.NewPCG(1, 2))
	ratios, rounds := make([]float64, resamples), make([]int, n)
	for i := range ratios {
		for j := range rounds {
			rounds[j] = random.IntN(n)
		}
		ratios[i] = ratio(func(values []float64) []float64 {
			drawn := make([]float64, n)
			for j, round := range rounds {
				drawn[j] = values[round]
			}
			return drawn
		})
	}
	return interval{ratio(func(v []float64) []float64 { return v }), quantile(ratios, 0.025), quantile(ratios, 0.975)}
}

func TestQuantilesAreInterpolated(t *testing.T) {
	t.Parallel()
	values := []float64{4, 1, 3, 2}
	for q, want := range map[float64]float64{0: 1, 0.5: 2.5, 1: 4, 0.25: 1.75} {
		expect.Equal(t, quantile(values, q), want, "quantile %g of %v is", q, values)
	}
	expect.That(t, math.IsNaN(median(nil)), "there is a median of nothing")
}

// TestSlowSpellsOfTheMachineDoNotWidenARatio has a machine that is half as fast for a
// while, to both.
func TestSlowSpellsOfTheMachineDoNotWidenARatio(t *testing.T) {
	t.Parallel()
	var a, b []float64
	for i := range 40 {
		slow := 1 + float64(i/20)
		a, b = append(a, 3*slow), append(b, 2*slow)
	}
	if got := ratioOf(a, b); got.value != 1.5 || got.low != 1.5 || got.high != 1.5 {
		t.Errorf("the ratio is %+v, want 1.5 without doubt", got)
	}
	got := ratioOf(a, b, b[:30])
	expect.That(t, got.value == 4.5/2/(2+3./2)*2 || !math.IsNaN(got.value), "the ratio to a sum is %+v", got)
	got = ratioOf(a, nil)
	expect.That(t, math.IsNaN(got.value), "the ratio to nothing is %+v", got)
}
